"""Large bodies: what is in them is counted before it is decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
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
        containers = decoding.count_parts(data).containers
    finally:
        decoding._STRETCH = whole
    assert containers == containers_in(value)


def test_what_is_much_text_and_few_values_is_decoded() -> None:
    text = 'a "quoted" {thing}, [and] \\ more ' * 20_000
    data = json.dumps({"content": [text]}).encode()
    assert decoding.decode_large(data) == ({"content": [text]}, 2)


TEXT = st.text(st.sampled_from('ab "\\\\\n\u00e9\u4e2d\U0001f600'), max_size=60)
TEXTS = st.recursive(
    TEXT | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


def _outcome(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)


@given(
    TEXTS,
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=1),
)
@settings(max_examples=500)
def test_texts_that_are_decoded_in_pieces_are_the_same(
    value: Any, escapes: bool, stretch: int, piece: int, wrong: list[tuple[int, int]]
) -> None:
    data = bytearray(json.dumps(value, ensure_ascii=escapes, indent=escapes or None).encode())
    for place, byte in wrong:
        data[place % len(data)] = byte
    names = {"_STRETCH": stretch, "_PIECE": piece, "_LONG": 3, "_LOOK_BACK": 30}
    with pytest.MonkeyPatch.context() as patch:
        for name, small in names.items():
            patch.setattr(decoding, name, small)
        found = _outcome(lambda d: decoding.decode_large(d)[0], bytes(data))
    assert found == _outcome(msgspec.json.decode, bytes(data))


@pytest.mark.parametrize("escapes", [True, False])
@pytest.mark.parametrize("text", ["plain ", "\u4e2d\u6587", "\U0001f600", 'say \\"so\\"\n', "\\\\"])
def test_a_long_text_is_decoded_in_pieces(
    text: str, escapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    decode = msgspec.json.decode

    def watched(data: bytes, **more: Any) -> Any:
        sizes.append(len(data))
        return decode(data, **more)

    monkeypatch.setattr(msgspec.json, "decode", watched)
    value = {"messages": [{"content": text * 400_000, "role": "user"}, {"content": "short"}]}
    data = json.dumps(value, ensure_ascii=escapes).encode()
    assert decoding.decode_large(data) == (value, 4)
    if text != "\\\\":  # where a run of these may be cut is not looked for
        assert max(sizes) < 2 * decoding._PIECE


@pytest.mark.parametrize("part", [b"{}", b"[]", b"0", b'""', b'"\\\\"'])
def test_too_many_values_are_refused(part: bytes) -> None:
    data = b'{"a":[' + part + (b"," + part) * 2_100_000 + b"]}"
    with pytest.raises(BadRequest, match="more than"):
        decoding.decode_large(data)
