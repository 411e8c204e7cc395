"""Decoders used as encoders: mlx-lm's classes, of which the states before the head are taken.

A decoder looks back only, so that rows filled up at their end are exact, and long ones run in chunks
over a cache. EmbeddingGemma's class looks both ways, with its layers driven from here.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from millrace.models.encoders.attention import Reach
from millrace.models.encoders.bert import Pass

CHUNK = 512
"""Tokens of a row that are run at once."""


class DecoderNetwork:
    def __init__(self, model: Any) -> None:
        self.model = model
        self._inner: Any = getattr(model, "model", None)
        if not callable(self._inner):
            raise ValueError("its class does not give states before the head")

    def states(self, tokens: mx.array, lengths: list[int], types: mx.array | None) -> Pass:
        if tokens.shape[1] <= CHUNK:
            found: mx.array = self._inner(tokens)
            yield
            return found
        rows: list[mx.array] = []
        for number, length in enumerate(lengths):
            parts: list[mx.array] = []
            caches = make_prompt_cache(self.model)
            for start in range(0, length, CHUNK):
                part = self._inner(tokens[number : number + 1, start : start + CHUNK], cache=caches)
                mx.eval(part)
                parts.append(part)
                yield
            row = mx.concatenate(parts, axis=1)[:, : tokens.shape[1]]
            rows.append(mx.pad(row, [(0, 0), (0, tokens.shape[1] - row.shape[1]), (0, 0)]))
        return mx.concatenate(rows, axis=0)

    def logits(self, states: mx.array) -> mx.array:
        """What the model would say next, after states of (rows, width)."""
        head = getattr(self.model, "lm_head", None)
        if head is None or getattr(self.model.args, "tie_word_embeddings", False):
            head = self._inner.embed_tokens.as_linear
        found: mx.array = head(states)
        return found


class GemmaNetwork:
    """Gemma 3 that looks both ways, in most layers only so far."""

    def __init__(self, model: Any, window: int) -> None:
        self.model = model
        self._window = window // 2

    def states(self, tokens: mx.array, lengths: list[int], types: mx.array | None) -> Pass:
        inner = self.model.model
        x = inner.embed_tokens(tokens)
        x = x * mx.array(inner.args.hidden_size**0.5, mx.bfloat16).astype(x.dtype)
        length = tokens.shape[1]
        everywhere = range(length)
        uneven = mx.array(lengths) if min(lengths) < length else None
        far = Reach(uneven).mask(everywhere, everywhere)
        near = Reach(uneven, self._window).mask(everywhere, everywhere)
        for layer in inner.layers:
            x = layer(x, near if layer.self_attn.is_sliding else far)
            mx.async_eval(x)
            yield
        found: mx.array = inner.norm(x)
        return found


def load_decoder(
    folder: Path, config: dict[str, Any], *, trust_remote_code: bool
) -> tuple[Any, dict[str, mx.array]]:
    """A decoder of mlx-lm's, and the weights in its files that are not its own.

    Embedding models are often saved without the `model.` that their class has before every name.
    """
    others: dict[str, mx.array] = {}
    known = inspect.signature(load_model).parameters["get_model_classes"].default

    def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        found, arguments = known(config)

        class Named(found):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                own: dict[str, mx.array] = {}
                bare = not any(name.startswith(("model.", "language_model.")) for name in weights)
                for name, value in weights.items():
                    if name.startswith(("score.", "dense.")):
                        others[name] = value
                    elif bare and not name.startswith("lm_head."):
                        own[f"model.{name}"] = value
                    else:
                        own[name] = value
                if hasattr(super(), "sanitize"):
                    own = super().sanitize(own)
                if "lm_head" in self and not any(name.startswith("lm_head.") for name in own):
                    self.pop("lm_head")
                return own

        return Named, arguments

    model, _ = load_model(
        folder,
        lazy=True,
        model_config=config,
        get_model_classes=classes,
        trust_remote_code=trust_remote_code,
    )
    return model, others
