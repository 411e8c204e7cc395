"""GGUF files that somebody meant to do harm with: each is refused with a reason, in bounded time."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import PYTHON
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import EOS, HIDDEN, TOKENS, TYPES, write_gguf

from millrace.errors import ModelError
from millrace.models.gguf import convert
from millrace.models.gguf.reader import open_gguf

GIB = 1 << 30


def _head(tensors: int, pairs: int, rest: bytes = b"", size: int = 0) -> Callable[[Path], object]:
    """A file's beginning, and zeros up to a size of which nothing is written to the disk."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest)
            file.truncate(max(file.tell(), size))

    return make


def _pair(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def _tensor(name: bytes, shape: tuple[int, ...], offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dimensions + struct.pack("<IQ", 0, offset)


_NESTED = struct.pack("<IQ", 9, 1) * 100_000
_LARGE = 40 * GIB
HEADS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors": (_head(1 << 60, 0), "claims"),
    "tensors-sparse": (_head(1 << 30, 0, size=_LARGE), "claims 1073741824 tensors"),
    "pairs-sparse": (_head(0, 1 << 30, size=_LARGE), "claims 1073741824 metadata pairs"),
    "string": (_head(0, 1, struct.pack("<Q", 1 << 63)), "truncated"),
    "string-sparse": (_head(0, 1, struct.pack("<Q", 30 * GIB), _LARGE), "head has more than"),
    "array": (_head(0, 1, _pair(b"a", 9, struct.pack("<IQ", 0, 1 << 62))), "claims"),
    "array-sparse": (
        _head(0, 1, _pair(b"a", 9, struct.pack("<IQ", 2, 1 << 33)), _LARGE),
        "claims 8589934592 array values",
    ),
    "arrays-sparse": (
        _head(0, 1, _pair(b"a", 9, struct.pack("<IQ", 9, 1 << 22)), _LARGE),
        "no metadata .general.architecture.",
    ),
    "nested": (_head(0, 1, _pair(b"a", 9, _NESTED)), "arrays inside arrays"),
    "twice": (_head(0, 2, 2 * _pair(b"a", 0, b"\1")), "the metadata 'a' twice"),
    "alignment": (
        _head(0, 1, _pair(b"general.alignment", 5, struct.pack("<i", -32))),
        "aligned to -32 bytes",
    ),
    "dimensions": (_head(1, 0, _tensor(b"a", (1,) * 5)), "claims 5 dimensions"),
    "empty": (_head(1, 0, _tensor(b"a", (0, 1 << 60))), "is empty"),
    "wide": (_head(1, 0, _tensor(b"a", (1 << 60, 1 << 60))), "truncated"),
    "offset": (_head(1, 0, _tensor(b"a", (4,), (1 << 64) - 1)), "truncated"),
    "tensor-twice": (_head(2, 0, 2 * _tensor(b"a", (1,)), 4096), "the tensor 'a' twice"),
    "overlap": (
        _head(9, 0, b"".join(_tensor(b"%d" % n, (512,)) for n in range(9)), 4096),
        "its tensors overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    make, words = HEADS[name]
    make(tmp_path / "bad.gguf")
    with pytest.raises(ModelError, match=words):
        convert(tmp_path / "bad.gguf", tmp_path / "made")


WHOLE: dict[str, tuple[dict[str, object], str]] = {
    "layers": ({"extra": {"llama.block_count": 1 << 31}}, "claims 2147483648 layers"),
    "no-layers": ({"extra": {"llama.block_count": 0}}, "claims 0 layers"),
    "heads": ({"extra": {"llama.attention.head_count": 1 << 30}}, "is corrupt"),
    "head-size": (
        {"extra": {"llama.attention.key_length": 1 << 31, "llama.rope.dimension_count": 1 << 31}},
        "heads of 2147483648 values",
    ),
    "window": ({"extra": {"llama.context_length": 0}}, "max_position_embeddings is 0"),
    "inner": ({"extra": {"llama.feed_forward_length": (1 << 32) - 1}}, "intermediate_size is"),
    "factors": (
        {"tensors": {"rope_freqs.weight": np.full(1000, np.nan, np.float32)}},
        "rope factors",
    ),
    "rope-nan": ({"extra": {"llama.rope.freq_base": float("nan")}}, "'llama.rope.freq_base' is nan"),
    "epsilon-inf": (
        {"extra": {"llama.attention.layer_norm_rms_epsilon": float("inf")}},
        "layer_norm_rms_epsilon' is inf",
    ),
    "tokens": (
        {"tokens": ([*TOKENS[:EOS], "a" * 50_000, *TOKENS[EOS + 1 :]], TYPES)},
        "its tokens are too long",
    ),
    "tokens-numbers": ({"extra": {"tokenizer.ggml.tokens": [1, 2]}}, "list of tokens"),
    "merges-numbers": ({"extra": {"tokenizer.ggml.merges": [1, 2]}}, "is not a merge"),
    "merges-strange": ({"extra": {"tokenizer.ggml.merges": ["q z"]}}, "merges do not fit"),
    "kind-number": ({"extra": {"general.architecture": 7}}, "should be str"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_whose_metadata_lies_is_refused(tmp_path: Path, name: str) -> None:
    options, words = WHOLE[name]
    path = write_gguf(tmp_path / "bad.gguf", **options).path  # type: ignore[arg-type]
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match=words) as caught:
        convert(path, tmp_path / "made")
    assert "bad.gguf" in caught.value.message or name == "factors"
    assert HIDDEN and not list((tmp_path / "made").iterdir()), "nothing is written"


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, kind: str, value: float) -> None:
    path = write_gguf(tmp_path / "bad.gguf", kind=GGMLQuantizationType[kind]).path
    name = "blk.1.ffn_up.weight"
    raw = open_gguf(path).tensors[name].raw
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    at = path.read_bytes().index(raw.tobytes()) + 3 * size
    spelled = {
        "F32": np.float32(value).tobytes(),
        "BF16": np.float32(value).tobytes()[2:],
        "Q6_K": b"\1" * 208 + np.float16(value).tobytes(),  # codes and scales come first
    }.get(kind, np.float16(value).tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(spelled)
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match=rf"bad.gguf is corrupt: .*'{name}'.*NaN or infinite"):
        convert(path, tmp_path / "made")


def test_a_pipe_is_no_model_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        convert(tmp_path / "pipe.gguf", tmp_path / "made")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit holds for mapped files elsewhere")
def test_files_that_lie_take_no_memory(tmp_path: Path) -> None:
    """All of them in one process that may have two gigabytes of its own."""
    for name, (make, _) in HEADS.items():
        make(tmp_path / f"{name}.gguf")
    program = (
        "import sys; from pathlib import Path\n"
        "from millrace.errors import ModelError; from millrace.models.gguf import convert\n"
        "for file in sorted(Path(sys.argv[1]).glob('*.gguf')):\n"
        "    try: convert(file, Path(sys.argv[1]) / 'made')\n"
        "    except ModelError: pass\n"
        "    else: raise SystemExit(f'{file} was taken')\n"
    )
    subprocess.run(
        [PYTHON, "-c", program, str(tmp_path)],
        check=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 * GIB, 2 * GIB)),
    )
