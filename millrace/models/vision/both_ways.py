"""Pictures whose tokens look at each other both ways: the masks of a run that has whole ones in it.

mlx-vlm makes them for prompts that run at once and from their beginning; here a run may follow others.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


def looks_both_ways(model: Any) -> bool:
    """Whether the tokens of a picture see those behind them."""
    config = getattr(model.language_model, "config", None)
    return getattr(config, "use_bidirectional_attention", None) == "vision"


def look_both_ways(model: Any) -> None:
    """Have the text tower make its masks of runs that follow others, too."""
    tower = model.language_model.model
    kind = type(tower)

    class BothWays(kind):  # type: ignore[misc, valid-type]
        def _make_masks(
            self, h: mx.array, cache: Any, mm_token_type_ids: mx.array | None = None
        ) -> list[Any]:
            count = h.shape[1]
            if mm_token_type_ids is None or count == 1:
                return list(super()._make_masks(h, cache, mm_token_type_ids))
            pictures = self._block_sequence_ids_for_mask(mm_token_type_ids)
            first = cache[0].offset if cache[0] is not None else 0
            kinds = [layer.layer_type for layer in self.layers]
            windows = {"full_attention": None, "sliding_attention": self.window_size}
            masks = {k: _mask(first, pictures, windows[k]) for k in set(kinds)}
            return [masks[k] for k in kinds]

    BothWays.__name__ = kind.__name__
    object.__setattr__(tower, "__class__", BothWays)


def _mask(first: int, pictures: mx.array, window: int | None) -> mx.array:
    """What tokens that follow `first` others see: those before them, as far as the window reaches, and
    their own picture's. `pictures` has a number for each token, -1 for text."""
    count = pictures.shape[-1]
    own = (pictures[:, :, None] != -1) & (pictures[:, :, None] == pictures[:, None, :])
    before = create_causal_mask(count, first, window_size=window)
    found: mx.array = before | mx.pad(own[:, None], ((0, 0), (0, 0), (0, 0), (first, 0)))
    return found
