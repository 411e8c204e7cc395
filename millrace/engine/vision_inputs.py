"""What pictures become on the device: their pixels until they are encoded, their features after that, and
what a part of a prompt is run with.

It is told what to encode and what to let go of, and decides nothing. What it holds of a picture it knows
by the picture's digest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from millrace.engine.turn import EncodePicture, PictureResult
from millrace.models.vision.positions import Placement, placed
from millrace.protocol import Picture, Span, Submit, Tensor


@dataclass(frozen=True)
class PromptPictures:
    """Where a prompt's pictures are, and where its tokens stand."""

    spans: Sequence[Span]
    placement: Placement | None

    @property
    def delta(self) -> int:
        """What the positions of tokens after the prompt differ by from their places."""
        return self.placement.delta if self.placement is not None else 0


class VisionInputs:
    def __init__(self, model: Any) -> None:
        """`model` is the engine's, whether it takes pictures or not."""
        self._model = model if getattr(model, "sees", False) else None
        self._pixels: dict[str, Mapping[str, Tensor]] = {}
        self._arrays: dict[str, dict[str, mx.array]] = {}
        self._under_way: dict[str, Any] = {}
        self._features: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(features.nbytes for features in self._features.values())

    def state(self) -> object:
        """What is held of encoded pictures, as plain values."""
        return sorted((digest, f.length) for digest, f in self._features.items())

    def features(self, digest: str) -> Any:
        """What an encoded picture has become; None if it is not held."""
        return self._features.get(digest)

    def take(self, digest: str, features: Any) -> None:
        """Hold what a picture has become elsewhere."""
        self._features[digest] = features

    def check(self, request: Submit) -> None:
        """Raise ValueError where a request's pictures cannot be what they are said to be."""
        if not request.media:
            return
        if self._model is None:
            raise ValueError("The model takes text only: it was given a picture.")
        self.view(request, len(request.prompt))

    def arrived(self, picture: Picture) -> None:
        if picture.digest not in self._features and self._model is not None:
            self._pixels[picture.digest] = picture.tensors

    def drop(self, digests: Sequence[str]) -> None:
        for digest in digests:
            for held in (self._pixels, self._arrays, self._under_way, self._features):
                held.pop(digest, None)

    def encode(self, operation: EncodePicture) -> PictureResult:
        """Run the vision tower on a picture whose pixels are here."""
        digest = operation.digest
        begin = time.perf_counter()
        result = PictureResult(digest, operation.requests)
        try:
            while not result.done:
                # Each takes a while: where others wait, one of them at a time.
                if digest in self._pixels:
                    self._take(digest)
                elif digest in self._arrays:
                    self._lay_out(operation)
                else:
                    self._run(operation, result)
                if operation.parts:
                    break
        except Exception as error:  # whatever a vision tower raises is those requests' own
            self.drop([digest])
            result.problem = str(error) or repr(error)
        result.seconds = time.perf_counter() - begin
        return result

    def _take(self, digest: str) -> None:
        arrays = {name: _array(tensor) for name, tensor in self._pixels.pop(digest).items()}
        mx.eval(arrays)
        self._arrays[digest] = arrays

    def _lay_out(self, operation: EncodePicture) -> None:
        assert self._model is not None
        arrays = self._arrays.pop(operation.digest)
        encoding = self._model.encode(operation.tokens, arrays)
        if (length := encoding.features.length) != len(operation.tokens):
            raise ValueError(f"it has {length} features and {len(operation.tokens)} tokens")
        self._under_way[operation.digest] = encoding

    def _run(self, operation: EncodePicture, result: PictureResult) -> None:
        result.parts = operation.parts
        if self._under_way[operation.digest].run(operation.parts):
            features = self._under_way.pop(operation.digest).features
            self._features[operation.digest] = features
            result.done, result.nbytes = True, features.nbytes

    def view(self, request: Submit, length: int) -> PromptPictures | None:
        """Of a prompt of this many tokens, with what was generated before."""
        if not request.media or self._model is None:
            return None
        placement = None
        if self._model.family.grids:
            placement = placed(length, request.media, self._model.merge)
        return PromptPictures(request.media, placement)

    def chunk(self, view: PromptPictures, begin: int, end: int) -> Any:
        """What the tokens begin … end-1 of a prompt are run with."""
        from millrace.models.vision.model import Piece, VisionInput

        pieces = []
        for span in view.spans:
            first, last = max(begin, span.start), min(end, span.start + span.length)
            if first < last:
                features = self._features[span.digest]
                pieces.append(Piece(first - begin, features, first - span.start, last - span.start))
        positions = None
        if view.placement is not None:
            positions = mx.array(view.placement.at[:, None, begin:end])
        return VisionInput(pieces, positions)


def _array(tensor: Tensor) -> mx.array:
    kind = np.dtype(tensor.dtype).newbyteorder("<")
    flat = np.frombuffer(tensor.data, kind)
    return mx.array(flat.reshape(tensor.shape).astype(kind.newbyteorder("="), copy=False))
