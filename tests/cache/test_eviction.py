"""What goes first when memory is short, and how far runs of tokens agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.cache.eviction import victims, worth
from millrace.cache.radix import Node, RadixTree, shared_tokens
from millrace.cache.sizes import StateSizes


def _put(tree: RadixTree, parent: Node | None, tokens: list[int]) -> Node:
    node = tree.attach("", parent, tokens)
    assert node is not None
    tree.set_resident(node, True)
    return node


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=40))
def test_shared_counts_to_the_first_difference(run: list[int], tokens: list[int]) -> None:
    for offset in range(len(tokens) + 1):
        plain = 0
        for a, b in zip(run, tokens[offset:], strict=False):
            if a != b:
                break
            plain += 1
        assert shared_tokens(run, tokens, offset) == plain


def test_what_builds_on_others_goes_first() -> None:
    tree = RadixTree(StateSizes(100))
    upper = _put(tree, None, [1, 2, 3])
    _put(tree, upper, [4, 5])
    assert [n.end for n, _ in victims(tree, 1.0, 10_000)] == [5, 3]


def test_pinned_state_stays() -> None:
    tree = RadixTree(StateSizes(100))
    _put(tree, None, [1, 2]).pins = 1
    assert list(victims(tree, 1.0, 10_000)) == []


def test_a_checkpoint_on_the_way_goes_before_one_at_a_boundary() -> None:
    tree = RadixTree(StateSizes(0, 1000))
    first = _put(tree, None, [1, 2])
    second = _put(tree, None, [2, 3])
    for node in (first, second):
        tree.set_checkpoint(node, True)
    first.boundary = True
    assert [(n.id, part) for n, part in victims(tree, 1.0, 1)] == [(second.id, "checkpoint")]


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_worth_falls_with_age_and_size(tokens: int, size: int, age: float, more: float) -> None:
    assert worth(tokens, size, age + more) <= worth(tokens, size, age)
    assert worth(tokens, size + 1, age) <= worth(tokens, size, age)
    assert worth(tokens + 1, size, age) >= worth(tokens, size, age)
