"""A worker process: `python -m millrace.media.processor CONFIG`, which holds one model's own processor.

A task is a picture's file, a reply what the model is given for it: its tensors, and what stands in the
prompt in its place. The only part of the front's side that loads MLX, in a process of its own.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import BadPicture
from millrace.frames import WorkerEnd
from millrace.media.decode import frames, pixels
from millrace.media.limits import MediaLimits
from millrace.protocol import Picture, Tensor, encoder

IDLE = 900.0
"""Seconds without a picture after which a worker gives its memory back."""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor makes of the prompt, which is for the front to make."""


class ProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    placeholder: str
    """What the template writes for one picture."""
    token: int
    """The token that stands for each of a picture's features."""
    limits: MediaLimits = MediaLimits()
    trust_remote_code: bool = False


class ProcessTask(msgspec.Struct):
    """A picture's file follows it in the same frame; without one, the worker gets ready."""

    digest: str = ""
    low: bool = False
    moving: bool = False
    """It is a video."""

    def parts(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        head = msgspec.msgpack.encode(self)
        return bytes([len(head)]), head, data


class ProcessedPicture(msgspec.Struct, tag="processed"):
    text: str = ""
    """What stands in the prompt in the place of the placeholder."""
    tokens: int = 0
    grid: tuple[int, ...] = ()
    picture: memoryview = memoryview(b"")
    """The message to the engine, as it is sent: nobody on its way reads it."""


class RefusedPicture(msgspec.Struct, tag="refused"):
    message: str


class FailedPicture(msgspec.Struct, tag="failed"):
    """A fault of the server's own, or of the model's folder."""

    trace: str


Reply = ProcessedPicture | RefusedPicture | FailedPicture
reply_decoder = msgspec.msgpack.Decoder(Reply)
_task_decoder = msgspec.msgpack.Decoder(ProcessTask)


class Processor:
    """A model's own way to see a picture."""

    def __init__(self, config: ProcessorConfig) -> None:
        import mlx.core as mx
        from mlx_vlm.utils import get_model_and_args, load_config, load_processor

        # Resizing and cutting into patches is the CPU's work; the GPU is the engine's.
        mx.set_default_device(mx.cpu)
        self._config = config
        folder = Path(config.folder)
        get_model_and_args(load_config(folder))  # makes the kind's own processor known
        self._processor: Any = load_processor(
            folder, add_detokenizer=False, trust_remote_code=config.trust_remote_code
        )
        self._tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)

    def seen(
        self, data: bytes, digest: str = "", *, low: bool = False, moving: bool = False
    ) -> ProcessedPicture:
        try:
            found = self._film(data, low) if moving else self._still(data, low)
        except ValueError as error:
            raise BadPicture(f"The model's processor does not take the picture: {error}") from error
        ids = [int(id) for id in _array(found["input_ids"]).reshape(-1)]
        tensors = {
            name: _tensor(value)
            for name, value in found.items()
            if name not in _TEXT and value is not None
        }
        grid = found.get("image_grid_thw")
        return ProcessedPicture(
            text=self._text(ids),
            tokens=ids.count(self._config.token),
            grid=() if grid is None else tuple(int(n) for n in _array(grid).reshape(-1)[:3]),
            picture=memoryview(encoder.encode(Picture(digest, tensors))),
        )

    def _still(self, data: bytes, low: bool) -> dict[str, Any]:
        image = pixels(data, self._config.limits, low=low)
        return dict(self._processor(text=[self._config.placeholder], images=[image]))

    def _film(self, data: bytes, low: bool) -> dict[str, Any]:
        """A video as a picture with several times: where it stands, its features do, so that it makes no
        difference whose placeholders were there."""
        shown = frames(data, self._config.limits, low=low)
        own = self._processor.video_token
        found = dict(self._processor(text=[own], videos=[shown]))
        ids = _array(found["input_ids"])
        ids[ids == self._tokenizer.convert_tokens_to_ids(own)] = self._config.token
        return {
            "input_ids": ids,
            "pixel_values": found["pixel_values_videos"],
            "image_grid_thw": found["video_grid_thw"],
        }

    def _text(self, ids: list[int]) -> str:
        """The text that these tokens are of, the processor's own begin and end left out."""
        tokenizer = self._tokenizer
        if ids and ids[0] == getattr(tokenizer, "bos_token_id", None):
            ids = ids[1:]
        if ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
            ids = ids[:-1]
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        parts: list[str] = []
        plain: list[int] = []
        # Decoders put spaces around special tokens, which are not there.
        for id in [*ids, None]:
            if id is None or id in added:
                if plain:
                    parts.append(tokenizer.decode(plain, clean_up_tokenization_spaces=False))
                    plain = []
                if id is not None:
                    parts.append(str(added[id].content))
            else:
                plain.append(id)
        return "".join(parts)


def _array(value: Any) -> Any:
    import numpy as np

    return np.array(value)


def _tensor(value: Any) -> Tensor:
    import numpy as np

    array = np.ascontiguousarray(_array(value))
    if array.dtype == object:
        raise BadPicture("The model's processor cuts the picture into pieces of different sizes.")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(array.dtype.name, array.shape, memoryview(array.tobytes()))


def reply_to(processor: Processor, frame: bytes) -> Reply:
    begin = 1 + frame[0]
    task = _task_decoder.decode(frame[1:begin])
    try:
        if len(frame) == begin:
            return ProcessedPicture()
        return processor.seen(frame[begin:], task.digest, low=task.low, moving=task.moving)
    except BadPicture as error:
        return RefusedPicture(error.message)
    except Exception:  # the front says so to the one who asked, and the next picture is another's
        return FailedPicture(traceback.format_exc())


def main() -> None:
    end = WorkerEnd()
    config = msgspec.json.decode(sys.argv[1], type=ProcessorConfig)
    processor: Processor | None = None
    for data in end.tasks(IDLE):
        try:
            processor = processor or Processor(config)
            reply = reply_to(processor, data)
        except Exception:  # a folder without a processor fails every picture, not the server
            reply = FailedPicture(traceback.format_exc())
        end.reply(msgspec.msgpack.encode(reply))
    os._exit(0)


if __name__ == "__main__":
    main()
