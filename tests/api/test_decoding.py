"""Large bodies: what is in them is counted before it is decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.api import decoding
from millrace.errors import BadRequest

VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\,{}[]é\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\', max_size=3), inner),
    max_leaves=30,
)


def containers_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_in, value.values()))
    return 1 + sum(map(containers_in, value)) if isinstance(value, list) else 0


@given(VALUES, st.integers(1, 40), st.booleans())
def test_objects_and_lists_are_counted_exactly(value: Any, stretch: int, escapes: bool) -> None:
    data = json.dumps(value, ensure_ascii=escapes).encode()
    whole = decoding._STRETCH
    decoding._STRETCH = stretch
    try:
        containers, _ = decoding.count_parts(data)
    finally:
        decoding._STRETCH = whole
    assert containers == containers_in(value)


def test_what_is_much_text_and_few_values_is_decoded() -> None:
    text = 'a "quoted" {thing}, [and] \\ more ' * 20_000
    assert decoding.decode_large(json.dumps({"content": [text]}).encode()) == {"content": [text]}


@pytest.mark.parametrize("part", [b"{}", b"[]", b"0", b'""', b'"\\\\"'])
def test_too_many_values_are_refused(part: bytes) -> None:
    data = b'{"a":[' + part + (b"," + part) * 2_100_000 + b"]}"
    with pytest.raises(BadRequest, match="more than"):
        decoding.decode_large(data)
