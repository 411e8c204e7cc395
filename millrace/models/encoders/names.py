"""How families call their weights, and what `BertNetwork` and the heads call them.

Names are matched without what wraps a model (`bert.`, `model.`) and without the last part, so that a
quantised layer's scales find their place as its weights do. Fused products are taken apart: their
rows are independent, quantised or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx

_WRAPPERS = re.compile(
    r"^(bert|roberta|xlm_roberta|distilbert|electra|mpnet|nomic_bert|camembert|model|encoder_model)\."
)
_LAYER = re.compile(r"^(?:encoder\.|transformer\.)?layers?\.(\d+)\.(.+)$")
_OUTSIDE = {
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.tok_embeddings": "embeddings.words",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.types",
    "embeddings.LayerNorm": "embeddings.norm",
    "embeddings.norm": "embeddings.norm",
    "emb_ln": "embeddings.norm",
    "embeddings_project": "embeddings.widen",
    "encoder.relative_attention_bias": "distances",
    "final_norm": "final_norm",
}
_HEADS = {
    "pooler.dense": "head.dense",
    "pre_classifier": "head.dense",
    "classifier.dense": "head.dense",
    "classifier.out_proj": "head.out",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "classifier": "head.out",
}
_INSIDE = {
    # BERT, RoBERTa, XLM-RoBERTa, ELECTRA
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "output_norm",
    # DistilBERT
    "attention.q_lin": "query",
    "attention.k_lin": "key",
    "attention.v_lin": "value",
    "attention.out_lin": "out",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "up",
    "ffn.lin2": "down",
    "output_layer_norm": "output_norm",
    # MPNet
    "attention.attn.q": "query",
    "attention.attn.k": "key",
    "attention.attn.v": "value",
    "attention.attn.o": "out",
    "attention.LayerNorm": "attention_norm",
    # Nomic
    "attn.out_proj": "out",
    "mlp.fc11": "up",
    "mlp.fc12": "gate",
    "mlp.fc2": "down",
    "norm1": "attention_norm",
    "norm2": "output_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "post_attention_layernorm": "attention_norm",
    "post_mlp_layernorm": "output_norm",
    # ModernBERT
    "attn.Wo": "out",
    "attn_norm": "attention_norm",
    "mlp.Wo": "down",
    "mlp_norm": "output_norm",
}
_FUSED = {"attn.Wqkv": ("query", "key", "value"), "mlp.Wi": ("gate", "up")}
_OLD_NORMS = {"gamma": "weight", "beta": "bias"}


def renamed(weights: Mapping[str, mx.array], *, head: bool) -> dict[str, mx.array]:
    """The weights by our names; what belongs to no part of the network is left out."""
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        path, _, last = name.rpartition(".")
        last = _OLD_NORMS.get(last, last)
        if head and (ours := _HEADS.get(_bare(path))) is not None:
            found[f"{ours}.{last}"] = value
            continue
        path = _bare(path)
        if (ours := _OUTSIDE.get(path)) is not None:
            found[f"{ours}.{last}"] = value
        elif match := _LAYER.match(path):
            place = f"layers.{match[1]}"
            if (parts := _FUSED.get(match[2])) is not None:
                for part, rows in zip(parts, mx.split(value, len(parts), axis=0), strict=True):
                    found[f"{place}.{part}.{last}"] = rows
            elif (ours := _INSIDE.get(match[2])) is not None:
                found[f"{place}.{ours}.{last}"] = value
    return found


def _bare(path: str) -> str:
    while (shorter := _WRAPPERS.sub("", path)) != path:
        path = shorter
    return path
