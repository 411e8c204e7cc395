"""Logprobs of tokens under the model's own distribution, for those rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millrace.protocol import TokenLogprob


class Logprobs:
    """Launched on the device; read when the tokens are."""

    def __init__(self, logits: mx.array, tokens: mx.array, top: int) -> None:
        """`logits` is (rows, vocabulary), `tokens` (rows,); `top` alternatives are found."""
        full = logits.astype(mx.float32)
        full = full - mx.logsumexp(full, axis=-1, keepdims=True)
        self._tokens = tokens
        self._own = mx.take_along_axis(full, tokens[:, None], axis=-1)[:, 0]
        self._ids: mx.array | None = None
        if top := min(top, full.shape[-1]):
            ids = mx.argpartition(-full, kth=top - 1, axis=-1)[:, :top]
            values = mx.take_along_axis(full, ids, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self._ids = mx.take_along_axis(ids, order, axis=-1)
            self._values = mx.take_along_axis(values, order, axis=-1)

    def arrays(self) -> list[mx.array]:
        return [self._own] + ([] if self._ids is None else [self._ids, self._values])

    def read(self, tops: Sequence[int]) -> list[TokenLogprob]:
        """One item per row, with as many alternatives as that row asked for."""
        own, tokens = self._own.tolist(), self._tokens.tolist()
        if self._ids is None:
            return [TokenLogprob(t, v) for t, v in zip(tokens, own, strict=True)]
        ids, values = self._ids.tolist(), self._values.tolist()
        return [
            TokenLogprob(tokens[i], own[i], list(zip(ids[i][:n], values[i][:n], strict=True)))
            for i, n in enumerate(tops)
        ]
