"""Tiny random encoders in folders as their authors publish them: names, files and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Weights = dict[str, np.ndarray[Any, Any]]
WIDTH, INNER, LAYERS, HEADS, POSITIONS = 32, 48, 3, 4, 96
_TEXT = "yes no the a cat dog sat on mat is of capital France Paris Berlin banana query document"
_TEXT += " Instruct Query Document instruct title none text judge :"
WORDS = _TEXT.split()
_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<think>", "</think>"]
_LETTERS = [chr(c) for c in range(33, 127)]


def vocabulary(special: list[str]) -> dict[str, int]:
    pieces = [*special, *_LETTERS, *(f"##{x}" for x in _LETTERS)]
    pieces += [w.lower() for w in WORDS] + WORDS
    return {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}


def tokenizer(special: list[str], ends: tuple[str, str] | None, *, lower: bool = True) -> Tokenizer:
    """Word pieces; `ends` are put around a text, and between two."""
    known = vocabulary(special)
    unknown = next(s for s in special if "unk" in s.lower())
    made = Tokenizer(models.WordPiece(known, unk_token=unknown, max_input_chars_per_word=100))
    if lower:
        made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    if ends:
        first, last = ends
        twice = f"{first} $A {last} {last} $B {last}" if first == "<s>" else None
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=twice or f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(first, known[first]), (last, known[last])],
        )
    return made


def _norm(rng: np.random.Generator, name: str, *, bias: bool = True, width: int = WIDTH) -> Weights:
    found = {f"{name}.weight": 1 + 0.1 * rng.standard_normal(width)}
    return found | ({f"{name}.bias": 0.1 * rng.standard_normal(width)} if bias else {})


def _linear(
    rng: np.random.Generator, name: str, out: int, width: int, *, bias: bool = True
) -> Weights:
    found = {f"{name}.weight": rng.standard_normal((out, width)) / width**0.5}
    return found | ({f"{name}.bias": 0.1 * rng.standard_normal(out)} if bias else {})


def _table(rng: np.random.Generator, name: str, count: int, width: int = WIDTH) -> Weights:
    return {f"{name}.weight": rng.standard_normal((count, width))}


def _bert(rng: np.random.Generator, vocab: int, prefix: str = "", types: int = 2) -> Weights:
    w = _table(rng, f"{prefix}embeddings.word_embeddings", vocab)
    w |= _table(rng, f"{prefix}embeddings.position_embeddings", POSITIONS)
    if types:
        w |= _table(rng, f"{prefix}embeddings.token_type_embeddings", types)
    w |= _norm(rng, f"{prefix}embeddings.LayerNorm")
    for n in range(LAYERS):
        at = f"{prefix}encoder.layer.{n}."
        for name in ("query", "key", "value"):
            w |= _linear(rng, f"{at}attention.self.{name}", WIDTH, WIDTH)
        w |= _linear(rng, f"{at}attention.output.dense", WIDTH, WIDTH)
        w |= _norm(rng, f"{at}attention.output.LayerNorm")
        w |= _linear(rng, f"{at}intermediate.dense", INNER, WIDTH)
        w |= _linear(rng, f"{at}output.dense", WIDTH, INNER)
        w |= _norm(rng, f"{at}output.LayerNorm")
    return w


def _distilbert(rng: np.random.Generator, vocab: int) -> Weights:
    w = _table(rng, "embeddings.word_embeddings", vocab)
    w |= _table(rng, "embeddings.position_embeddings", POSITIONS)
    w |= _norm(rng, "embeddings.LayerNorm")
    for n in range(LAYERS):
        at = f"transformer.layer.{n}."
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            w |= _linear(rng, f"{at}attention.{name}", WIDTH, WIDTH)
        w |= _norm(rng, f"{at}sa_layer_norm") | _norm(rng, f"{at}output_layer_norm")
        w |= _linear(rng, f"{at}ffn.lin1", INNER, WIDTH)
        w |= _linear(rng, f"{at}ffn.lin2", WIDTH, INNER)
    return w


def _mpnet(rng: np.random.Generator, vocab: int) -> Weights:
    w = _table(rng, "embeddings.word_embeddings", vocab)
    w |= _table(rng, "embeddings.position_embeddings", POSITIONS)
    w |= _norm(rng, "embeddings.LayerNorm")
    w |= _table(rng, "encoder.relative_attention_bias", 32, HEADS)
    for n in range(LAYERS):
        at = f"encoder.layer.{n}."
        for name in "qkvo":
            w |= _linear(rng, f"{at}attention.attn.{name}", WIDTH, WIDTH)
        w |= _norm(rng, f"{at}attention.LayerNorm") | _norm(rng, f"{at}output.LayerNorm")
        w |= _linear(rng, f"{at}intermediate.dense", INNER, WIDTH)
        w |= _linear(rng, f"{at}output.dense", WIDTH, INNER)
    return w


def _nomic(rng: np.random.Generator, vocab: int) -> Weights:
    w = _table(rng, "embeddings.word_embeddings", vocab)
    w |= _table(rng, "embeddings.token_type_embeddings", 2) | _norm(rng, "emb_ln")
    for n in range(LAYERS):
        at = f"encoder.layers.{n}."
        w |= _linear(rng, f"{at}attn.Wqkv", 3 * WIDTH, WIDTH, bias=False)
        w |= _linear(rng, f"{at}attn.out_proj", WIDTH, WIDTH, bias=False)
        w |= _linear(rng, f"{at}mlp.fc11", INNER, WIDTH, bias=False)
        w |= _linear(rng, f"{at}mlp.fc12", INNER, WIDTH, bias=False)
        w |= _linear(rng, f"{at}mlp.fc2", WIDTH, INNER, bias=False)
        w |= _norm(rng, f"{at}norm1") | _norm(rng, f"{at}norm2")
    return w


def _modern(rng: np.random.Generator, vocab: int, prefix: str = "") -> Weights:
    w = _table(rng, f"{prefix}embeddings.tok_embeddings", vocab)
    w |= _norm(rng, f"{prefix}embeddings.norm", bias=False)
    for n in range(LAYERS):
        at = f"{prefix}layers.{n}."
        if n:
            w |= _norm(rng, f"{at}attn_norm", bias=False)
        w |= _linear(rng, f"{at}attn.Wqkv", 3 * WIDTH, WIDTH, bias=False)
        w |= _linear(rng, f"{at}attn.Wo", WIDTH, WIDTH, bias=False)
        w |= _norm(rng, f"{at}mlp_norm", bias=False)
        w |= _linear(rng, f"{at}mlp.Wi", 2 * INNER, WIDTH, bias=False)
        w |= _linear(rng, f"{at}mlp.Wo", WIDTH, INNER, bias=False)
    return w | _norm(rng, f"{prefix}final_norm", bias=False)


_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "type_vocab_size": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "xlm-roberta": _COMMON | {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5},
    "distilbert": {
        "dim": WIDTH,
        "hidden_dim": INNER,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "activation": "gelu",
    },
    "mpnet": _COMMON | {"pad_token_id": 1, "relative_attention_num_buckets": 32},
    "nomic_bert": {
        "n_embd": WIDTH,
        "n_inner": INNER,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "type_vocab_size": 2,
        "prenorm": False,
    },
    "modernbert": _COMMON
    | {
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 256,
    },
}
_MAKERS = {
    "bert": _bert,
    "xlm-roberta": lambda rng, vocab, prefix="": _bert(rng, vocab, prefix, types=1),
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "nomic_bert": _nomic,
    "modernbert": _modern,
}
FAMILIES = tuple(CONFIGS)


def _special(family: str) -> tuple[list[str], tuple[str, str]]:
    if family in ("xlm-roberta", "mpnet"):
        return _ROBERTA_SPECIAL, ("<s>", "</s>")
    return _BERT_SPECIAL, ("[CLS]", "[SEP]")


def write(folder: Path, config: dict[str, Any], weights: Weights, made: Tokenizer) -> Path:
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {k: mx.array(np.asarray(v, np.float32)) for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    return folder


def encoder(folder: Path, family: str = "bert", *, seed: int = 0, **changes: Any) -> Path:
    """An embedding model without anything beside it."""
    special, ends = _special(family)
    made = tokenizer(special, ends)
    config = {"model_type": family, "vocab_size": made.get_vocab_size()} | CONFIGS[family] | changes
    weights = _MAKERS[family](np.random.default_rng(seed), config["vocab_size"])
    return write(folder, config, weights, made)


def sentence(folder: Path, *, modules: list[tuple[str, str, dict[str, Any]]], **more: Any) -> Path:
    """Beside a model, what sentence-transformers writes: (kind, path, its config.json) each."""
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for kind, path, settings in modules:
        listed.append({"idx": 1, "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, value in more.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def classifier(
    folder: Path, family: str = "bert", *, labels: int = 1, seed: int = 0, **changes: Any
) -> Path:
    special, ends = _special(family)
    made = tokenizer(special, ends)
    prefix = {"bert": "bert.", "xlm-roberta": "roberta.", "modernbert": "model."}[family]
    config = {"model_type": family, "vocab_size": made.get_vocab_size()} | CONFIGS[family]
    config |= {
        "architectures": [f"{family}ForSequenceClassification"],
        "id2label": {str(n): f"label {n}" for n in range(labels)},
    } | changes
    rng = np.random.default_rng(seed)
    weights = _MAKERS[family](rng, config["vocab_size"], prefix)  # type: ignore[call-arg, arg-type]
    if family == "bert":
        weights |= _linear(rng, "bert.pooler.dense", WIDTH, WIDTH)
        weights |= _linear(rng, "classifier", labels, WIDTH)
    elif family == "xlm-roberta":
        weights |= _linear(rng, "classifier.dense", WIDTH, WIDTH)
        weights |= _linear(rng, "classifier.out_proj", labels, WIDTH)
    else:
        weights |= _linear(rng, "head.dense", WIDTH, WIDTH, bias=False)
        weights |= _norm(rng, "head.norm", bias=False)
        weights |= _linear(rng, "classifier", labels, WIDTH)
    return write(folder, config, weights, made)


_DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "use_bidirectional_attention": True,
    },
}


def decoder(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A decoder, saved without the `model.` before its names, as embedding models are."""
    made = tokenizer(_QWEN_SPECIAL, None, lower=False)
    if family == "gemma3_text":
        made = tokenizer(_BERT_SPECIAL, ("[CLS]", "[SEP]"))
    config = {"model_type": family, "vocab_size": made.get_vocab_size()} | _DECODERS[family]
    config |= changes
    rng = np.random.default_rng(seed)
    heads, groups, size = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    weights = _table(rng, "embed_tokens", config["vocab_size"])
    plain = {"bias": False}
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}."
        weights |= _linear(rng, f"{at}self_attn.q_proj", heads * size, WIDTH, **plain)
        for name in ("k_proj", "v_proj"):
            weights |= _linear(rng, f"{at}self_attn.{name}", groups * size, WIDTH, **plain)
        weights |= _linear(rng, f"{at}self_attn.o_proj", WIDTH, heads * size, **plain)
        for name in ("q_norm", "k_norm"):
            weights |= _norm(rng, f"{at}self_attn.{name}", bias=False, width=size)
        for name in ("gate_proj", "up_proj"):
            weights |= _linear(rng, f"{at}mlp.{name}", INNER, WIDTH, **plain)
        weights |= _linear(rng, f"{at}mlp.down_proj", WIDTH, INNER, **plain)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            weights |= _norm(rng, f"{at}{name}", bias=False)
    weights |= _norm(rng, "norm", bias=False)
    if str(config.get("architectures", [""])[0]).endswith("ForSequenceClassification"):
        weights |= _linear(rng, "score", len(config["id2label"]), WIDTH, **plain)
    return write(folder, config, weights, made)


