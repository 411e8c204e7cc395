"""Which models run by our own kernels; all others are left as they are, with a line that says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

pytest.importorskip("llvmlite")

from mlx_lm.tuner.lora import LoRALinear
from native_models import Kind, logprobs, random_tokens, run

from millrace.models.placement import place
from millrace.native import native
from millrace.native.model import NativeModel

TOKENS = random_tokens(12)


def quantised(mode: str, only: str = "") -> Any:
    model = Kind().build()
    nn.quantize(
        model,
        None,
        None,
        mode=mode,
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and only in path,
    )
    return model


def with_adapter() -> Any:
    model = Kind().build()
    layer = model.layers[-1].mlp
    layer.down_proj = LoRALinear.from_base(layer.down_proj)
    return model


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "another architecture": (lambda: tiny.build("gpt_oss"), "architecture is gpt_oss"),
    "heads of eight numbers": (lambda: tiny.build("llama"), "heads"),
    "layers of odd width": (lambda: Kind(hidden=96).build(), "widths"),
    "pairs side by side": (
        lambda: Kind(more={"rope_traditional": True}).build(),
        "positions",
    ),
    "positions that depend on the length": (
        lambda: Kind(more={"rope_scaling": {"type": "dynamic", "factor": 2.0}}).build(),
        "positions",
    ),
    "microscaled floats": (lambda: quantised("mxfp4"), "quantised as mxfp4"),
    "microscaled floats in the last layer only": (
        lambda: quantised("mxfp8", "layers.1.mlp.down"),
        "quantised as mxfp8",
    ),
    "an adapter in the last layer": (with_adapter, "LoRALinear"),
    "very many heads to a key": (
        lambda: Kind(heads=(193, 1), layers=1).build(),
        "heads share a key",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_that_is_not_known_is_left_as_it_is(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, reason = UNKNOWN[name]
    model = build()
    tokens = [t % 100 for t in TOKENS]
    before = np.array(model(mx.array([tokens])))
    with caplog.at_level(logging.INFO, "millrace.native"):
        assert native(model, 2) is None
    assert "not run as a whole" in caplog.text and reason in caplog.text
    assert np.array_equal(np.array(model(mx.array([tokens]))), before)


def test_a_model_that_is_known_has_given_its_weights_away() -> None:
    model = Kind(bits=4).build()
    before = sum(array.nbytes for _, array in _flat(model))
    own = native(model, 2)
    assert isinstance(own, NativeModel)
    left = sum(array.nbytes for _, array in _flat(model))
    assert left < 0.05 * before
    assert own.nbytes < 1.2 * before
    assert own.parameters() == {} and len(own.make_cache()) == len(own.layers) == 2


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    return found


def test_placement_keeps_what_is_asked_for() -> None:
    assert isinstance(place(Kind().build(), "auto", "cpu"), NativeModel)
    for wanted in ("f32", "bf16", "keep"):
        model = Kind().build()
        assert place(model, wanted, "cpu") is model
    model = Kind().build()
    assert place(model, "auto", "metal") is model


_FALLS_BACK = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
if sys.argv[1] == "absent":
    sys.modules["llvmlite"] = None
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from millrace.models.placement import place
settings = dict(model_type="llama", hidden_size=64, num_hidden_layers=1, intermediate_size=64,
                num_attention_heads=1, rms_norm_eps=1e-5, vocab_size=50)
model = llama.Model(llama.ModelArgs(**settings))
model.set_dtype(mx.bfloat16)
assert place(model, "auto", "cpu") is model
assert {a.dtype for _, a in tree_flatten(model.parameters())} == {mx.float32}
print(model(mx.array([[1, 2, 3]])).shape)
"""


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_without_llvmlite_models_run_in_float32(how: str, tmp_path: Path) -> None:
    if how == "broken":
        # What llvmlite does where its own library cannot be loaded.
        (tmp_path / "llvmlite").mkdir()
        (tmp_path / "llvmlite" / "__init__.py").write_text("raise OSError('no libstdc++')")
    done = subprocess.run(
        [sys.executable, "-c", _FALLS_BACK, how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert ("need llvmlite" if how == "absent" else "no libstdc++") in done.stdout
    assert "(1, 3, 50)" in done.stdout


def test_weights_of_zeros_and_of_great_size_stay_numbers() -> None:
    for scale in (0.0, 50.0):
        kind = Kind(bits=8, layers=1)
        both = kind.build(), kind.build()
        for model in both:
            for layer in model.layers:
                for part in (layer.self_attn.q_proj, layer.mlp.gate_proj):
                    part.scales, part.biases = part.scales * scale, part.biases * scale
        own = native(both[0], 2)
        assert own is not None
        found, theirs = logprobs(run(own, TOKENS)), logprobs(run(both[1], TOKENS))
        np.testing.assert_allclose(found, theirs, atol=1e-3, rtol=1e-4)
