"""GGUF containers: read as the `gguf` package reads them, and every broken one refused in words."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.errors import ModelError
from millrace.models.gguf import open_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", kind=Kind.Q4_0).path


def test_agrees_with_the_gguf_package(whole: Path) -> None:
    ours, theirs = open_gguf(whole), gguf.GGUFReader(whole)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert own.kind == tensor.tensor_type
        assert np.array_equal(own.raw, tensor.data.reshape(-1).view(np.uint8))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_cut_file_is_called_truncated(whole: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    keep = data.draw(st.one_of(st.integers(4, 8000), st.integers(4, len(content) - 1)))
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf is (truncated|corrupt)"):
        open_gguf(cut)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(at=st.integers(4, 12000), byte=st.integers(0, 255))
def test_a_damaged_head_never_ends_in_another_error(whole: Path, at: int, byte: int) -> None:
    content = bytearray(whole.read_bytes())
    content[at] = byte
    damaged = whole.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        open_gguf(damaged)
    except ModelError as error:
        assert "damaged.gguf" in error.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "truncated"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        open_gguf(path)


def test_an_unknown_type_is_named(whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    name = b"output_norm.weight"
    at = content.rindex(name) + len(name) + 4 + 8
    content[at : at + 4] = struct.pack("<I", 250)
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"'output_norm\.weight' in the unknown ggml type 250"):
        open_gguf(path)


def test_split_files_are_joined(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-{i:05d}-of-00002.gguf" for i in (1, 2))
    write_gguf(first, drop=("output_norm.weight", "blk.1.ffn_up.weight"))
    writer = gguf.GGUFWriter(second, "llama")
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.add_tensor("blk.1.ffn_up.weight", np.ones((512, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in (first, second):
        joined = open_gguf(part)
        assert {"token_embd.weight", "output_norm.weight"} <= joined.tensors.keys()
        assert joined.metadata["general.architecture"] == "llama"
    shutil.move(second, tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing"):
        open_gguf(first)
