"""Names of fields that nobody knows are the client's own words, and end up in a header."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.serving.ignored import HEADER, in_a_header


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6))
def test_whatever_names_there_are_the_header_can_be_sent(names: list[str]) -> None:
    value = in_a_header(names).encode("ascii")
    sent = h11.Response(status_code=200, headers=[(HEADER, value)])
    assert sent.headers[0][1] == value


@pytest.mark.parametrize("name", [" ", "a" * 1999 + " ", "\t", "", "x, " * 900])
def test_so_do_long_ones_and_such_as_end_in_blanks(name: str) -> None:
    h11.Response(status_code=200, headers=[(HEADER, in_a_header([name, name + "b", name]))])


def test_plain_names_are_as_they_were_and_others_are_told_apart() -> None:
    assert in_a_header(["novel", "tools.web_search", "novel"]) == "novel, tools.web_search"
    assert in_a_header([" a", "", "é b"]) == '" a", "", \\xe9 b'
