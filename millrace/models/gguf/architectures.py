"""What each GGUF architecture looks like in MLX: its config.json and the names of its tensors.

Pure translation of metadata and shapes; no tensor is read but the small table of rope factors.
A tensor that has no place in the MLX model is refused by name, never dropped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import ModelError
from millrace.models.gguf.reader import GGUF

ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BIASED = ("attn_q", "attn_k", "attn_v")
_NAME = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<module>[a-z_]+)\.(?P<part>weight|bias)$")


@dataclass(frozen=True)
class ArchitectureShape:
    """How one architecture differs from a plain Llama."""

    model_type: str
    class_name: str
    block: dict[str, str]
    rotated_rows: bool = False
    """q and k rows are stored pairwise interleaved per head, and are to be put back."""
    norms_plus_one: bool = False
    """Norm weights are stored with 1 added, which the MLX model adds itself."""
    biased: tuple[str, ...] = ()
    fixed_head_dim: bool = False
    """The MLX model knows no head size but hidden size over heads."""


SHAPES = {
    "llama": ArchitectureShape("llama", "LlamaForCausalLM", _BLOCK, rotated_rows=True),
    "qwen2": ArchitectureShape(
        "qwen2", "Qwen2ForCausalLM", _BLOCK, biased=_BIASED, fixed_head_dim=True
    ),
    "qwen3": ArchitectureShape("qwen3", "Qwen3ForCausalLM", _BLOCK | _HEAD_NORMS),
    "gemma3": ArchitectureShape(
        "gemma3_text", "Gemma3ForCausalLM", _BLOCK | _HEAD_NORMS | _GEMMA_NORMS, norms_plus_one=True
    ),
}


@dataclass(frozen=True)
class ConversionPlan:
    """Where every tensor goes, and the config.json of the result."""

    shape: ArchitectureShape
    config: dict[str, Any]
    targets: dict[str, str]
    """GGUF tensor name to MLX parameter name."""
    zeros: dict[str, int]
    """Biases the MLX model has and the file leaves out, with their lengths."""

    def heads(self, name: str) -> int | None:
        """The number of heads whose rows of this tensor are interleaved, if they are."""
        if not self.shape.rotated_rows:
            return None
        target = self.targets[name]
        if ".q_proj." in target:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in target else None

    def is_shifted_norm(self, name: str) -> bool:
        return self.shape.norms_plus_one and "norm" in self.targets[name]


def plan(model: GGUF) -> ConversionPlan:
    arch = model.need("general.architecture", str)
    shape = SHAPES.get(arch)
    if shape is None:
        raise ModelError(
            f"{model.path} holds a model of the architecture '{arch}'. GGUF import knows "
            f"{', '.join(SHAPES)}; use the model's MLX or Hugging Face folder instead."
        )
    if model.get(f"{arch}.expert_count", int):
        raise ModelError(
            f"{model.path} is a mixture of experts, which GGUF import does not know. "
            f"Use the model's MLX or Hugging Face folder instead."
        )
    layers = model.need(f"{arch}.block_count", int)
    if not 1 <= layers <= len(model.tensors):
        raise ModelError(
            f"{model.path} is corrupt: it claims {layers} layers and has {len(model.tensors)} tensors."
        )
    targets = {name: _target(model, shape, name, layers) for name in model.tensors}
    targets.pop(ROPE_FACTORS, None)
    config = _config(model, arch, shape, layers)
    biased = _biased(model, shape)
    if shape.model_type == "llama":
        config["attention_bias"] = "attn_q" in biased
        config["mlp_bias"] = "ffn_up" in biased
    zeros = _check_complete(model, shape, layers, biased)
    return ConversionPlan(shape, config, targets, zeros)


def _target(model: GGUF, shape: ArchitectureShape, name: str, layers: int) -> str:
    if name == ROPE_FACTORS:
        return name
    match = _NAME.match(name)
    if match is not None and match["layer"] is None and match["module"] in _TOP:
        return f"{_TOP[match['module']]}.{match['part']}"
    if match is not None and match["layer"] is not None and int(match["layer"]) < layers:
        module = shape.block.get(match["module"])
        if module is not None:
            return f"model.layers.{match['layer']}.{module}.{match['part']}"
    raise ModelError(
        f"{model.path} has a tensor '{name}' that a {shape.model_type} model has no place for, "
        f"so it would not run as it was made. Use the model's MLX or Hugging Face folder instead."
    )


def _biased(model: GGUF, shape: ArchitectureShape) -> tuple[str, ...]:
    """The modules that have a bias: a Llama has them for all of attention, or all of the MLP."""
    if shape.model_type != "llama":
        return shape.biased
    found = {name.split(".")[2] for name in model.tensors if name.endswith(".bias")}
    attention, mlp = (*_BIASED, "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
    return tuple(m for group in (attention, mlp) if found.intersection(group) for m in group)


def _check_complete(
    model: GGUF, shape: ArchitectureShape, layers: int, biased: tuple[str, ...]
) -> dict[str, int]:
    needed = ["token_embd.weight", "output_norm.weight"]
    needed += [f"blk.{i}.{module}.weight" for i in range(layers) for module in shape.block]
    for name in needed:
        if name not in model.tensors:
            raise ModelError(
                f"{model.path} is incomplete: the tensor '{name}' is missing. Download it again."
            )
    zeros = {}
    for i in range(layers):
        for module in biased:
            if f"blk.{i}.{module}.bias" not in model.tensors:
                rows = model.tensors[f"blk.{i}.{module}.weight"].shape[0]
                zeros[f"model.layers.{i}.{shape.block[module]}.bias"] = rows
    return zeros


def _config(model: GGUF, arch: str, shape: ArchitectureShape, layers: int) -> dict[str, Any]:
    def number(key: str) -> int:
        return model.need(f"{arch}.{key}", int)

    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{model.path} is incomplete: it has no token embedding.")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    if not heads or embedding.shape[1] != hidden:
        raise ModelError(
            f"{model.path} is corrupt: its embedding has {embedding.shape[1]} columns and "
            f"{heads} heads, and its metadata says {hidden}."
        )
    head_dim = model.get(f"{arch}.attention.key_length", int) or hidden // heads
    rotated = model.get(f"{arch}.rope.dimension_count", int) or head_dim
    queries = model.tensors.get("blk.0.attn_q.weight")
    if queries is not None and queries.shape[0] != heads * head_dim:
        raise ModelError(
            f"{model.path} is corrupt: its metadata says {heads} heads of {head_dim} values, and "
            f"'blk.0.attn_q.weight' has {queries.shape[0]} rows."
        )
    if rotated != head_dim or (shape.fixed_head_dim and head_dim * heads != hidden):
        raise ModelError(
            f"{model.path} has heads of {head_dim} values of which {rotated} are rotated, over "
            f"{hidden} values in {heads} heads, which MLX's {shape.model_type} model cannot run."
        )
    config: dict[str, Any] = {
        "model_type": shape.model_type,
        "architectures": [shape.class_name],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.get(f"{arch}.attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": model.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": number("context_length"),
        "rope_theta": model.get(f"{arch}.rope.freq_base", float) or 10000.0,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
    }
    if scaling := _rope_scaling(model, arch, config):
        config["rope_scaling"] = scaling
    if shape.model_type == "gemma3_text":
        config |= _gemma(model, arch, config)
    return config


def _gemma(model: GGUF, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    pattern = model.metadata.get(f"{arch}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        pattern = pattern.index(False) + 1 if False in pattern else layers + 1
    # The file does not carry the attention scale; only the 62-layer model departs from head_dim.
    scalar = config["hidden_size"] / heads if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": model.need(f"{arch}.attention.sliding_window", int),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": model.get(f"{arch}.rope.freq_base_swa", float) or 10000.0,
    }


def _rope_scaling(model: GGUF, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in model.tensors:
        return _rope_factors(model.tensors[ROPE_FACTORS].floats(), config)
    kind = model.get(f"{arch}.rope.scaling.type", str) or "none"
    factor = model.get(f"{arch}.rope.scaling.factor", float)
    if kind == "none" or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        original = model.get(f"{arch}.rope.scaling.original_context_length", int)
        window = original or int(config["max_position_embeddings"] / factor)
        return {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": window,
        }
    raise ModelError(
        f"{model.path} stretches its context by '{kind}', which GGUF import does not know "
        f"(it knows linear, yarn and tables of factors)."
    )


def _rope_factors(factors: np.ndarray[Any, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The rule of Llama 3 where its usual parameters give this table, else the table itself.

    MLX's longrope multiplies the wavelengths by a table and scales nothing else as long as the
    original window equals the window.
    """
    dim, base, window = config["head_dim"], config["rope_theta"], 8192
    if factors.size != dim // 2 or not np.isfinite(factors).all() or not (factors > 0).all():
        raise ModelError(f"The table of rope factors ({ROPE_FACTORS}) does not fit heads of {dim}.")
    factor = float(factors.max())
    wavelengths = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((window / wavelengths - 1) / 3, 0, 1)
    if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": window,
        }
    return {
        "rope_type": "longrope",
        "long_factor": factors.tolist(),
        "short_factor": factors.tolist(),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
