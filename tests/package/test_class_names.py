"""A public class has a name that no other has: who reads it in a trace or a review knows which it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import millrace


def test_no_two_public_classes_have_the_same_name() -> None:
    root = Path(millrace.__file__).parent
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(root)))
    assert len(places) > 500
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
