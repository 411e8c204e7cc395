"""Which kinds are served: mlx-lm's own answer, and what becomes of a model file that ends the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.config import EngineConfig
from millrace.errors import ModelError
from millrace.models.load import load
from millrace.models.mlx_lm_kinds import has_class
from millrace.models.vision.families import family_of

VISION = {"vision_config": {"hidden_size": 8}}


@pytest.mark.parametrize("kind", ["llama", "gemma3n", "nemotron-nas", "lille-130m", "lfm2-vl"])
def test_kinds_with_a_file_are_known_hyphens_included(kind: str) -> None:
    assert has_class(kind)


@pytest.mark.parametrize("kind", ["mistral", "kimi_k2", "phi-msft", "gemma4_unified"])
def test_kinds_under_a_new_name_are_known(kind: str) -> None:
    assert has_class(kind)


@pytest.mark.parametrize("kind", ["", "nothing", "../utils", "llama.py", "models/llama", "llama "])
def test_other_names_are_not(kind: str) -> None:
    assert has_class(kind) is False


def test_a_vision_model_under_a_new_name_is_served_as_text() -> None:
    assert family_of({"model_type": "gemma4_unified"} | VISION) is None


def test_a_vision_model_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ModelError, match="'unheard_of', which is not proven"):
        family_of({"model_type": "unheard_of"} | VISION)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('install the package first')\nraise SystemExit(1)", "install the package first"),
        ("raise SystemExit('no such package')", "no such package"),
        ("raise SystemExit(3)", "it ended with status 3"),
    ],
)
def test_a_model_file_that_ends_the_process_is_an_error(
    code: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "model_file": "own.py"})
    )
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=f"gave up: {reason}"):
        load(EngineConfig(name="own", model=str(tmp_path), trust_remote_code=True))
