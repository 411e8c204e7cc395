"""A vision-language model of mlx-vlm's classes, driven as the engine drives a text model.

It is called with tokens and caches, as mlx-lm's models are. Beside them come embeddings, where a prompt has
pictures, and positions, where they do not follow from the cache. What a picture gives the model is computed
apart (`encode`), from its own pixels and placeholders alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as classes

from millrace.errors import ModelError
from millrace.models.adapters.fitting import Shape
from millrace.models.adapters.stacks import AdapterStacks
from millrace.models.vision.both_ways import look_both_ways, looks_both_ways
from millrace.models.vision.families import Family
from millrace.models.vision.stages import Pace, Stages, pace_here

_OF_PROMPTS = ("pixel_values", "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What processors give beside a picture's own tensors, and the pixels themselves."""


@dataclass(frozen=True)
class Features:
    """What the model sees in the place of a run of tokens."""

    embeddings: mx.array
    """Shaped (tokens, width)."""
    deep: tuple[mx.array, ...] = ()
    """What is added after the first layers, at the placeholders: (placeholders, width) each."""
    per_layer: mx.array | None = None
    """What every layer gets of each token beside: (tokens, layers, width)."""

    @property
    def length(self) -> int:
        return int(self.embeddings.shape[0])

    @property
    def arrays(self) -> list[mx.array]:
        rest = [] if self.per_layer is None else [self.per_layer]
        return [self.embeddings, *self.deep, *rest]

    @property
    def nbytes(self) -> int:
        return sum(int(a.nbytes) for a in self.arrays)


@dataclass
class Encoding:
    """A picture on its way through the vision tower."""

    features: Features
    stages: list[list[mx.array]]
    """What the tower gives on the way, in order, as far as it has not been computed."""

    def run(self, parts: int) -> bool:
        """Compute so many stages more, or all that are left if 0; says whether that was all."""
        if parts and parts < len(self.stages):
            mx.eval(self.stages[:parts])
            del self.stages[:parts]
            return False
        mx.eval(self.features.arrays)
        self.stages.clear()
        return True


@dataclass(frozen=True)
class Piece:
    """A part of a picture's features, and where in a chunk it stands."""

    at: int
    features: Features
    start: int
    end: int


@dataclass(frozen=True)
class VisionInput:
    """What a chunk is run with beside its tokens."""

    pieces: Sequence[Piece] = field(default_factory=list)
    positions: mx.array | None = None
    """Shaped (3, 1, tokens)."""


class TextAdapters(AdapterStacks):
    """Adapters of the text tower: features of pictures are shared by all requests, whatever adapter
    they run with."""

    @property
    def shapes(self) -> dict[str, Shape]:
        return {n: s for n, s in super().shapes.items() if n.startswith("language_model.")}


