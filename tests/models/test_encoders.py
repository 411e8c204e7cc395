"""Encoders equal plain numpy, alone and filled up beside others, whole and quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import encoder_folders as folders
from models import numpy_encoders as plain

from millrace.config import EngineConfig
from millrace.errors import ModelError
from millrace.models import device

mx = device.core()

from millrace.models.encoders import attention, encoder_of  # noqa: E402
from millrace.models.encoders.load import EncoderBatch, LoadedEncoder, finished, load_encoder  # noqa: E402

TOKENS = [[2, 40, 41, 42, 43, 3], [2, 50, 3], [2, *range(30, 90), 3], [2, 3]]


def loaded(folder: Path, **options: Any) -> LoadedEncoder:
    config = EngineConfig(model=str(folder), name=folder.name, weights="f32", **options)
    facts = encoder_of(folder, task=config.task, pooling=config.pooling)
    assert facts is not None
    return load_encoder(config, facts)


def batch(tokens: list[list[int]], segments: list[int] | None = None) -> EncoderBatch:
    return EncoderBatch(tokens, segments or [0] * len(tokens), [0] * len(tokens))


def vectors(encoder: LoadedEncoder, tokens: list[list[int]]) -> Any:
    return np.array(finished(encoder.vectors(batch(tokens))))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", folders.FAMILIES)
@pytest.mark.parametrize("is_quantized", [False, True])
def test_every_family_equals_plain_numpy_alone_and_filled_up(
    family: str, is_quantized: bool, tmp_path: Path
) -> None:
    folder = folders.encoder(tmp_path / "model", family)
    if is_quantized:
        folder = folders.quantized(folder, tmp_path / "small")
    encoder, weights, config = loaded(folder), folders.read(folder), config_of(folder)
    expected = [plain.STATES[family](weights, config, ids).mean(0) for ids in TOKENS]
    together = vectors(encoder, TOKENS)
    assert np.abs(together - expected).max() < 1e-4
    for ids, one in zip(TOKENS, together, strict=True):
        assert np.abs(vectors(encoder, [ids])[0] - one).max() < 1e-5


def test_float16_weights_are_widened_and_give_numbers(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path / "model")
    raw = {k: v.astype(mx.float16) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), raw)
    config = EngineConfig(model=str(folder), name="x", weights="keep")
    facts = encoder_of(folder)
    assert facts is not None
    encoder = load_encoder(config, facts)
    assert encoder.dtype == "float32"
    expected = plain.bert(folders.read(folder), config_of(folder), TOKENS[2]).mean(0)
    assert np.abs(vectors(encoder, [TOKENS[2]])[0] - expected).max() < 1e-4


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_long_texts_in_blocks_equal_whole_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(folders.encoder(tmp_path, family))
    whole = vectors(encoder, TOKENS)
    monkeypatch.setattr(attention, "SCORE_BYTES", 64)
    assert np.abs(vectors(encoder, TOKENS) - whole).max() < 1e-5


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_equal_plain_numpy(family: str, labels: int, tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path, family, labels=labels)
    encoder, w, config = loaded(folder), folders.read(folder), config_of(folder)
    pairs = [[2, 40, 41, 3, 50, 3], [2, 41, 3, 51, 52, 53, 54, 3]]
    segments = [4, 3] if family == "bert" else [0, 0]
    expected = []
    for ids, second in zip(pairs, segments, strict=True):
        types = [int(bool(second) and i >= second) for i in range(len(ids))]
        if family == "modernbert":
            x = plain.modernbert(w, config, ids, "model.")[0]
            x = plain.norm(w, "head.norm", plain.gelu(plain.linear(w, "head.dense", x)), 1e-5)
            expected.append(plain.linear(w, "classifier", x))
        elif family == "bert":
            x = plain.bert(w, config, ids, types, "bert.")[0]
            x = np.tanh(plain.linear(w, "bert.pooler.dense", x))
            expected.append(plain.linear(w, "classifier", x))
        else:
            x = np.tanh(plain.linear(w, "classifier.dense", plain.bert(
                w, config, ids, types, "roberta.")[0]))  # fmt: skip
            expected.append(plain.linear(w, "classifier.out_proj", x))
    found = np.array(finished(encoder.logits(batch(pairs, segments), [])))
    assert np.abs(found - expected).max() < 1e-4


def test_a_decoder_equals_plain_numpy_short_and_in_chunks(tmp_path: Path) -> None:
    folder = folders.decoder(tmp_path / "model")
    encoder = loaded(folder, task="embed")
    assert encoder.facts.pooling == ("lasttoken",)
    tokens = [[10, 11, 12], [20, 21], list(range(7, 90)) * 8]
    weights, config = folders.read(folder), config_of(folder)
    for together in (tokens[:2], tokens):  # the longest is more than a chunk
        expected = [plain.decoder(weights, config, ids)[-1] for ids in together]
        assert np.abs(vectors(encoder, together) - expected).max() < 1e-3


def test_a_decoder_says_yes_or_no_as_plain_numpy_does(tmp_path: Path) -> None:
    folder = folders.decoder(tmp_path / "Tiny-Reranker")
    encoder = loaded(folder)
    assert encoder.facts.kind == "judge"
    weights, config = folders.read(folder), config_of(folder)
    tokens = [[10, 11, 12, 13], [20, 21]]
    wanted = [30, 31]
    expected = [
        (plain.decoder(weights, config, ids)[-1] @ weights["embed_tokens.weight"].T)[wanted]
        for ids in tokens
    ]
    found = np.array(finished(encoder.logits(batch(tokens), wanted)))
    assert np.abs(found - expected).max() < 1e-3


def test_a_decoder_that_classifies_takes_its_last_token(tmp_path: Path) -> None:
    folder = folders.decoder(
        tmp_path, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "good"}
    )
    encoder, w = loaded(folder), folders.read(folder)
    tokens = [[10, 11, 12, 13], [20, 21]]
    expected = [
        plain.linear(w, "score", plain.decoder(w, config_of(folder), ids)[-1]) for ids in tokens
    ]
    found = np.array(finished(encoder.logits(batch(tokens), [])))
    assert np.abs(found - expected).max() < 1e-3


def test_embedding_gemma_looks_both_ways_and_has_its_dense_layers(tmp_path: Path) -> None:
    folder = folders.decoder(tmp_path, "gemma3_text")
    shapes = {"2_Dense": (48, 32), "3_Dense": (16, 48)}
    modules: list[Any] = [("Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True})]
    for path, (out, width) in shapes.items():
        settings = {"in_features": width, "out_features": out, "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
        modules.append(("Dense", path, settings))
        folders.dense(folder, path, out, width)
    folders.sentence(folder, modules=[*modules, ("Normalize", "4_Normalize", {})])
    encoder = loaded(folder)
    weights, config = folders.read(folder), config_of(folder)
    dense = [np.array(mx.load(str(folder / path / "model.safetensors"))["linear.weight"]) for path
             in shapes]  # fmt: skip
    expected = [
        plain.decoder(weights, config, ids).mean(0) @ dense[0].T @ dense[1].T for ids in TOKENS
    ]
    assert np.abs(vectors(encoder, TOKENS) - expected).max() < 1e-3


POOLED: dict[str, Callable[[Any], Any]] = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


@pytest.mark.parametrize("way", POOLED)
def test_every_pooling_is_sentence_transformers_own(way: str, tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path)
    encoder = loaded(folder, pooling=way)
    weights, config = folders.read(folder), config_of(folder)
    expected = [POOLED[way](plain.bert(weights, config, ids)) for ids in TOKENS]
    assert np.abs(vectors(encoder, TOKENS) - expected).max() < 1e-4


def test_several_poolings_are_put_one_after_the_other(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path)
    settings = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    folders.sentence(folder, modules=[("Pooling", "1_Pooling", settings)])
    encoder = loaded(folder)
    assert encoder.facts.pooling == ("cls", "mean") and not encoder.facts.normalize
    states = plain.bert(folders.read(folder), config_of(folder), TOKENS[0])
    expected = np.concatenate([states[0], states.mean(0)])
    assert np.abs(vectors(encoder, TOKENS)[0] - expected).max() < 1e-4


def test_tokens_of_a_prompt_may_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path)
    states = plain.bert(folders.read(folder), config_of(folder), TOKENS[0])
    found = finished(loaded(folder).vectors(EncoderBatch([TOKENS[0], TOKENS[2]], [0, 0], [2, 0])))
    assert np.abs(np.array(found)[0] - states[2:].mean(0)).max() < 1e-4


def test_a_folder_with_weights_missing_is_refused_by_name(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path)
    raw = dict(mx.load(str(folder / "model.safetensors")))
    del raw["encoder.layer.1.output.dense.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), raw)
    with pytest.raises(ModelError, match=r"layers\.1\.down"):
        loaded(folder)
