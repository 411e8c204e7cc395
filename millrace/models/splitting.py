"""Splitting a model over ranks, before its weights are read: what a rank drops is never loaded.

Tensor splits are mlx-lm's own (`shard`), and so are pipelines where a model has one (`PipelineMixin`);
models of the plainest form get a pipeline from here. Afterwards every linear layer is an ordinary one
again, with the sum over ranks beside it, so that whatever places weights on a device knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed as sharded
from mlx.utils import tree_map_with_path

from millrace.config import Parallel
from millrace.errors import ModelError

How = Literal["tensor", "pipeline"]
PLAIN = frozenset({"llama", "qwen3"})
"""Models whose forward pass is nothing but one layer after the other, by the names of mlx-lm's modules."""
_MOST = 16


Problem = Callable[[How, int], str | None]
"""Why a model cannot be split in that way over so many ranks; None if it can."""


def choose(problem: Problem, wanted: Parallel, size: int) -> How:
    """How the model is split over so many ranks; ModelError says why it cannot be, and what would work."""
    order: tuple[How, ...] = ("tensor", "pipeline") if wanted == "auto" else (wanted,)
    problems: list[str] = []
    for how in order:
        found = problem(how, size)
        if found is None:
            return how
        problems.append(f"{how}: {found}")
    works = _works(problem)
    advice = f"What would work: {works}." if works else "It can only be served from one machine."
    raise ModelError(
        f"The model cannot be split over {size} ranks ({'; '.join(problems)}). {advice}"
    )


def _works(problem: Problem) -> str:
    counts = [n for n in range(2, _MOST + 1) if problem("tensor", n) is None]
    found = []
    if counts:
        found.append(f"--parallel tensor with {', '.join(map(str, counts))} ranks")
    most = max((n for n in range(2, _MOST + 1) if problem("pipeline", n) is None), default=0)
    if most:
        found.append(f"--parallel pipeline with {'2 to ' if most > 2 else ''}{most} ranks")
    return ", or ".join(found)


def problem_of(model: Any, settings: dict[str, Any], how: How, size: int) -> str | None:
    """Why a text model cannot be split over so many ranks in that way."""
    if how == "tensor":
        return tensor_problem(model, settings, size)
    return pipeline_problem(model, size)


def tensor_problem(model: Any, settings: dict[str, Any], size: int) -> str | None:
    """Why every layer cannot be divided by so many."""
    if not hasattr(model, "shard"):
        return f"mlx-lm has no such split of {settings.get('model_type', 'this model')}"
    text = (
        settings | nested if isinstance(nested := settings.get("text_config"), dict) else settings
    )
    counted = {"num_attention_heads": "attention heads"}
    if not text.get("kv_lora_rank"):
        counted["num_key_value_heads"] = "key-value heads"
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        counted[name] = f"channels of {name}"
    for name, words in counted.items():
        value = text.get(name)
        if isinstance(value, int) and value and value % size:
            return f"its {value} {words} cannot be divided by {size}"
    return _quantised_problem(settings, text, size)


def _quantised_problem(settings: dict[str, Any], text: dict[str, Any], size: int) -> str | None:
    quantised = settings.get("quantization") or settings.get("quantization_config") or {}
    group = quantised.get("group_size") if isinstance(quantised, dict) else None
    if not isinstance(group, int) or group <= 0:
        return None
    for name in ("intermediate_size", "moe_intermediate_size"):
        value = text.get(name)
        if isinstance(value, int) and value and value // size % group:
            return (
                f"{name} of {value} over {size} ranks cuts weights quantised in groups of {group}"
            )
    heads, width = text.get("num_attention_heads"), text.get("head_dim")
    if isinstance(heads, int) and isinstance(width, int) and heads * width // size % group:
        return f"{heads} heads over {size} ranks cut weights quantised in groups of {group}"
    return None


def pipeline_problem(model: Any, size: int) -> str | None:
    """Why whole layers cannot be given to so many."""
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if not isinstance(layers, list):
        return "its layers are not a list"
    if not hasattr(inner, "pipeline") and _kind(model) not in PLAIN:
        return f"{_kind(model)} has no pipeline in mlx-lm"
    caches = model.make_cache() if hasattr(model, "make_cache") else []
    odd = {type(c).__name__ for c in caches} - {"KVCache"}
    if odd:
        return f"its layers hold different kinds of state ({', '.join(sorted(odd))})"
    if len(layers) < size:
        return f"it has {len(layers)} layers"
    return None


