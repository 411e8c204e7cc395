"""What was found, as lines of the terminal, as Markdown to attach and as JSON.

A line has a verdict, and holds nothing of the machine's owner: no path, no name of a host or a user,
and no prompt. Sentences from elsewhere, such as an error's, are cleaned of them here.
"""

from __future__ import annotations

import getpass
import platform
import re
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["pass", "near-tie", "fail", "not run", "told"]
"""`told` is a figure that nothing is asked of."""
MARKS = {"pass": "✓", "near-tie": "≈", "fail": "✗", "not run": "–", "told": "·"}
_PATH = re.compile(
    r"(?<![\w:/.])(?:[A-Za-z]:)?(?:~|\.{1,2})?(?:[/\\][^\s/\\:'\"<>|,;()]+)+[/\\]?(?<!\.)"
)
_ADDRESS = re.compile(r"https?://\S+")
_SHORTEST_NAME = 3


class ReportLine(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    verdict: Verdict
    detail: str
    figures: dict[str, float | int | str | None] = {}


class ModelProof(msgspec.Struct, kw_only=True):
    """One model and what was found with it."""

    name: str
    shape: str
    lines: list[ReportLine] = []


class ProofReport(msgspec.Struct, kw_only=True):
    """All of it."""

    date: str
    quick: bool
    seconds: float = 0.0
    machine: dict[str, str]
    models: list[ModelProof] = []

    @property
    def verdicts(self) -> list[Verdict]:
        return [line.verdict for model in self.models for line in model.lines]

    @property
    def status(self) -> int:
        """The command's: 0 if all held, 3 if nothing but near-ties stood against it, else 1."""
        found = set(self.verdicts)
        if not found & {"pass", "near-tie"} or found & {"fail", "not run"}:
            return 1
        return 3 if "near-tie" in found else 0

    def summary(self) -> str:
        counts = Counter(self.verdicts)
        names: dict[Verdict, str] = {
            "pass": "passed",
            "near-tie": "near-ties",
            "fail": "failed",
            "not run": "not run",
        }
        return ", ".join(
            f"{counts[verdict]} {name}"
            for verdict, name in names.items()
            if counts[verdict] or verdict in ("pass", "fail")
        )


def cleaned(sentence: str, names: tuple[str, ...] | None = None) -> str:
    """A sentence from elsewhere without paths, addresses and names of this machine and its user."""
    sentence = _PATH.sub("[path]", _ADDRESS.sub("[address]", sentence))
    for name in own_names() if names is None else names:
        if len(name) >= _SHORTEST_NAME:
            sentence = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "[name]", sentence, flags=re.I)
    return " ".join(sentence.split())


def own_names() -> tuple[str, ...]:
    """What the machine and its user are called."""
    found = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    try:
        found.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # a user without a name
        pass
    return tuple(sorted(filter(None, found), key=len, reverse=True))


def as_json(proof: ProofReport) -> str:
    body = msgspec.to_builtins(proof) | {"summary": proof.summary(), "status": proof.status}
    return msgspec.json.format(msgspec.json.encode(body), indent=1).decode() + "\n"


def as_markdown(proof: ProofReport) -> str:
    """The file to attach; what the lines mean is in docs/platforms.md."""
    size = "quick" if proof.quick else "whole"
    out = [
        "# millrace prove",
        "",
        f"{proof.summary()}. {proof.date}, {size}, {proof.seconds:.0f} s.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in proof.machine.items()),
    ]
    for model in proof.models:
        out += ["", f"## {model.name}", "", model.shape, "", "| | | |", "|---|---|---|"]
        out += [
            f"| {MARKS[line.verdict]} {line.verdict} | {line.check} | {_cell(line.detail)} |"
            for line in model.lines
        ]
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
