"""The real all-MiniLM-L6-v2 against plain numpy; MILLRACE_MINILM names its folder.

make test-minilm MILLRACE_MINILM=/path/to/all-MiniLM-L6-v2
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from models import encoder_folders as folders
from models import numpy_encoders as plain
from tokenizers import Tokenizer

from millrace import LLM

FOLDER = os.environ.get("MILLRACE_MINILM")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="MILLRACE_MINILM names no folder")
TEXTS = [
    "This is an example sentence",
    "Each sentence is converted",
    "Grüße aus Köln, 北京 und 😀!",
    "",
    "the mill turns while the river runs " * 60,
]
PUBLISHED = [0.06765691, 0.06349581, 0.04871313, 0.07930498, 0.03744804, 0.00265281]
"""The first numbers of the first text's vector, on the model's own page."""


def test_minilm_is_what_sentence_transformers_makes_of_it() -> None:
    folder = Path(str(FOLDER))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    config = json.loads((folder / "config.json").read_text())
    weights = folders.read(folder)
    expected = np.array(
        [plain.unit(plain.bert(weights, config, tokenizer.encode(t).ids).mean(0)) for t in TEXTS]
    )
    with LLM(str(folder)) as llm:
        together = np.array(llm.embed(TEXTS, truncate=True))
        alone = np.array([llm.embed(t, truncate=True) for t in TEXTS])
    assert np.abs(together - expected).max() < 1e-4
    assert np.abs(alone - together).max() < 1e-5
    assert np.abs(together[0][: len(PUBLISHED)] - PUBLISHED).max() < 1e-4
