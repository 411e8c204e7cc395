"""Pictures in Python: a path, bytes, an address and an object are one picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vision_models
from pictures import data_uri, encoded, painted, png
from vision_templates import QWEN2_VL

from millrace import LLM
from millrace.errors import BadPicture

PICTURE = painted(120, 80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = vision_models.write("qwen2_vl", tmp_path_factory.mktemp("vision") / "sees")
    (found / "chat_template.jinja").write_text(QWEN2_VL)
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder)) as made:
        yield made


def asked(image: Any) -> list[dict[str, Any]]:
    words = {"type": "text", "text": "What is it?"}
    return [{"role": "user", "content": [{"type": "image", "image": image}, words]}]


def test_one_picture_in_every_form_gives_one_answer(llm: LLM, folder: Path) -> None:
    (folder / "a.png").write_bytes(encoded(PICTURE))
    relative = os.path.relpath(folder / "a.png")
    forms = [PICTURE, encoded(PICTURE), folder / "a.png", relative, data_uri(encoded(PICTURE))]
    answers = llm.generate([asked(f) for f in forms], max_tokens=6, temperature=0)
    assert len({(a.text, a.prompt_tokens) for a in answers}) == 1
    assert "".join(llm.stream(asked(PICTURE), max_tokens=6, temperature=0)) == answers[0].text
    other = llm.generate(asked(png(120, 80, seed=3)), max_tokens=6, temperature=0)
    assert other.prompt_tokens == answers[0].prompt_tokens
    alone = llm.generate([{"role": "user", "content": "What is it?"}], max_tokens=6, temperature=0)
    assert alone.prompt_tokens == answers[0].prompt_tokens - 14


def test_what_is_no_picture_is_refused(llm: LLM) -> None:
    with pytest.raises(BadPicture, match="cannot be|no picture|broken|base64"):
        llm.generate(asked(b"hello"), max_tokens=2)
