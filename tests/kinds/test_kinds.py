"""Every kind of model that the installed mlx-lm has a file for, tiny, against its own plain loop.

`make test-models` runs it: a new mlx-lm shows at once what broke. With MILLRACE_WRITE_DOCS=1 it writes
docs/model-kinds.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
from engine.parity_cells import COLUMNS, Subject
from kinds.shapes import config_of, kinds

from millrace.paging.model import PagedModel

pytestmark = pytest.mark.skipif(
    "MILLRACE_MODELS" not in os.environ, reason="make test-models runs it"
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "model-kinds.md"
RUN = ("batched", "by seed", "cached")
NOT_BUILT = {
    "bitnet": "its kernel needs Metal",
    "muse_spark": "its kernel needs Metal",
    "olmo": "its file needs a package that is not installed",
    "prism_hadamard_qwen35": "it needs the manifest of a packed checkpoint",
}
OTHERWISE_IN_PARTS = (
    "mlx-lm's own classes give other logits for a prompt in parts than for the whole"
)
EXCEPT = {("phi3small", name): OTHERWISE_IN_PARTS for name in RUN}
EXCEPT["plamo3", "cached"] = OTHERWISE_IN_PARTS
HEAD = """# Kinds of models

Every `model_type` that mlx-lm has a file for, in a tiny shape with random weights on a CPU, against
mlx-lm's own plain loop: `=` is the same tokens, token for token. `make test-models` writes this page
(`MILLRACE_WRITE_DOCS=1`). [parity.md](parity.md) has more ways to run for one model of each kind of state;
[vision-models.md](vision-models.md) has what takes pictures.

Pass: `flat`, tokens of all sequences run as one row; `rows`, sequences of equally many tokens run together;
`single`, one sequence a pass.

| kind | pass | batched | by seed | cached |
|---|---|---|---|---|
"""
_rows: dict[str, str] = {}


class Kind(Subject):
    def fresh(self) -> Any:
        return tiny.model_of(self.shape, config_of(self.shape))


@pytest.mark.parametrize("kind", kinds())
def test_a_kind_is_served_as_mlx_lm_has_it(kind: str, tmp_path: Path) -> None:
    if kind in NOT_BUILT:
        _rows[kind] = f"| {kind} | not tried: {NOT_BUILT[kind]} | | | |"
        return
    subject = Kind(kind)
    batching = PagedModel(subject.model, page=32).batching.name.lower()
    found = []
    for name in RUN:
        try:
            found.append(COLUMNS[name](subject, tmp_path) or "=")
        except AssertionError:
            if (kind, name) not in EXCEPT:
                raise
            found.append(f"differs: {EXCEPT[kind, name]}")
    _rows[kind] = f"| {kind} | {batching} | {' | '.join(found)} |"


def test_the_document_says_what_was_found() -> None:
    if len(_rows) != len(kinds()):
        pytest.skip("needs the results of all kinds; some were not selected or failed")
    written = HEAD + "".join(f"{_rows[kind]}\n" for kind in kinds())
    if os.environ.get("MILLRACE_WRITE_DOCS"):
        DOCUMENT.write_text(written, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == written
