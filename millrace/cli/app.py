"""The table of commands, and the one place where an error becomes a line on the terminal."""

from __future__ import annotations

import sys

import typer

from millrace.cli import (
    backend,
    bench,
    chat,
    clean,
    doctor,
    embed,
    launch,
    loaded,
    models,
    prove,
    serve,
    service,
    worker,
)
from millrace.errors import MillraceError

app = typer.Typer(
    name="millrace",
    help="Serve language models on MLX: one engine, one stream of events, every protocol.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from millrace.version import __version__

        typer.echo(f"millrace {__version__}")
        raise typer.Exit


for _module in (
    serve,
    service,
    worker,
    backend,
    chat,
    launch,
    embed,
    models,
    loaded,
    clean,
    doctor,
    prove,
    bench,
):
    _module.register(app)


def run() -> None:
    """Run the command line; errors meant for users end as one sentence and exit status 1."""
    try:
        app()
    except MillraceError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[bold red]error:[/] {escape(error.message)}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
