"""The one place where mlx-lm's models are given our attention.

Their modules call `scaled_dot_product_attention` by that name. It is replaced by `attend`, which knows the
keys that a paged layer handed out and leaves all others to mlx-lm's own function.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from millrace.paging.layers import CausalMask, CurrentPass, PagedLayer

_NAME = "scaled_dot_product_attention"
_ORIGINAL = base.scaled_dot_product_attention


class Seam:
    """Attention for the models of one process; only one pass runs at a time."""

    def __init__(self) -> None:
        self.current = CurrentPass()
        self.attended: set[int] | None = None
        """The layers whose attention came here, by identity, while somebody wants to know."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        at = self.current.running
        layer = at.lender(keys, values) if at is not None else None
        own = isinstance(mask, mx.array)
        if at is None or layer is None or (own and self.attended is not None):
            if isinstance(mask, CausalMask):
                mask = "causal" if queries.shape[2] > 1 else None
            found: mx.array = _ORIGINAL(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
            return found
        assert isinstance(layer, PagedLayer)
        if self.attended is not None:
            self.attended.add(id(layer))
        if own:
            return layer.attend_masked(queries, scale, mask, sinks)
        window = mask.window if isinstance(mask, CausalMask) else None
        return layer.attend(queries, scale, window, sinks)

    def install(self, model: Any) -> None:
        """Have the modules of a model's layers call `attend`."""
        for kind in {type(module) for _, module in model.named_modules()}:
            for each in kind.__mro__:
                # A model's own file need not be a module that Python knows by name.
                names = getattr(each.__dict__.get("__call__"), "__globals__", {})
                if _NAME in names:
                    names[_NAME] = self.attend


SEAM = Seam()
