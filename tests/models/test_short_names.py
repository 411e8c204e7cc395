"""Short names: each stands for one model whose architecture is loaded here in a tiny shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import short_name_shapes as shapes

from millrace.config import EngineConfig
from millrace.models import blas, device, short_names, suggestions
from millrace.models.footprint import footprint
from millrace.models.short_names import all_names, find, near

device.core()

from millrace.models.encoders import encoder_of  # noqa: E402
from millrace.models.encoders.load import load_encoder  # noqa: E402
from millrace.models.load import load  # noqa: E402

NAMES = all_names()
TEXT = sorted({m.architecture for m in NAMES if not m.sees and not m.embeds})
SEEING = sorted({m.architecture for m in NAMES if m.sees})
EMBEDDING = sorted({m.architecture for m in NAMES if m.embeds})


@pytest.mark.parametrize("architecture", TEXT)
def test_every_architecture_that_makes_text_loads(architecture: str, tmp_path: Path) -> None:
    folder = shapes.text_model(architecture, tmp_path / "m")
    loaded = load(EngineConfig(model=str(folder), name="m"))
    assert loaded.context == 4096
    if blas.mlx_backend() == "cpu":
        # Small matrices take somewhat more: the kernels pad them to 16 rows.
        expected = footprint(folder).weights
        assert loaded.weight_bytes * 0.9 <= expected <= loaded.weight_bytes * 1.1


@pytest.mark.parametrize("architecture", SEEING)
def test_every_architecture_that_sees_loads(architecture: str, tmp_path: Path) -> None:
    folder = shapes.seeing_model(architecture, tmp_path / "m")
    assert load(EngineConfig(model=str(folder), name="m")).sees


def test_gemma_with_experts_loads(tmp_path: Path) -> None:
    folder = shapes.seeing_model("gemma4", tmp_path / "m", **shapes.GEMMA_EXPERTS)
    assert load(EngineConfig(model=str(folder), name="m")).sees


@pytest.mark.parametrize("architecture", EMBEDDING)
def test_every_architecture_of_embeddings_loads(architecture: str, tmp_path: Path) -> None:
    folder = shapes.embedding_model(architecture, tmp_path / "m")
    facts = encoder_of(folder, name="m")
    assert facts is not None
    assert load_encoder(EngineConfig(model=str(folder), name="m"), facts).facts == facts


def test_architectures_that_cannot_be_loaded_are_not_in_the_table() -> None:
    assert not {m.architecture for m in NAMES} & {"qwen4_exp", "glm5_next", "deepseek_v4"}


def test_each_name_and_each_repository_is_there_once() -> None:
    assert len({m.name for m in NAMES}) == len({m.source for m in NAMES}) == len(NAMES)
    for model in NAMES:
        assert find(model.name) == find(model.name.upper()) == model
        assert short_names.of_source(model.source) == model
        assert find(model.source.partition("/")[2]) == model, "its repository without the owner"
        assert "/" not in model.name and model.name == model.name.lower()
        assert model.bytes >= model.active_bytes > 0
        assert set(model.uses) <= {"chat", "code", "tools", "thinking", "pictures", "embeddings"}


def test_no_two_models_have_a_name_in_common() -> None:
    for entry in short_names._entries():
        for name in (entry.name, entry.title, *entry.aliases):
            assert find(name) == entry.rows()[0], name
            for row in entry.rows():
                assert find(f"{name}-{row.bits}bit") == row, name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3.5-4b", "qwen3.5-4b"),
        ("Qwen3.5:4b", "qwen3.5-4b"),
        ("gemma-4-e4b", "gemma-4-e4b"),
        ("gemma4:e4b", "gemma-4-e4b"),
        ("gemma-4-e4b-it-4bit", "gemma-4-e4b"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("llama3.2", "llama3.2-3b"),
        ("llama3.2:latest", "llama3.2-3b"),
        ("llama3.2:1b", "llama3.2-1b"),
        ("llama3.2:1b-instruct-q4_K_M", "llama3.2-1b"),
        ("Llama-3.2-1B-Instruct-8bit", "llama3.2-1b-8bit"),
        ("qwen3-8b-8bit", "qwen3-8b-8bit"),
        ("qwen3:8b-q8_0", "qwen3-8b-8bit"),
        ("gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b"),
    ],
)
def test_names_are_found_as_people_type_them(typed: str, name: str) -> None:
    found = find(typed)
    assert found is not None and found.name == name


@pytest.mark.parametrize("typed", ["", "qwen", "qwen3-8b-3bit", "org/qwen3-8b", "-", "a" * 5000])
def test_other_names_are_not(typed: str) -> None:
    assert find(typed) is None


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("qwen3.5-4", "qwen3.5-4b"),
        ("lama3.2", "llama3.2-3b"),
        ("gpt-os-20b", "gpt-oss-20b"),
        ("gemma", "gemma-4-e4b"),
        ("qwen3-8b-3bit", "qwen3-8b"),
        ("somebody/GPT-OSS-20b", "gpt-oss-20b"),
    ],
)
def test_near_names_are_suggested(typed: str, suggested: str) -> None:
    assert suggested in near(typed)
    assert len(near(typed)) <= 3


def test_nothing_is_suggested_for_what_is_like_no_name() -> None:
    assert near("zzzz") == near("") == near("a" * 5000) == []
    assert near("my-mdl", ("my-model",)) == ["my-model"]


def test_what_kernels_read_packed_is_not_counted_as_widened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "cpu")
    for name in ("qwen3-4b", "llama3.2-3b", "mistral-7b", "qwen3.5-4b", "lfm2.5-1.2b"):
        model = find(name)
        assert model is not None
        assert suggestions.need(model) < model.bytes * 1.1 + 1.5e9, name
    for name in ("gemma-4-e4b", "qwen3-coder-30b"):
        model = find(name)
        assert model is not None
        assert suggestions.need(model) > model.bytes * 7, name
        assert "widens" in suggestions.fit(model, 10**9).reason


def test_the_choice_grows_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {}
    for backend in ("cpu", "metal"):
        monkeypatch.setattr(blas, "mlx_backend", lambda backend=backend: backend)
        for size in (2, 4, 8, 12, 24, 48, 96):
            best = suggestions.recommended(size * 10**9)
            assert best is None or suggestions.need(best) <= size * 10**9
            chosen[backend, size] = best and best.name
    assert chosen["metal", 8] == "qwen3.5-4b" and chosen["metal", 12] == "qwen3.5-9b"
    assert chosen["metal", 96] == "gpt-oss-120b"
    assert chosen["cpu", 2] == "qwen3-0.6b"
    assert chosen["cpu", 8] == chosen["cpu", 96] == "qwen3-4b", (
        "a larger one would answer too slowly"
    )
    assert suggestions.recommended(10**8) is None and suggestions.recommended(None) is None
