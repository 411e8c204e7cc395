"""Text lines of the log: what happened first, the id last and short, at most 200 characters each."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import logs
from millrace.config import LogFormat

ENDED = {
    "outcome": "ok",
    "endpoint": "/v1/chat/completions",
    "prompt_tokens": 31,
    "cached_tokens": 30,
    "cache_hit": "exact",
    "generated_tokens": 5,
    "ttft": 1.03,
    "seconds": 1.245,
    "deaths": 0,
    "id": "chatcmpl-052bffcdca7345f331ee64e5",
    "model": "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
}


@pytest.fixture
def formatter() -> logging.Formatter:
    return _formatter("text")


def _formatter(form: LogFormat) -> logging.Formatter:
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    try:
        logs.setup("info", form)
        (handler,) = root.handlers
        assert handler.formatter is not None
        return handler.formatter
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


def _record(message: str, fields: dict[str, Any] | None = None, **more: Any) -> logging.LogRecord:
    level = {"levelname": "INFO", "levelno": logging.INFO, "name": "millrace"}
    return logging.makeLogRecord({"msg": message, "fields": fields or {}, **level, **more})


def test_a_request_that_ended(formatter: logging.Formatter) -> None:
    line = formatter.format(_record("request ended", ENDED))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info request ended outcome=ok "
        r"endpoint=/v1/chat/completions prompt=31 cached=30 hit=exact generated=5 ttft=1.03 seconds=1.245 "
        r"model=mlx-community/Qwen3-\S+ id=…31ee64e5",
        line,
    ), line
    assert len(line) <= 200
    whole = json.loads(_formatter("json").format(_record("request ended", ENDED)))
    assert ENDED.items() <= whole.items(), "JSON has everything in full"


def test_values_at_their_usual_are_left_out_and_others_are_not(
    formatter: logging.Formatter,
) -> None:
    usual = {
        "deaths": 0,
        "cached_tokens": 0,
        "cache_hit": "none",
        "prompt_tokens": 0,
        "model": None,
    }
    assert formatter.format(_record("x", usual)).endswith(" info x prompt=0")
    assert formatter.format(_record("x", {"deaths": 2})).endswith(" info x resumes=2")


@pytest.mark.parametrize(
    ("id", "shown"),
    [
        ("logged-2", "logged-2"),
        ("a" * 20, "a" * 20),
        ("a" * 20 + "bcdefghi", "…bcdefghi"),
        ("two\nlines", "two\\nlines"),
    ],
)
def test_ids(formatter: logging.Formatter, id: str, shown: str) -> None:
    assert formatter.format(_record("x", {"id": id, "seconds": 1})).endswith(
        f"info x seconds=1 id={shown}"
    )


def test_a_long_message_goes_on_in_indented_lines_and_nothing_is_lost(
    formatter: logging.Formatter,
) -> None:
    message = " ".join(f"word{i}" for i in range(100))
    first, *others = formatter.format(_record(message, {"id": "abc"})).splitlines()
    assert others and all(line.startswith("    ") for line in others)
    assert " ".join([*first.split()[2:], *" ".join(others).split()]) == f"{message} id=abc"


def test_a_trace_is_indented(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("a\n2026-01-01T00:00:00.000Z info no line of the log")
    except ValueError:
        found = formatter.format(_record("failed", exc_info=sys.exc_info())).splitlines()
    assert found[1] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in found[1:])


@given(
    st.text(max_size=500),
    st.dictionaries(
        st.sampled_from([*ENDED, "reason", "path", "code", "param"]), st.text(max_size=400)
    ),
)
def test_no_line_is_longer_than_200_or_looks_like_another_record(
    message: str, fields: dict[str, str]
) -> None:
    first, *others = _formatter("text").format(_record(message, fields)).splitlines()
    assert len(first) <= 200
    assert all(len(line) <= 200 and line.startswith("    ") for line in others)
