"""The order of things: a server as it is by default, then one with guesses and little memory.

Each check ends as lines. One that cannot run says why, is no pass, and does not keep the others from
running.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from millrace.errors import MillraceError
from millrace.models.device import DeviceProbe
from millrace.models.resolve import Resolved
from millrace.prove import equalities, memory, speed
from millrace.prove.compare import tolerance
from millrace.prove.machine import fits_twice, machine, name_of, shape_of, widened
from millrace.prove.processes import furnish
from millrace.prove.questions import QuestionSettings, make
from millrace.prove.report import ModelProof, ProofReport, ReportLine, cleaned
from millrace.prove.served import Served, serve
from millrace.sizes import format_bytes

Check = Callable[[Served, equalities.Reference, equalities.Doing], list[ReportLine]]
_FIRST: tuple[tuple[str, Check], ...] = (
    ("alone again", equalities.repeated),
    ("batched", equalities.batched),
    ("cached", equalities.cached),
    ("next turn", equalities.continued),
    ("streamed", equalities.streamed),
)
_LAST: tuple[tuple[str, Check], ...] = (
    ("resumed", equalities.resumed),
    ("from disk", equalities.from_disk),
)
_SECOND = ("guessed", "memory")
_FAULTS = (MillraceError, httpx.HTTPError, msgspec.MsgspecError, OSError, LookupError, ValueError)
"""What a server that fails makes of a question."""
_DISK = "2G"
_BESIDE = "beside mlx-lm"
GUESSES = 8


class Watcher(Protocol):
    """Who looks on."""

    def doing(self, what: str) -> None: ...

    def begin(self, model: ModelProof) -> None: ...

    def found(self, line: ReportLine) -> None: ...

    def trouble(self, check: str, why: str) -> None:
        """The whole of a fault, for the terminal alone."""


def prove(
    models: list[Resolved],
    probe: DeviceProbe,
    settings: QuestionSettings,
    watcher: Watcher,
    *,
    quick: bool = False,
    options: tuple[str, ...] = (),
) -> ProofReport:
    """All models, one after the other; `options` go to their servers."""
    begin = time.monotonic()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    proof = ProofReport(date=date, quick=quick, machine=machine(probe))
    for model in models:
        one = ModelProof(name=name_of(model), shape=shape_of(model))
        if options:
            one.shape += f"; served with {' '.join(options)}"
        proof.models.append(one)
        watcher.begin(one)
        with tempfile.TemporaryDirectory(prefix="millrace-prove-") as folder:
            room = Path(folder)
            furnish(room)
            _OneModel(model, probe, settings, watcher, one, room, options).prove()
        proof.seconds = time.monotonic() - begin
    return proof


def without_device(fault: str, *, quick: bool = False) -> ProofReport:
    """The report of a machine on which MLX does not work."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    line = ReportLine(check="device", verdict="fail", detail=cleaned(fault))
    one = ModelProof(name="No model was run", shape="MLX does not work here.", lines=[line])
    return ProofReport(date=date, quick=quick, machine=machine(None), models=[one])


