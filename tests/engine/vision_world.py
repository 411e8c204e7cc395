"""An engine that sees: a tiny model of a family, its processor, and what mlx-vlm makes of some prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import vision_models
from engine.harness import Bench
from vision_models import Reader, Told, picture

from millrace.models.vision.families import vision_in
from millrace.models.vision.load import load_vision
from millrace.protocol import Choice, FromEngine, PicturesWanted, Sampling, Step, Submit

GREEDY = Sampling(temperature=0.0)
COUNT = 6
ONE, THREE, EARLIER, PLAIN = range(4)
"""Prompts, by what is in them."""


class Eyes(Bench):
    """An engine whose wishes for pictures are granted."""

    def __init__(self, model: Any, album: dict[str, Any], **more: Any) -> None:
        self.album = album
        self.wanted: list[str] = []
        self.encoded = self.found_features = self.skipped = 0
        super().__init__(model, **more)

    @property
    def held(self) -> list[str]:
        """Pictures that the engine has anything of."""
        sights = self.engine._sights
        return [*sights._pixels, *sights._arrays, *sights._under_way, *sights._features]

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, PicturesWanted):
            self.wanted += message.digests
            for digest in message.digests:
                if digest in self.album:
                    self.transport.put(self.album[digest])
        elif isinstance(message, Step) and message.pictures is not None:
            self.encoded += message.pictures.encoded
            self.found_features += message.pictures.found
            self.skipped += message.pictures.skipped
        super()._deliver(message)


class World:
    """A family's model, its processor, and what mlx-vlm makes of some prompts."""

    def __init__(self, kind: str, folder: Path) -> None:
        vision_models.write(kind, folder)
        family = vision_in(folder)
        assert family is not None
        self.model, _ = load_vision(folder, family)
        self.reader = Reader(kind, folder)
        first, second, third = picture(60, 90, 1), picture(120, 40, 2), picture(56, 56, 3)
        self.told = [
            self.reader.read("a picture {} of", first),
            self.reader.read("{} and {}, then {} or", first, second, third),
            self.reader.read("look: {} I see. What else is there to be seen, and why", second),
            self.reader.read("no picture at all"),
        ]
        self.album = {d: p for told in self.told for d, p in told.pictures.items()}
        self.expected = [self.oracle(told) for told in self.told]

    def oracle(self, told: Told, count: int = COUNT) -> list[int]:
        from mlx_vlm.generate import generate_step

        tower = self.model.inner.language_model
        for state in ("_rope_deltas", "_position_ids"):  # which it keeps from the request before
            if hasattr(tower, state):
                setattr(tower, state, None)
        ids = mx.array([told.prompt])
        rest = dict(told.together)
        pixels = rest.pop("pixel_values", None)
        steps = generate_step(
            ids,
            self.model.inner,
            pixels,
            mx.ones_like(ids),
            max_tokens=count,
            temperature=0.0,
            **rest,
        )
        return [int(token) for token, _ in steps][:count]

    def bench(self, **more: Any) -> Eyes:
        return Eyes(self.model, self.album, **more)

    def ask(self, which: int, id: int | None = None, count: int = COUNT, **more: Any) -> Submit:
        told = self.told[which]
        more.setdefault("choices", [Choice(0, 0)])
        id = which if id is None else id
        return Submit(id, told.prompt, max_tokens=count, sampling=GREEDY, media=told.spans, **more)
