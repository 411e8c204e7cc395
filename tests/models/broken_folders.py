"""Model folders that are broken in every way that was thought of, each with words of its reason."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 100_000
Break = Callable[[Path], object]


def _write(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data)


def _instead(name: str, make: Callable[[Path], object]) -> Break:
    """Something else in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _config(**fields: Any) -> Break:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def _index(weight_map: Any) -> Break:
    return _write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


def _head(head: Any, size: int | None = None, body: int = 64) -> Break:
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    length = struct.pack("<Q", len(data) if size is None else size)
    return _write("model.safetensors", length + data + bytes(body))


def _tensor(**fields: Any) -> Break:
    return _head({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields})


def _huge(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(1 << 40)  # nothing of it is written to the disk


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _nothing(file: Path) -> None:
    file.symlink_to("nowhere")


def _nested(name: str) -> Break:
    return _write(name, b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}")


_BOTH = {n: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for n in ("a", "b")}

BROKEN: dict[str, tuple[Break, str]] = {
    "config-nested": (_nested("config.json"), "nested too deeply"),
    "config-cut": (_write("config.json", b'{"model_type": "lla'), "not valid JSON"),
    "config-empty": (_write("config.json", b""), "not valid JSON"),
    "config-list": (_write("config.json", b"[]"), "should hold a JSON object"),
    "config-number": (_write("config.json", b"3"), "should hold a JSON object"),
    "config-null": (_write("config.json", b"null"), "should hold a JSON object"),
    "config-bytes": (_write("config.json", b'{"model_type": "\xff\xfe"}'), "not valid JSON"),
    "config-digits": (_write("config.json", b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "config-huge": (_instead("config.json", _huge), "larger than 8.4 MB"),
    "config-loop": (_instead("config.json", _loop), "cannot be read"),
    "config-nothing": (_instead("config.json", _nothing), "cannot be read"),
    "config-pipe": (_instead("config.json", os.mkfifo), "not a regular file"),
    "config-folder": (_instead("config.json", Path.mkdir), "not a regular file"),
    "type-list": (_config(model_type=["llama"]), "model_type should be a text, and is a list"),
    "type-number": (_config(model_type=7), "model_type should be a text"),
    "classes-text": (_config(architectures="LlamaForCausalLM"), "architectures should be a list"),
    "text-list": (_config(text_config=[1]), "text_config should be an object"),
    "layers-many": (_config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
    "layers-text": (_config(num_hidden_layers="2"), "num_hidden_layers should be a number"),
    "layers-inside": (_config(text_config={"num_hidden_layers": -1}), "text_config.num_hidden"),
    "window-huge": (_config(max_position_embeddings=10**40), "max_position_embeddings is too"),
    "window-none": (_config(max_position_embeddings=0), "max_position_embeddings is 0"),
    "window-text": (_config(max_position_embeddings={}), "max_position_embeddings should be"),
    "size-infinite": (_write("config.json", b'{"hidden_size": 1e999}'), "hidden_size is too large"),
    "bits-text": (_config(quantization={"bits": "x"}), "quantization.bits should be a whole"),
    "bits-list": (_config(quantization={"bits": [4]}), "quantization.bits should be a whole"),
    "bits-many": (_config(quantization={"bits": 10**9}), "quantization.bits is 1000000000"),
    "bits-inside": (_config(quantization={"a": {"bits": {}}}), "quantization.a.bits should be"),
    "group-text": (_config(quantization={"group_size": "y"}), "quantization.group_size should"),
    "quantization-text": (_config(quantization="4"), "quantization should be an object"),
    "index-list": (_index([1, 2]), "is not sound"),
    "index-numbers": (_index({"a": 1}), "is not sound"),
    "index-outside": (_index({"a": "../other/model.safetensors"}), "outside of the folder"),
    "index-missing": (_index({"a": "model-9.safetensors"}), "model-9.safetensors is missing"),
    "index-nested": (_nested("model.safetensors.index.json"), "nested too deeply"),
    "index-text": (_write("model.safetensors.index.json", b'"x"'), "is not sound"),
    "head-beyond": (_head({}, size=1 << 40), "its head is cut short"),
    "head-most": (_head({}, size=(1 << 64) - 1), "its head is cut short"),
    "head-large": (
        lambda folder: (
            _head(b"{}", size=1 << 30)(folder),
            os.truncate(folder / "model.safetensors", 1 << 34),
        ),
        "at most 33554432 are read",
    ),
    "head-none": (_write("model.safetensors", b"\x01"), "its head is cut short"),
    "head-words": (_head(b"no JSON at all"), "not a sound safetensors file"),
    "head-list": (_head([1]), "not a sound safetensors file"),
    "head-nested": (
        _head(b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
        "not a sound safetensors file",
    ),
    "head-metadata": (_head({"__metadata__": [1]}), "not a sound safetensors file"),
    "tensor-number": (_head({"a": 1}), "the tensor 'a'"),
    "tensor-kind": (_tensor(dtype=["F32"]), "the tensor 'a'"),
    "tensor-shape": (_tensor(shape="2"), "the tensor 'a'"),
    "tensor-below": (_tensor(shape=[-2]), "the tensor 'a'"),
    "tensor-wide": (_tensor(shape=[1 << 62, 1 << 62]), "the tensor 'a'"),
    "tensor-deep": (_tensor(shape=[1] * 10_000), "impossible shape"),
    "tensor-beyond": (_tensor(data_offsets=[0, 1 << 50]), "lies at bytes 0 to"),
    "tensor-turned": (_tensor(data_offsets=[8, 0]), "lies at bytes 8 to 0"),
    "tensor-before": (_tensor(data_offsets=[-8, 0]), "lies at bytes -8 to 0"),
    "tensor-short": (_tensor(data_offsets=[0, 4]), "its shape and type do not give"),
    "tensor-fields": (_tensor(more={}), "the tensor 'a'"),
    "tensors-overlap": (_head(_BOTH), "its tensors overlap"),
    "weights-pipe": (_instead("model.safetensors", os.mkfifo), "not a regular file"),
    "weights-folder": (_instead("model.safetensors", Path.mkdir), "not a regular file"),
    "weights-loop": (_instead("model.safetensors", _loop), "cannot be read"),
    "weights-missing": (_instead("model.safetensors", lambda file: None), "is missing"),
    "tokenizer-missing": (_instead("tokenizer.json", lambda file: None), "is missing"),
    "tokenizer-pipe": (_instead("tokenizer.json", os.mkfifo), "not a regular file"),
    "tokenizer-huge": (_instead("tokenizer.json", _huge), "larger than 268 MB"),
    "tokenizer-cut": (_write("tokenizer.json", b'{"model": {"vocab'), "is not sound"),
    "tokenizer-nested": (_nested("tokenizer.json"), "nested too deeply"),
    "settings-nested": (_nested("tokenizer_config.json"), "nested too deeply"),
    "settings-list": (_write("tokenizer_config.json", b"[]"), "should hold a JSON object"),
    "settings-cut": (_write("tokenizer_config.json", b"{"), "not valid JSON"),
    "generation-cut": (_write("generation_config.json", b"{"), "not valid JSON"),
    "generation-pipe": (_instead("generation_config.json", os.mkfifo), "not a regular file"),
    "unknown-pipe": (_instead("something.bin", os.mkfifo), "not a regular file"),
    "modules-list": (_write("modules.json", b"[1]"), "modules.json cannot be understood"),
    "modules-nested": (_write("modules.json", b"[" * DEEP), "modules.json cannot be understood"),
    "labels-text": (
        _config(architectures=["LlamaForSequenceClassification"], id2label={"x": "y"}),
        "cannot be interpreted",
    ),
}  # fmt: skip
"""Name → how a sound folder is broken so, and words of the reason that must be given for it."""


def make(shelf: Path, sound: Path) -> Path:
    """All of them in one folder, each a copy of a sound one."""
    for name, (change, _) in BROKEN.items():
        change(Path(shutil.copytree(sound, shelf / name)))
    return shelf