class _OneModel:
    def __init__(
        self,
        model: Resolved,
        probe: DeviceProbe,
        settings: QuestionSettings,
        watcher: Watcher,
        into: ModelProof,
        room: Path,
        options: tuple[str, ...],
    ) -> None:
        self._model = model
        self._folder = model.path.absolute()
        """Wherever processes run that are told of it."""
        self._probe = probe
        self._settings = settings
        self._watcher = watcher
        self._into = into
        self._room = room
        self._options = options
        self._reference: equalities.Reference | None = None
        self._budget = 0
        self._twice = fits_twice(model, probe)
        self._wide = "keep"
        """What mlx-lm's weights are widened to."""

    def prove(self) -> None:
        if not self._tried("start", self._as_served):
            self._skip(*(name for name, _ in (*_FIRST, *_LAST)), *_SECOND)
            return
        if not self._twice:
            self._tried(_BESIDE, self._mlx_lm)
        if not self._tried("second start", self._tight):
            self._skip(*_SECOND)

    def _skip(self, *checks: str) -> None:
        """What a server that did not start kept from running."""
        for check in checks:
            if not any(line.check.startswith(check) for line in self._into.lines):
                self._add(ReportLine(check=check, verdict="not run", detail="there is no server"))

    def _as_served(self) -> list[ReportLine]:
        """The server as anybody starts it."""
        self._watcher.doing("starting a server")
        with serve(self._folder, "--cache-disk", _DISK, *self._options, room=self._room) as server:
            state = server.state()
            self._budget = memory.budget(state)
            self._wide = widened(self._model, state)
            self._add(_started("start", server, ""))
            allowed = tolerance(state.dtype or "", state.device or "")
            window = state.context_window or 2048
            questions = make(self._settings, server.tokenize, window)
            reference = equalities.alone(server, questions, allowed, self._watcher.doing)
            self._reference = reference
            for check, run in _FIRST:
                self._check(check, run, server)
            if self._twice:
                self._tried(_BESIDE, lambda: self._mlx_lm(server))
            if not any(line.check.startswith("decode") for line in self._into.lines):
                self._tried("speed", lambda: self._speed(server, None))
            for check, run in _LAST:
                self._check(check, run, server)
        return []

    def _check(self, check: str, run: Check, server: Served) -> None:
        reference = self._reference
        if reference is not None:
            self._tried(check, lambda: run(server, reference, self._watcher.doing))

    def _mlx_lm(self, server: Served | None = None) -> list[ReportLine]:
        """Beside a server that runs, or without one where there is no room for the model twice."""
        doing, reference = self._watcher.doing, self._reference
        if reference is None:
            return []
        doing("starting mlx-lm")
        with speed.beside(self._folder, self._wide, room=self._room) as other:
            told = f"{other.started_in:.2f} s to import mlx-lm and load the model"
            if other.note:
                told += f"; measured with {other.note}"
            if server is None:
                told += "; no room for the model twice, so that its speed is not beside ours"
            figures: dict[str, float | int | str | None] = {"seconds": other.started_in}
            self._add(ReportLine(check="mlx-lm", verdict="told", detail=told, figures=figures))
            for line in speed.same_as_mlx_lm(other, reference, doing):
                self._add(line)
            return [] if server is None else self._speed(server, other)

    def _speed(self, server: Served, other: speed.PlainModel | None) -> list[ReportLine]:
        return speed.measure(server, other, self._settings, self._watcher.doing)

    def _tight(self) -> list[ReportLine]:
        """With guesses, and with less memory than the load asks for."""
        self._watcher.doing("starting a server with guesses and little memory")
        given = f"{self._budget >> 20}M"
        given_bytes = (self._budget >> 20) << 20
        with serve(
            self._folder,
            *("--speculate", str(GUESSES), "--cache-disk", "0"),
            *("--kv-memory", given, "--cache-memory", given),
            *self._options,
            room=self._room,
        ) as server:
            self._add(_started("second start", server, "with other options"))
            self._check("guessed", equalities.guessed, server)
            self._tried(
                "memory",
                lambda: memory.under_load(server, self._settings, given_bytes, self._watcher.doing),
            )
        return []

    def _tried(self, check: str, run: Callable[[], list[ReportLine]]) -> bool:
        try:
            lines = run()
        except _FAULTS as error:
            self._fault(check, error)
            return False
        for line in lines:
            self._add(line)
        return True

    def _fault(self, check: str, error: BaseException) -> None:
        why = str(error) or type(error).__name__
        self._watcher.trouble(check, why)
        self._add(ReportLine(check=check, verdict="not run", detail=cleaned(why)))

    def _add(self, line: ReportLine) -> None:
        self._into.lines.append(line)
        self._watcher.found(line)


def _started(check: str, server: Served, besides: str) -> ReportLine:
    state = server.state()
    loaded = f", of which {state.load_seconds:.2f} s loading" if state.load_seconds else ""
    told = f"{server.started_in:.2f} s to the first answer{loaded}"
    if besides:
        told += f"; {besides}"
    else:
        told += f"; {state.device}, {state.dtype}, weights {format_bytes(state.weight_bytes or 0)}"
    return ReportLine(
        check=check,
        verdict="told",
        detail=told,
        figures={"seconds": server.started_in, "load_seconds": state.load_seconds},
    )
