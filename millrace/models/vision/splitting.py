"""Splitting a vision-language model over ranks: its text tower as other text models are split, by a rule of
our own, since mlx-vlm's classes mostly have none. The vision tower stays whole, on the first rank alone;
what it makes of a picture is sent to the others, so that all have the same numbers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear

from millrace.models.splitting import Around, How, behead, deal_layers, make_plain
from millrace.models.vision.model import VisionLanguageModel

IN_ORDER = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava"),
        *("pixtral", "mistral3", "internvl", "internvl_chat"),
    }
)
"""Families whose text tower is nothing but one layer after the other."""
_ATTENTION = (("q_proj", "k_proj", "v_proj"), "o_proj")
_FEED_FORWARD = (("gate_proj", "up_proj"), "down_proj")
_OPTIONAL = ("k_proj", "v_proj")
"""Missing where a layer looks at another one's keys, or where values are keys."""


def problem(model: VisionLanguageModel, how: How, size: int) -> str | None:
    """Why a model cannot be split over so many ranks in that way."""
    return tensor_problem(model, size) if how == "tensor" else pipeline_problem(model, size)


def tensor_problem(model: VisionLanguageModel, size: int) -> str | None:
    for layer in _trunk(model).layers:
        attention, forward = layer.get("self_attn"), layer.get("mlp")
        if (
            not _has(attention, *_ATTENTION)
            or not _has(forward, *_FEED_FORWARD)
            or not isinstance(getattr(attention, "n_heads", None), int)
            or ("experts" in layer and "switch_glu" not in layer.experts)
        ):
            return "its text tower's layers are of a form that is not known"
        for name, words in (("n_heads", "attention heads"), ("n_kv_heads", "key-value heads")):
            if getattr(attention, name) % size:
                return f"its {getattr(attention, name)} {words} cannot be divided by {size}"
        into, back = [forward.gate_proj], [attention.o_proj, forward.down_proj]
        if "experts" in layer:
            into.append(layer.experts.switch_glu.gate_proj)
            back.append(layer.experts.switch_glu.down_proj)
        for product in into:
            if (channels := product.weight.shape[-2]) % size:
                return f"its {channels} channels of feed-forward layers cannot be divided by {size}"
        for product in back:
            if (cut := _cut(product, size)) is not None:
                return cut
    return None


def _has(part: Any, into: tuple[str, ...], back: str) -> bool:
    names = [name for name in (*into, back) if name not in _OPTIONAL or name in (part or ())]
    return isinstance(part, nn.Module) and all(
        isinstance(part.get(name), nn.Linear | nn.QuantizedLinear) for name in names
    )


def _cut(product: Any, size: int) -> str | None:
    """Whether a product whose inputs are divided would be cut within what is quantised together."""
    if "scales" not in product:
        return None
    inputs, group = product.weight.shape[-1] * 32 // product.bits, product.group_size
    if inputs // size % group:
        return f"{inputs} channels over {size} ranks cut weights quantised in groups of {group}"
    return None


def pipeline_problem(model: VisionLanguageModel, size: int) -> str | None:
    kinds = {type(cache).__name__ for cache in model.make_cache()} - {"KVCache"}
    if kinds:
        return f"its layers hold different kinds of state ({', '.join(sorted(kinds))})"
    if model.family.model_type not in IN_ORDER:
        return f"the layers of {model.family.name} do not simply follow one another"
    layers = len(_trunk(model).layers)
    if layers < size:
        return f"it has {layers} layers"
    deep = _deep(model)
    if deep and layers // size <= deep:
        return (
            f"pictures are seen by its first {deep} layers and what follows them, which are to be "
            f"on one rank, and it would have {layers // size}"
        )
    return None


def _deep(model: VisionLanguageModel) -> int:
    """How many of the first layers see what the vision tower's layers gave."""
    if not model.family.deep:
        return 0
    return len(model.inner.config.vision_config.deepstack_visual_indexes)


def split(model: VisionLanguageModel, how: How, group: Any) -> None:
    """Leave of a lazily loaded model what this rank has."""
    trunk = _trunk(model)
    if how == "tensor":
        for layer in trunk.layers:
            _divide(layer.self_attn, *_ATTENTION, group)
            _divide(layer.mlp, *_FEED_FORWARD, group)
            layer.self_attn.n_heads //= group.size()
            layer.self_attn.n_kv_heads //= group.size()
            if "experts" in layer:
                layer.experts = _SummedExperts(layer.experts, group)
        make_plain(trunk)
    else:
        deal_layers(trunk, group)
        model.begins = group.rank() == group.size() - 1
    if group.rank():
        follow(model)


def _divide(part: Any, into: tuple[str, ...], back: str, group: Any) -> None:
    for name in into:
        if name in part:
            part[name] = shard_linear(part[name], "all-to-sharded", group=group)
    part[back] = shard_linear(part[back], "sharded-to-all", group=group)


class _SummedExperts(Around):
    """Experts of which every rank has some channels of each."""

    def __init__(self, experts: Any, group: Any) -> None:
        super().__init__(experts)
        self._group = group
        for name in _FEED_FORWARD[0]:
            shard_inplace(experts.switch_glu[name], "all-to-sharded", group=group)
        shard_inplace(experts.switch_glu[_FEED_FORWARD[1]], "sharded-to-all", group=group)

    def __call__(self, *given: mx.array) -> mx.array:
        return mx.distributed.all_sum(self["inner"](*given), group=self._group)


def follow(model: VisionLanguageModel) -> None:
    """Have a rank beside the first neither look at pictures nor compute logits."""
    behead(model.inner.language_model)
    for name, part in list(model.inner.items()):
        if name != "language_model" and isinstance(part, nn.Module):
            model.inner[name] = nn.Module()
        elif name != "language_model" and isinstance(part, list):
            model.inner[name] = []


def _trunk(model: VisionLanguageModel) -> Any:
    """What has the text tower's layers."""
    text = model.inner.language_model
    return text.model if "model" in text else text
