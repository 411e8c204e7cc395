"""Which folders are vision models: what is proven, what is served as text, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from vision_kinds import KINDS

from millrace.errors import ModelError
from millrace.models.vision.families import (
    FAMILIES,
    family_of,
    image_token,
    picture_room,
    vision_in,
)
from millrace.models.vision.positions import placed
from millrace.protocol import Span

DOCS = Path(__file__).parents[2] / "docs" / "vision-models.md"


def _settings(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vision_config": {}, **more}


def test_the_table_in_the_docs_is_what_is_proven_and_tested() -> None:
    rows = re.findall(r"^\| ([^|`]+) \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)[1:]
    assert rows == [(f.name, f.model_type) for f in FAMILIES]
    assert {f.model_type for f in FAMILIES} == set(KINDS)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_a_folder_says_what_it_is(family: Any, tmp_path: Path) -> None:
    config = {"model_type": family.model_type, **KINDS[family.model_type].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vision_in(tmp_path) is family
    assert image_token(config) is not None


def test_what_is_not_proven_is_text_where_that_is_known_and_refused_where_not() -> None:
    assert family_of({"model_type": "llama"}) is None
    assert family_of(_settings("qwen3_5")) is None
    assert family_of(_settings("mistral3", text_config={"model_type": "ministral3"})) is None
    with pytest.raises(ModelError, match=r"'mllama', which is not proven.*Qwen2-VL, .*InternVL"):
        family_of(_settings("mllama"))
    with pytest.raises(ModelError, match="not proven"):
        family_of(_settings("../../etc"))


def test_a_folder_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="model_file"):
        family_of(_settings("qwen2_vl", model_file="evil.py"))


def test_a_picture_moves_what_follows_by_its_longer_side() -> None:
    found = placed(9, [Span(2, 6, "ab", (1, 4, 6))], 2)
    assert found.at.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert found.delta == 6 - 9


@pytest.mark.parametrize("grid", [(), (1, 4), (1, 4, 4), (0, 4, 6), (1, -4, -6)])
def test_a_grid_that_does_not_fit_its_place_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid"):
        placed(9, [Span(2, 6, "ab", grid)], 2)


def test_pictures_have_a_twentieth_of_the_memory_within_bounds() -> None:
    gib = 1 << 30
    assert [picture_room(n) for n in (0, 8, 4 * gib, 10 * gib, 100 * gib)] == [
        1,
        1,
        4 * gib // 20,
        gib // 2,
        gib,
    ]
