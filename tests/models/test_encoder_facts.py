"""What a folder is taken for: kinds, poolings, lengths, prompts and sizes, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ModelError
from millrace.models.encoders import Encoder, encoder_of

BERT: dict[str, Any] = {"model_type": "bert", "max_position_embeddings": 512}
QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 32768,
}


def folder(place: Path, config: dict[str, Any], **files: Any) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    for name, value in files.items():
        file = place / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(value))
    return place


def facts(place: Path, config: dict[str, Any], *, options: Any = None, **files: Any) -> Encoder:
    found = encoder_of(folder(place, config, **files), **(options or {}))
    assert found is not None
    return found


MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.modules.Pooling"},
]


def test_kinds(tmp_path: Path) -> None:
    classes = ["XForSequenceClassification"]
    assert facts(tmp_path / "a", BERT).kind == "embed"
    assert facts(tmp_path / "b", BERT | {"architectures": classes}).kind == "classify"
    assert encoder_of(folder(tmp_path / "c", QWEN)) is None
    assert facts(tmp_path / "d", QWEN, options={"task": "embed"}).kind == "embed"
    assert facts(tmp_path / "e", QWEN, options={"task": "rerank"}).kind == "judge"
    assert facts(tmp_path / "Qwen3-Reranker-4B-4bit", QWEN).kind == "judge"
    hub = tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "abc"
    assert facts(hub, QWEN).kind == "judge"
    assert facts(tmp_path / "g", QWEN | {"architectures": classes}).kind == "classify"
    assert facts(tmp_path / "h", QWEN, modules=MODULES).kind == "embed"
    with pytest.raises(ModelError, match="no text"):
        encoder_of(tmp_path / "a", task="generate")
    assert encoder_of(tmp_path / "h", task="generate") is None


@pytest.mark.parametrize(
    ("name", "config", "pooling", "expected"),
    [
        ("bge-small-en", BERT, None, ("cls",)),
        ("mxbai-embed-large", BERT, None, ("cls",)),
        ("all-MiniLM-L6-v2", BERT, None, ("mean",)),
        ("e5-base", BERT, None, ("mean",)),
        ("x", BERT, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ("x", BERT, {"pooling_mode": "max"}, ("max",)),
        ("x", BERT, {"pooling_mode": ["cls", "mean"]}, ("cls", "mean")),
        ("bge", BERT, {"pooling_mode_mean_tokens": True}, ("mean",)),
        ("x", QWEN, {"pooling_mode_lasttoken": True}, ("lasttoken",)),
    ],
)
def test_pooling_is_what_the_files_say_or_the_family_has(
    name: str, config: dict[str, Any], pooling: Any, expected: tuple[str, ...], tmp_path: Path
) -> None:
    files = {} if pooling is None else {"modules": MODULES, "1_Pooling__config": pooling}
    assert facts(tmp_path / name, config, **files).pooling == expected
    chosen = encoder_of(tmp_path / name, pooling="last")
    assert chosen is not None and chosen.pooling == ("lasttoken",)
    with pytest.raises(ModelError, match="nope"):
        encoder_of(tmp_path / name, pooling="nope")


def test_lengths(tmp_path: Path) -> None:
    roberta = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    unset = {"model_max_length": 10**30}
    unsaid = {"model_type": "roberta", "max_position_embeddings": 514}
    assert facts(tmp_path / "r", unsaid, tokenizer_config=unset).length == 512
    assert facts(tmp_path / "a", BERT, sentence_bert_config={"max_seq_length": 256}).length == 256
    assert facts(tmp_path / "b", BERT, tokenizer_config=unset).length == 512
    assert facts(tmp_path / "c", roberta, tokenizer_config=unset).length == 512
    assert facts(tmp_path / "d", BERT, tokenizer_config={"model_max_length": 384}).length == 384
    assert facts(tmp_path / "e", BERT, sentence_bert_config={"max_seq_length": None}).length == 512
    assert facts(tmp_path / "f", BERT, sentence_bert_config={"max_seq_length": 9999}).length == 512
    assert facts(tmp_path / "g", BERT, options={"context": 100}).length == 100


def test_sizes_and_normalisation(tmp_path: Path) -> None:
    assert facts(tmp_path / "a", BERT).matryoshka is None
    assert facts(tmp_path / "b", BERT | {"is_matryoshka": True}).matryoshka == ()
    sizes = BERT | {"matryoshka_dimensions": [256, 64]}
    assert facts(tmp_path / "c", sizes).matryoshka == (64, 256)
    assert facts(tmp_path / "d", QWEN, modules=MODULES).matryoshka == ()
    assert facts(tmp_path / "a", BERT).normalize
    assert not facts(tmp_path / "d", QWEN, modules=MODULES).normalize
    more = [*MODULES, {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]
    assert facts(tmp_path / "e", QWEN, modules=more).normalize


def test_labels_and_activations(tmp_path: Path) -> None:
    one = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}
    assert facts(tmp_path / "a", one).activation == "sigmoid"
    two = one | {"id2label": {"10": "z", "2": "b"}}
    assert facts(tmp_path / "b", two).labels == ("b", "z")
    assert facts(tmp_path / "b", two).activation == "softmax"
    many = two | {"problem_type": "multi_label_classification"}
    assert facts(tmp_path / "c", many).activation == "sigmoid"
    named = two | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert facts(tmp_path / "d", named).activation == "identity"


def test_modules_that_are_not_there_or_lead_outside_are_refused(tmp_path: Path) -> None:
    for module in ({"path": "1", "type": "x.CNN"}, {"path": "../1", "type": "x.Dense"}, {}, 7):
        with pytest.raises(ModelError, match=r"modules\.json"):
            facts(tmp_path, BERT, modules=[module])
