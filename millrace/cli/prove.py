"""`millrace prove`: a report that anyone can make on their machine, and attach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from millrace.prove.report import ModelProof, ReportLine

_STYLES = {
    "pass": "bold green",
    "near-tie": "bold yellow",
    "fail": "bold red",
    "not run": "bold magenta",
    "told": "cyan",
}
_CHECK_WIDTH = 30


def register(app: typer.Typer) -> None:
    app.command()(prove)


def prove(
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model: a folder, a GGUF file, a Hugging Face id or a local name; the small "
            "default model if left out."
        ),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="A further model; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter answers: about a minute.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights on the device, as in serve: auto, keep, bf16 or f32."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The report; its figures lie beside it as .json.")
    ] = Path("millrace-proof.md"),
) -> None:
    """Show that answers do not depend on how they are made here, and how fast they are.

    Batched, cached, streamed, resumed and guessed answers are each compared with the same ones alone,
    token for token; memory is held against its budget, speed against mlx-lm's. The report names no
    prompt, path, host or user. The exit status is 0 if all is equal, 3 if there are near-ties of low
    precision and nothing worse, and 1 otherwise. Where MLX does not work, the report says why.
    """
    from typing import get_args

    from rich.console import Console
    from rich.markup import escape

    from millrace.cli.doctor import run_probe
    from millrace.cli.progress import reporter
    from millrace.cli.values import one_of
    from millrace.config import Weights
    from millrace.errors import SetupError
    from millrace.models.resolve import resolve
    from millrace.prove.questions import QUICK, QuestionSettings
    from millrace.prove.report import as_json, as_markdown
    from millrace.prove.run import prove as run
    from millrace.prove.run import without_device

    options: tuple[str, ...] = ()
    if weights is not None:
        options = ("--weights", one_of("--weights", weights, get_args(Weights)))
    figures = out.with_suffix(".json")
    if figures == out:
        raise SetupError(f"--out {out}: the figures are written to that name; give another one.")
    for file in (out, figures):
        _check_place(file)
    with reporter() as progress:
        models = [resolve(name, progress=progress) for name in (model, *(also or ()))]
    console = Console(highlight=False)
    with console.status("Looking at the device"):
        probe, fault = run_probe()
    if probe is None:
        proof = without_device(fault or "MLX does not work here.", quick=quick)
        console.print(f"[bold red]Error:[/] {escape(fault or '')}", soft_wrap=True)
    else:
        with _Terminal(console) as terminal:
            proof = run(
                models,
                probe,
                QUICK if quick else QuestionSettings(),
                terminal,
                quick=quick,
                options=options,
            )
    out.write_text(as_markdown(proof), encoding="utf-8")
    figures.write_text(as_json(proof), encoding="utf-8")
    console.print(f"\n[bold]{proof.summary()}[/] in {proof.seconds:.0f} s")
    for name, value in proof.machine.items():
        console.print(f"  {name}: {value}", markup=False)
    console.print(f"The report to attach: {out}, with figures in {figures}", markup=False)
    if proof.status:
        raise typer.Exit(proof.status)


def _check_place(file: Path) -> None:
    """The report comes last: that it cannot be written is said first."""
    from millrace.errors import SetupError

    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SetupError(f"The report cannot be written to {file}; choose a place with --out.")


class _Terminal:
    """Lines as they are found, and below them what is being done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress
        self._task: TaskID

    def __enter__(self) -> _Terminal:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def doing(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def begin(self, model: ModelProof) -> None:
        from rich.markup import escape

        self._print(f"\n[bold]{escape(model.name)}[/]: {escape(model.shape)}")

    def found(self, line: ReportLine) -> None:
        from rich.markup import escape

        from millrace.prove.report import MARKS

        style = _STYLES[line.verdict]
        verdict = f"{MARKS[line.verdict]} {line.verdict}"
        self._print(
            f"[{style}]{verdict:<10}[/] {escape(line.check):<{_CHECK_WIDTH}} {escape(line.detail)}"
        )

    def trouble(self, check: str, why: str) -> None:
        from rich.markup import escape

        self._print(f"[red]{escape(check)}:[/] {escape(why)}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)