def dense(folder: Path, path: str, out: int, width: int, *, seed: int = 0) -> None:
    """The weights of a Dense module."""
    import mlx.core as mx

    rng = np.random.default_rng(seed)
    weights = _linear(rng, "linear", out, width, bias=False)
    (folder / path).mkdir(exist_ok=True)
    arrays = {k: mx.array(v.astype(np.float32)) for k, v in weights.items()}
    mx.save_safetensors(str(folder / path / "model.safetensors"), arrays)


def quantized(folder: Path, target: Path, *, bits: int = 4, group: int = 32) -> Path:
    """The same model as `mlx` converters write it: every matrix in a few bits."""
    import mlx.core as mx

    raw = dict(mx.load(str(folder / "model.safetensors")))
    found: dict[str, Any] = {}
    for name, value in raw.items():
        path = name.removesuffix(".weight")
        if value.ndim == 2 and value.shape[-1] % group == 0:
            found[f"{path}.weight"], found[f"{path}.scales"], found[f"{path}.biases"] = mx.quantize(
                value, group_size=group, bits=bits
            )
        else:
            found[name] = value
    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), found)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": group, "bits": bits}
    (target / "config.json").write_text(json.dumps(config))
    for file in folder.glob("tokenizer*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def read(folder: Path) -> Weights:
    """A folder's weights, quantised ones as the numbers they stand for."""
    import mlx.core as mx

    raw = dict(mx.load(str(folder / "model.safetensors")))
    config = json.loads((folder / "config.json").read_text())
    for name in [n for n in raw if n.endswith(".scales")]:
        path = name.removesuffix(".scales")
        raw[f"{path}.weight"] = mx.dequantize(
            raw[f"{path}.weight"],
            raw.pop(name),
            raw.pop(f"{path}.biases"),
            **config["quantization"],
        )
    return {k: np.array(v.astype(mx.float32), np.float64) for k, v in raw.items()}
