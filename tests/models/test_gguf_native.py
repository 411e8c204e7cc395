"""Converted models by our own kernels: K-quants as they are in the file, not as MLX has to hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from millrace.models.gguf import convert
from millrace.native import native


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("untied", [False, True])
def test_a_converted_model_runs_with_the_values_of_its_file(
    tmp_path: Path, arch: str, untied: bool
) -> None:
    generated = write_gguf(tmp_path / "m.gguf", arch, Type.Q6_K, untied=untied)
    folders = {}
    for name, exact in (("compact", False), ("exact", True)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        convert(generated.path, folders[name], exact=exact)
    tokens = mx.array([[1, 5, 9, 2, 77, 260, 11, 3, 8, 120, 45, 6]])
    assert_same(tokens, folders["compact"], "u6", like=folders["exact"])
    # A folder that was converted before there was such a file.
    (folders["compact"] / "packed.safetensors").unlink()
    assert_same(tokens, folders["compact"], "f16", like=folders["compact"])


def assert_same(tokens: mx.array, folder: Path, codes: str, *, like: Path) -> None:
    """The folder's model holds such codes, and gives what MLX does with another's weights in float32."""
    model = loaded(folder)
    assert {layer.down.form.codes for layer in model.layers} == {codes}
    straight, _ = load_model(like)
    straight.update(tree_map(lambda value: value.astype(mx.float32), straight.parameters()))
    expected = np.array(straight(tokens))
    found = np.array(model(tokens, model.make_cache()))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def loaded(folder: Path) -> Any:
    model, _ = load_model(folder, lazy=True)
    found = native(model, 2, folder)
    assert found is not None
    return found