def _kind(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]


def split(model: Any, how: How, group: Any) -> None:
    """Leave of a lazily loaded text model what this rank has."""
    if how == "tensor":
        model.shard(group)
        make_plain(model)
    elif hasattr(model.model, "pipeline"):
        model.model.pipeline(group)
    else:
        deal_layers(model.model, group)
    if group.rank():
        behead(model)


class SummedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer of which every rank has some inputs: the products are summed over the ranks."""

    def __init__(self, layer: nn.Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()
        self.inner = layer
        if bias is not None:
            self.bias = bias
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.inner(x), group=self._group)
        return y + self["bias"] if "bias" in self else y


def make_plain(model: Any) -> None:
    """Ordinary linear layers in the place of the split ones, with the same arrays."""

    def swap(_: str, layer: nn.Module) -> nn.Module:
        kind = type(layer)
        if kind in (sharded.AllToShardedLinear, sharded.QuantizedAllToShardedLinear):
            return _ordinary(layer, layer.get("bias"))
        if kind in (sharded.ShardedToAllLinear, sharded.QuantizedShardedToAllLinear):
            return SummedLinear(_ordinary(layer, None), layer.get("bias"), layer.group)
        return layer

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)


def _ordinary(layer: Any, bias: mx.array | None) -> nn.Module:
    quantised = "scales" in layer
    kind = nn.QuantizedLinear if quantised else nn.Linear
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    if quantised:
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
    for name in ("weight", "scales", "biases"):
        if layer.get(name) is not None:
            new[name] = layer[name]
    if quantised and "biases" not in new:
        new.biases = None
    if bias is not None:
        new.bias = bias
    new.freeze()
    return new


class Around(nn.Module):  # type: ignore[misc]
    """Stands in a layer's place, and has all that the layer has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self["inner"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner" or "inner" not in self:
                raise
            return getattr(self["inner"], name)


class _Stage(Around):
    """A layer at the edge of what a rank has: its input comes from another, its output goes to one."""

    def __init__(
        self, layer: nn.Module, group: Any, source: int | None, target: int | None
    ) -> None:
        super().__init__(layer)
        self._group, self._source, self._target = group, source, target

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, *more: Any) -> mx.array:
        if self._source is not None:
            x = mx.distributed.recv_like(x, self._source, group=self._group)
        y = self["inner"](x, mask, cache, *more)
        if self._target is not None:
            y = mx.distributed.send(y, self._target, group=self._group)
            if cache is not None:
                # A pass is done when its state is: what was sent belongs to that.
                cache.keys = mx.depends(cache.keys, y)
        return y


def deal_layers(inner: Any, group: Any) -> None:
    """The first rank, which draws tokens, gets the last layers, as in mlx-lm's pipelines."""
    rank, size = group.rank(), group.size()
    base, extra = divmod(len(inner.layers), size)
    counts = [base + (r < extra) for r in range(size)]
    start = sum(counts[rank + 1 :])
    layers = list(inner.layers[start : start + counts[rank]])
    source = rank + 1 if rank + 1 < size else None
    target = rank - 1 if rank else None
    if len(layers) == 1:
        layers = [_Stage(layers[0], group, source, target)]
    else:
        if source is not None:
            layers[0] = _Stage(layers[0], group, source, None)
        if target is not None:
            layers[-1] = _Stage(layers[-1], group, None, target)
    inner.layers = layers


class _Unread(nn.Module):  # type: ignore[misc]
    """In the head's place where nobody looks at logits: what they would be made from is still computed,
    since other ranks wait for their part of it."""

    def __call__(self, x: mx.array) -> mx.array:
        return x[..., :1]


class _UnreadEmbedding(nn.Module):  # type: ignore[misc]
    """The same for an embedding that is the head as well."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.inner = embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        return self["inner"](tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return x[..., :1]


def behead(model: Any) -> None:
    """Have a rank that draws nothing compute no logits, nor read a head's weights."""
    if "lm_head" in model:
        model.lm_head = _Unread()
    elif isinstance(inner := getattr(model, "model", None), nn.Module) and "embed_tokens" in inner:
        inner.embed_tokens = _UnreadEmbedding(inner.embed_tokens)