class VisionLanguageModel(nn.Module):  # type: ignore[misc]
    sees = True

    def __init__(
        self, inner: Any, family: Family, merge: int, pace: Callable[[], Pace | None] = pace_here
    ) -> None:
        """`pace` says what work costs on the device, and so how a picture's is cut into stages."""
        super().__init__()
        self.inner = inner
        self.family = family
        self.merge = merge
        """Patches of a grid's side that become one token."""
        self.adapters = TextAdapters(inner)
        self._pace = pace
        self._stages: Stages | None = None
        """Of the tower as it is when the first picture comes: before that, layers may be replaced."""
        self.begins = True
        """The first layers are here, and not on another rank."""
        self.whole_pictures = looks_both_ways(inner)
        """A picture's tokens see each other, so that no chunk may have a part of them."""
        if self.whole_pictures:
            look_both_ways(inner)

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def make_cache(self) -> list[Any]:
        """Caches of mlx-lm's classes, which the engine knows how to cut, keep and put side by side."""
        tower = self.inner.language_model
        if not hasattr(tower, "make_cache"):
            return [classes.KVCache() for _ in self.layers]
        return [_of_mlx_lm(cache) for cache in tower.make_cache()]

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        vision_input: VisionInput | None = None,
        deltas: mx.array | None = None,
    ) -> mx.array:
        """`deltas` is what each row's positions differ by from its places, where any do."""
        more: dict[str, Any] = (
            self._seen(inputs, vision_input.pieces) if vision_input and vision_input.pieces else {}
        )
        tower = self.inner.language_model
        if not self.family.grids:
            logits: mx.array = tower(inputs, cache=cache, **more).logits
            return logits
        # Its own call looks for positions in state that it keeps from one request to the next.
        positions = vision_input.positions if vision_input else None
        if positions is None:
            positions = self._positions(inputs, cache, deltas)
        hidden = tower.model(inputs, cache=cache, position_ids=positions, **more)
        if tower.args.tie_word_embeddings:
            return tower.model.embed_tokens.as_linear(hidden)
        return tower.lm_head(hidden)

    def encode(self, tokens: Sequence[int], tensors: Mapping[str, mx.array]) -> Encoding:
        """What one picture becomes, laid out and not computed.

        `tokens` are those from its first placeholder to its last.
        """
        if self._stages is None:
            self._stages = Stages(self.inner, self._pace())
        with self._stages.laying_out() as stages:
            features = self._laid_out(tokens, tensors)
        return Encoding(features, stages)

    def warm_up(self) -> None:
        """Run the vision tower once, where a picture can be made up: its kernels are compiled then."""
        if not self.family.grids:
            return
        config = self.inner.config
        tower = config.vision_config
        side = 8 * self.merge
        width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        tensors = {
            "pixel_values": mx.zeros((side * side, width)),
            "image_grid_thw": mx.array([[1, side, side]]),
        }
        self.encode([config.image_token_id] * 64, tensors).run(0)

    def _laid_out(self, tokens: Sequence[int], tensors: Mapping[str, mx.array]) -> Features:
        if self.family.deep:
            # Its own way of putting features in their places computes them at once.
            tower = self.inner.vision_tower
            pixels = tensors["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
            seen, deep = tower(pixels, tensors["image_grid_thw"])
            return Features(seen, tuple(deep))
        ids = mx.array([tokens], mx.int32)
        rest = {name: tensor for name, tensor in tensors.items() if name not in _OF_PROMPTS}
        found = self.inner.get_input_embeddings(
            ids, tensors["pixel_values"], mask=mx.ones_like(ids), **rest
        )
        if found.cross_attention_states is not None:
            raise ValueError("Pictures that are seen through cross-attention are not supported.")
        per_layer = found.per_layer_inputs
        return Features(
            found.inputs_embeds[0], per_layer=per_layer[0] if per_layer is not None else None
        )

    def _positions(
        self, inputs: mx.array, cache: list[Any] | None, deltas: mx.array | None
    ) -> mx.array:
        rows, count = inputs.shape
        place = mx.arange(count, dtype=mx.int32)[None]
        if cache and cache[0] is not None:
            offset = cache[0].offset
            place = place + (offset[:, None] if isinstance(offset, mx.array) else offset)
        if deltas is not None:
            place = place + deltas[:, None]
        return mx.broadcast_to(place[None], (3, rows, count))

    def _seen(self, inputs: mx.array, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The embeddings of a chunk in which pictures stand, and what goes with them."""
        text = self.inner.get_input_embeddings(inputs, None)
        per_layer = text.per_layer_inputs
        found = {
            "inputs_embeds": _laid(
                text.inputs_embeds[0], [(p, p.features.embeddings) for p in pieces]
            )
        }
        if per_layer is not None:
            parts = [(p, p.features.per_layer) for p in pieces]
            found["per_layer_inputs"] = _laid(per_layer[0], parts)
        if self.whole_pictures:
            shown = inputs == self.inner.config.image_token_id
            found["mm_token_type_ids"] = shown.astype(mx.int32)
        if pieces[0].features.deep and self.begins:
            found |= self._deep(inputs.shape[1], pieces)
        return found

    def _deep(self, count: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """For models whose pictures are placeholders from end to end."""
        seen = [False] * count
        for piece in pieces:
            seen[piece.at : piece.at + piece.end - piece.start] = [True] * (piece.end - piece.start)
        levels = range(len(pieces[0].features.deep))
        deep = [
            mx.concatenate([p.features.deep[i][p.start : p.end] for p in pieces]) for i in levels
        ]
        return {"visual_pos_masks": mx.array([seen]), "deepstack_visual_embeds": deep}


def _laid(text: mx.array, pieces: Sequence[tuple[Piece, mx.array | None]]) -> mx.array:
    """A chunk's values with those of pictures in their places; with a first axis of one row."""
    parts: list[mx.array] = []
    done = 0
    for piece, values in pieces:
        assert values is not None
        parts += [text[done : piece.at], values[piece.start : piece.end].astype(text.dtype)]
        done = piece.at + piece.end - piece.start
    parts.append(text[done:])
    return mx.concatenate([p for p in parts if p.shape[0]])[None]


def _of_mlx_lm(cache: Any) -> Any:
    kind = type(cache).__name__
    if kind == "KVCache":
        return classes.KVCache()
    if kind == "RotatingKVCache":
        return classes.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    raise ModelError(f"The model keeps state of the kind {kind}, which is not proven for pictures.")
