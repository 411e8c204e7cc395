"""docs/parity.md: the matrix of shapes and ways to run, as the tests found it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import tiny
from engine.parity_cells import COLUMNS, NONE, REFUSED
from mlx_lm.models.cache import CacheList, make_prompt_cache
from paging.own_kinds import OWN_KINDS

from millrace.models.vision.families import FAMILIES
from millrace.paging.model import PagedModel

WORDS = {"equal": "=", REFUSED: "refused", NONE: "–"}
_HEAD = """# Parity

Which shapes were held against the plain loop (one sequence, mlx-lm's own caches, argmax), and in which
ways to run. `tests/engine/test_parity_matrix.py` makes this page from what it finds on a tiny model of each
shape, with random float32 weights on a CPU, and fails where the page says something else.

`=`: the tokens are the same, token for token. `refused`: the shape cannot do it, and the server says so at
its start. `–`: nothing of the kind is done for the shape (state that cannot be cut takes no draft tokens;
state that does not grow is never pre-empted).

"""
_COLUMNS = "| column | what runs |\n|---|---|\n"
_TAIL = """
Pass: `flat`, tokens of all sequences run as one row; `rows`, sequences of equally many tokens run together;
`single`, one sequence a pass.

Streamed answers are made of the same events as whole ones, whatever the model; `tests/api` holds them
against each other on every endpoint. Pictures: `tests/engine/test_vision.py` holds these families against
mlx-vlm, alone, among rows of both kinds, from the cache, resumed and with several choices:
{families}.
"""


def document(shapes: Sequence[str], found: Mapping[tuple[str, str], str]) -> str:
    """The whole page."""
    about = "".join(f"| {name} | {_about(run.__doc__)} |\n" for name, run in COLUMNS.items())
    head = f"| shape | caches | pass | {' | '.join(COLUMNS)} |\n"
    head += "|---" * (3 + len(COLUMNS)) + "|\n"
    rows = "".join(_row(shape, found) for shape in shapes)
    families = ", ".join(family.model_type for family in FAMILIES)
    return f"{_HEAD}{_COLUMNS}{about}\n{head}{rows}{_TAIL.format(families=families)}"


def _about(text: str | None) -> str:
    return (text or "").rstrip(".")


def _row(shape: str, found: Mapping[tuple[str, str], str]) -> str:
    cells = [WORDS[found[shape, column]] for column in COLUMNS]
    model = tiny.build(shape, **OWN_KINDS.get(shape, {}))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]], mx.int32), cache=caches))
    names = ", ".join(dict.fromkeys(map(_name, caches)))
    batching = PagedModel(model, page=32).batching.name.lower()
    return f"| {shape} | {names} | {batching} | {' | '.join(cells)} |\n"


def _name(cache: object) -> str:
    if isinstance(cache, CacheList):
        return f"CacheList of {' and '.join(dict.fromkeys(map(_name, cache.caches)))}"
    return type(cache).__name__
