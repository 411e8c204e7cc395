"""The options of SpecPrefill: a draft, and when it is asked."""

from __future__ import annotations

from typing import Annotated

import typer

DraftOption = Annotated[
    str | None,
    typer.Option(
        help="A smaller model of the same vocabulary: it chooses what of a long prompt is run, where a "
        "request asks for that (see docs/specprefill.md)."
    ),
]
SwitchOption = Annotated[
    bool, typer.Option("--specprefill", help="Have it choose where a request says nothing, too.")
]
ThresholdOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens that must be left to run for that, after the cached and the system part; 8192 if not "
        "given."
    ),
]
KeepOption = Annotated[
    float | None,
    typer.Option(
        help="The share of the prompt that stays, above 0 and at most 1; 0.3 if not given."
    ),
]
