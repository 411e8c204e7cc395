"""What the first rank's vision tower has made of a picture, as plain bytes for the others, which have none:
all ranks see the same numbers, whatever machine each runs on."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np

from millrace.engine.ranks.order import Block, FloatKind, PictureFeatures


def packed(digest: str, features: Any) -> PictureFeatures:
    return PictureFeatures(
        digest,
        _block(features.embeddings),
        [_block(each) for each in features.deep],
        _block(features.per_layer) if features.per_layer is not None else None,
    )


def unpacked(shown: PictureFeatures) -> Any:
    from millrace.models.vision.model import Features

    per_layer = _array(shown.per_layer) if shown.per_layer is not None else None
    features = Features(_array(shown.embeddings), tuple(map(_array, shown.deep)), per_layer)
    mx.eval(features.arrays)
    return features


def _block(array: mx.array) -> Block:
    # numpy has no bfloat16: bytes are bytes.
    raw = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(raw)
    kind = str(array.dtype).removeprefix("mlx.core.")
    return Block(cast("FloatKind", kind), tuple(array.shape), np.array(raw).data)


def _array(block: Block) -> mx.array:
    raw = mx.array(np.frombuffer(block.data, np.uint8))
    return raw.view(getattr(mx, block.dtype)).reshape(block.shape)
