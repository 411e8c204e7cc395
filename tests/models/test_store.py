"""The list of models and what folders say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import CONTEXT, EOS, HIDDEN, INNER, KV_HEADS, LAYERS, TOKENS, write_gguf
from gguf_files import HEAD as HEAD_DIM
from huggingface_hub import constants

from millrace.errors import ModelError
from millrace.models import store
from millrace.models.description import describe
from millrace.models.resolve import resolve

PARAMETERS = (
    len(TOKENS) * HIDDEN
    + LAYERS * (2 * HIDDEN * HIDDEN + 2 * KV_HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER)
    + (2 * LAYERS + 1) * HIDDEN
)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def make_hub(tmp_path: Path, name: str, config: dict[str, Any]) -> Path:
    repo = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    head = json.dumps({"w": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}}).encode()
    content = len(head).to_bytes(8, "little") + head + bytes(30)
    blob = repo / "blobs" / "b10b"
    blob.parent.mkdir()
    blob.write_bytes(content)
    (folder / "model.safetensors").symlink_to(blob)
    return folder


@pytest.mark.parametrize(("kind", "quantization"), [("F16", None), ("Q4_0", "4-bit")])
def test_describe(tmp_path: Path, kind: str, quantization: str | None) -> None:
    from gguf.constants import GGMLQuantizationType

    source = write_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType[kind]).path
    about = describe(resolve(str(source)).path)
    assert about.architecture == "llama"
    assert about.parameters == PARAMETERS
    assert about.quantization == quantization
    assert about.dtype == "float16"
    assert about.context == CONTEXT
    assert about.eos == [EOS]
    assert about.chat_template
    assert about.vocabulary == len(TOKENS)
    assert about.bytes > 100_000


def test_ends_are_gathered_from_every_file(tmp_path: Path) -> None:
    config = {"model_type": "x", "eos_token_id": 1, "text_config": {"eos_token_id": [2, 3]}}
    folder = make_hub(tmp_path, "org/x", config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokens = {"added_tokens": [{"id": 9, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    assert sorted(describe(folder).eos) == [1, 2, 3, 4, 9]


def test_nested_configurations(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 777, "vocab_size": 12}
    about = describe(make_hub(tmp_path, "org/x", {"model_type": "gemma3", "text_config": text}))
    assert (about.context, about.vocabulary, about.architecture) == (777, 12, "gemma3")
    assert (about.parameters, about.dtype) == (15, "bfloat16")


def test_the_list_holds_whole_language_models(tmp_path: Path) -> None:
    resolve(str(write_gguf(tmp_path / "tiny.gguf").path))
    speaker = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    make_hub(tmp_path, "org/speaker", speaker | {"torch_dtype": "bfloat16"})
    make_hub(tmp_path, "org/embedder", {"model_type": "bert", "architectures": ["BertModel"]})
    partial = make_hub(tmp_path, "org/partial", speaker)
    (partial / "model.safetensors").unlink()
    models = {model.name: model for model in store.local_models()}
    own = next(name for name in models if name.startswith("tiny-"))
    assert set(models) == {own, "org/speaker"}
    assert (models[own].source, models["org/speaker"].source) == ("gguf", "hub")
    assert models["org/speaker"].quantization == "bfloat16"
    assert models["org/speaker"].bytes > 100


def test_removing(tmp_path: Path) -> None:
    folder = resolve(str(write_gguf(tmp_path / "tiny.gguf").path)).path
    hub = make_hub(tmp_path, "org/speaker", {"model_type": "qwen3"})
    assert store.remove("tiny") > 100_000
    assert not folder.exists()
    assert store.remove("org/speaker") > 100
    assert not hub.exists()
    assert store.local_models() == []
    with pytest.raises(ModelError, match="no model 'tiny'"):
        store.remove("tiny")
    for name in ("", ".", "..", "../..", ".locks", "/", "a/\0", "\ud800/a", "a/" + 5000 * "b"):
        with pytest.raises(ModelError, match="no model"):
            store.remove(name)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"{", r"config\.json is not valid JSON"),
        ("config.json", b"[]", r"config\.json should hold"),
        ("model.safetensors", b"\xff" * 20, r"model\.safetensors is not a sound"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", r"model\.safetensors is not a sound"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = make_hub(tmp_path, "org/x", {"model_type": "qwen3"})
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        describe(folder)
