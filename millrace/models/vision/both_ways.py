"""Pictures whose tokens look at each other both ways: the masks of a chunk that has whole ones in it.

mlx-vlm lays its own over prompts that run at once and from their beginning; here the chunk may follow what
is in the cache already.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def looks_both_ways(model: Any) -> bool:
    """Whether the tokens of a picture see those behind them."""
    config = getattr(model.language_model, "config", None)
    return getattr(config, "use_bidirectional_attention", None) == "vision"


def look_both_ways(model: Any) -> None:
    """Let the text tower's own masks reach as far in a chunk that follows others."""
    tower = model.language_model.model
    kind = type(tower)

    class BothWays(kind):  # type: ignore[misc, valid-type]
        def _make_masks(
            self, h: mx.array, cache: Any, mm_token_type_ids: mx.array | None = None
        ) -> list[Any]:
            masks: list[Any] = super()._make_masks(h, cache, mm_token_type_ids)
            if mm_token_type_ids is None:
                return masks
            runs = self._block_sequence_ids_for_mask(mm_token_type_ids)
            own = (runs[:, :, None] != -1) & (runs[:, :, None] == runs[:, None, :])
            done = {id(mask): _widened(mask, own[:, None]) for mask in masks}
            return [done[id(mask)] for mask in masks]

    BothWays.__name__ = kind.__name__
    object.__setattr__(tower, "__class__", BothWays)


def _widened(mask: Any, own: mx.array) -> Any:
    """A mask whose last columns are the chunk's own tokens."""
    if not isinstance(mask, mx.array):
        return mask
    before = mask.shape[-1] - own.shape[-1]
    return mask | mx.pad(own, ((0, 0), (0, 0), (0, 0), (before, 0)))
