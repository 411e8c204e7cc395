"""An engine that sees: a tiny model of a family, its processor, and what mlx-vlm makes of some prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import vision_models
from engine.harness import Bench
from vision_kinds import IMAGE
from vision_models import Reader, Told, picture

from millrace.media.decode import frames
from millrace.media.limits import MediaLimits
from millrace.media.processor import Processor, ProcessorConfig
from millrace.models.vision.families import vision_in
from millrace.models.vision.load import load_vision
from millrace.protocol import (
    Choice,
    FromEngine,
    PicturesWanted,
    Sampling,
    Span,
    Step,
    Submit,
    to_engine,
)

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
        vision_inputs = self.engine._vision_inputs
        return [
            *vision_inputs._pixels,
            *vision_inputs._arrays,
            *vision_inputs._under_way,
            *vision_inputs._features,
        ]

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
        self.folder = folder
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

        self.forget()
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

    def forget(self) -> None:
        """What mlx-vlm's tower keeps from the request before."""
        tower = self.model.inner.language_model
        for state in ("_rope_deltas", "_position_ids"):
            if hasattr(tower, state):
                setattr(tower, state, None)

    def film(self, data: bytes) -> tuple[Submit, list[int]]:
        """A request with a video, and what mlx-vlm makes of the same frames."""
        from mlx_vlm.generate import generate_step

        self.forget()
        config = ProcessorConfig(folder=str(self.folder), placeholder="<|image_pad|>", token=IMAGE)
        processor = Processor(config)
        seen = processor.seen(data, "film", moving=True)
        self.album["film"] = to_engine.decode(seen.picture)
        prompt = [5, 6, 7, IMAGE + 1, *[IMAGE] * seen.tokens, IMAGE + 2, 8]
        span = Span(4, seen.tokens, "film", seen.grid)
        shown = processor._processor(text=["<|video_pad|>"], videos=[frames(data, MediaLimits())])
        own = np.array(shown["input_ids"]).reshape(-1).tolist()
        ids = mx.array([[5, 6, 7, IMAGE + 1, *own, IMAGE + 2, 8]])
        steps = generate_step(
            ids,
            self.model.inner,
            None,
            mx.ones_like(ids),
            max_tokens=COUNT,
            temperature=0.0,
            pixel_values_videos=mx.array(shown["pixel_values_videos"]),
            video_grid_thw=mx.array(shown["video_grid_thw"]),
        )
        expected = [int(token) for token, _ in steps][:COUNT]
        return Submit(9, prompt, [Choice(0, 0)], COUNT, GREEDY, media=[span]), expected

    def bench(self, **more: Any) -> Eyes:
        return Eyes(self.model, self.album, **more)

    def ask(self, which: int, id: int | None = None, count: int = COUNT, **more: Any) -> Submit:
        told = self.told[which]
        more.setdefault("choices", [Choice(0, 0)])
        id = which if id is None else id
        return Submit(id, told.prompt, max_tokens=count, sampling=GREEDY, media=told.spans, **more)
