"""One of two ranks that run every family's model, split in every way that it can be, beside the whole one.

    python split_towers.py RANK FOLDER

FOLDER has a model of each kind, named after it, and perhaps what it is `with`. Rank 0 prints a line for
each: its name, the way, and how far apart the logits of a prompt with pictures, and of steps after it, are
at most; or why it cannot be split.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache
from vision_models import Reader, Told, picture

from millrace.engine.ranks.order import PictureFeatures
from millrace.engine.ranks.picture_features import packed, unpacked
from millrace.engine.turn import EncodePicture
from millrace.engine.vision_inputs import VisionInputs
from millrace.models.placement import place
from millrace.models.vision import splitting
from millrace.models.vision.families import vision_in
from millrace.models.vision.load import load_vision
from millrace.protocol import Choice, Sampling, Submit


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    group = mx.distributed.init(strict=True, backend="ring")
    for model in sorted(p for p in folder.iterdir() if p.is_dir()):
        whole = _loaded(model)  # whose module brings its processor's class
        told = _read(model)
        request = Submit(1, told.prompt, [Choice(0, 1)], 4, Sampling(0.0), media=told.spans)
        vision_inputs = VisionInputs(whole)
        for span in told.spans:
            vision_inputs.arrived(told.pictures[span.digest])
            run = told.prompt[span.start : span.start + span.length]
            assert vision_inputs.encode(EncodePicture(span.digest, run, [])).problem is None
        shown = [packed(s.digest, vision_inputs.features(s.digest)) for s in told.spans]
        expected = _run(whole, vision_inputs, request)
        for how in ("tensor", "pipeline"):
            part = _loaded(model)
            if (problem := splitting.problem(part, how, 2)) is not None:
                _say(rank, {"model": model.name, "how": how, "problem": problem})
                continue
            splitting.split(part, how, group)
            mine = VisionInputs(part)
            for each in _through_the_wire(shown):
                mine.take(each.digest, unpacked(each))
            found = _run(part, mine, request)
            if rank == 0:
                apart = max(
                    float(mx.abs(a - b).max()) for a, b in zip(found, expected, strict=True)
                )
                _say(rank, {"model": model.name, "how": how, "apart": apart})


def _read(folder: Path) -> Told:
    reader = Reader(folder.name.partition(" with ")[0], folder)
    return reader.read("see {} and {}, I", picture(60, 90), picture(56, 40, 1))


def _through_the_wire(shown: list[PictureFeatures]) -> list[PictureFeatures]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(shown), type=list[PictureFeatures])


def _loaded(folder: Path) -> Any:
    family = vision_in(folder)
    assert family is not None
    model, _ = load_vision(folder, family)
    return place(model, "f32", "cpu", own=False, whole=False)


def _run(model: Any, vision_inputs: VisionInputs, request: Submit) -> list[mx.array]:
    """Logits of a prompt in one chunk, and of three steps with given tokens after it."""
    view = vision_inputs.view(request, len(request.prompt))
    caches = make_prompt_cache(model)
    length = len(request.prompt)
    vision_input = vision_inputs.chunk(view, 0, length)
    found = [model(mx.array([request.prompt]), cache=caches, vision_input=vision_input)]
    mx.eval(found, [c.state for c in caches])
    deltas = mx.array([view.delta], mx.int32)
    more = {"deltas": deltas} if view.delta else {}
    for token in (5, 9, 12):
        found.append(model(mx.array([[token]]), cache=caches, **more))
        mx.eval(found, [c.state for c in caches])
    return found


def _say(rank: int, line: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
