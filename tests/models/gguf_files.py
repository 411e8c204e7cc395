"""Small GGUF files of every supported architecture, written by the `gguf` package itself.

The weights are made under MLX's names first; the file's own conventions (interleaved rotary rows,
norms with 1 added) are applied on the way in, so that an import has to undo them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 256, 4, 2, 512, 2, 512
HEAD = HIDDEN // HEADS
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
TOKENS = [*LETTERS, *(m.replace(" ", "") for m in MERGES), "<|im_start|>", "<|im_end|>", "<tool>"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
BOS, EOS = len(TOKENS) - 3, len(TOKENS) - 2

_MATRICES = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}
_NORMS = {
    "llama": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass
class Written:
    """A file, and under MLX's names what an import of it must hold."""

    path: Path
    kinds: dict[str, Kind] = field(default_factory=dict)
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Kind = Kind.F32,
    *,
    untied: bool = False,
    biases: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    seed: int = 0,
    tokens: tuple[list[str], list[int]] = (TOKENS, TYPES),
) -> Written:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, arch, tokens, extra or {})
    generated = Written(path)

    def add(name: str, target: str, shape: tuple[int, ...]) -> None:
        if name in drop:
            return
        matrix = len(shape) == 2
        own = kind if matrix else Kind.F32
        raw, values = blocks(rng, shape, own)
        if not matrix and name.endswith("norm.weight"):
            values = (1 + 0.25 * values).astype(np.float16).astype(np.float32)
            raw = values
        generated.kinds[target] = own
        if arch == "gemma3" and "norm" in name:
            generated.weights[target] = values - np.float32(1)
        else:
            generated.weights[target] = values[_rows(arch, name, shape[0])]
        writer.add_tensor(name, raw, raw_dtype=own)

    vocab = len(tokens[0])
    add("token_embd.weight", "model.embed_tokens.weight", (vocab, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if untied:
        add("output.weight", "lm_head.weight", (vocab, HIDDEN))
    for i in range(LAYERS):
        at, to = f"blk.{i}", f"model.layers.{i}"
        for name, (target, shape) in _MATRICES.items():
            add(f"{at}.{name}.weight", f"{to}.{target}.weight", shape)
            if name in biases or (arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v")):
                add(f"{at}.{name}.bias", f"{to}.{target}.bias", shape[:1])
        for name, target in _NORMS.get(arch, _NORMS["llama"]).items():
            add(f"{at}.{name}.weight", f"{to}.{target}.weight", (HIDDEN,))
        if arch in ("qwen3", "gemma3"):
            for name, target in _HEAD_NORMS.items():
                add(f"{at}.{name}.weight", f"{to}.{target}.weight", (HEAD,))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return generated


def blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: Kind
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Random data in a ggml type, and the values it stands for.

    Types the `gguf` package can only read are filled with random bytes, drawn again where they
    would stand for values no weight has.
    """
    values = rng.normal(0, 0.5 / np.sqrt(shape[-1]), shape).astype(np.float32)
    if kind == Kind.F32:
        return values, values
    if kind == Kind.F16:
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    try:
        raw = quantize(values, kind)
    except NotImplementedError:
        raw = _random_blocks(rng, shape, kind)
    return raw, dequantize(raw, kind).reshape(shape)


def _random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: Kind
) -> np.ndarray[Any, Any]:
    block, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    left = np.arange(count)
    while len(left):
        with np.errstate(all="ignore"):
            worst = np.abs(dequantize(raw[left], kind)).max(axis=-1)
        left = left[~(worst < 4.0)]
        raw[left] = rng.integers(0, 256, (len(left), size), dtype=np.uint8)
    return raw.reshape(*shape[:-1], -1)


def _rows(arch: str, name: str, count: int) -> Any:
    """For each row in MLX's order, where the file has it.

    A head of d rows is stored as pairs: row i of its first half is followed by row i of its second.
    """
    if arch != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return slice(None)
    stored = []
    for head in range(count // HEAD):
        for half in range(2):
            stored += [head * HEAD + 2 * i + half for i in range(HEAD // 2)]
    return np.array(stored)


def _metadata(
    writer: gguf.GGUFWriter, arch: str, tokens: tuple[list[str], list[int]], extra: dict[str, Any]
) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    if arch in ("qwen3", "gemma3"):
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
    if arch == "gemma3":
        writer.add_sliding_window(8)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[0])
    writer.add_token_types(tokens[1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    for key, value in extra.items():
        writer.kv_data[0].pop(key, None)
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
