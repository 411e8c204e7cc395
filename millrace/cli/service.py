"""`millrace service`: a server that the system starts with the user's session and keeps running.

What differs between systemd and launchd is in `Manager`s; the commands know neither. Nothing here serves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.service_files import Service, manager
from millrace.errors import SetupError

TAKEN_OVER = ("MILLRACE_HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
"""Variables that say where things lie: the service finds them where they are found here."""

app = typer.Typer(
    name="service",
    help="Have the system start a server with your session and keep it running.",
    no_args_is_help=True,
)


def register(commands: typer.Typer) -> None:
    commands.add_typer(app)


@app.command()
def install(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What to serve and how, as for `millrace serve`, after --."),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Show the file that would be written, and do nothing.")
    ] = False,
) -> None:
    """Write the service's file and start it: `millrace service install -- qwen3 --port 9000`."""
    service = service_of(arguments or [])
    here = manager()
    text = here.text(service)
    if only_print:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    for name in sorted(left_out()):
        typer.echo(
            f"note: {name} is set here and not for the service; give it as an option after --"
        )
    _write(here.file, text)
    _run(here.starting)
    typer.echo(f"millrace runs as a service now; its file is {here.file}")
    for line in here.hints:
        typer.echo(f"  {line}")


@app.command()
def remove() -> None:
    """End the service and remove its file; models and everything else stay."""
    here = manager()
    if not here.file.is_file():
        raise SetupError(f"There is no service of millrace: {here.file} does not exist.")
    stopped = _run(here.ending, required=False)
    here.file.unlink()
    _run(here.after, required=False)
    typer.echo(f"Removed {here.file}." if stopped else f"Removed {here.file}; it was not running.")


@app.command()
def status() -> None:
    """Say whether the service is installed, and whether it runs."""
    here = manager()
    if not here.file.is_file():
        typer.echo("not installed; `millrace service install` installs it")
        raise typer.Exit(1)
    running = _run(here.asking, required=False)
    typer.echo(f"{'running' if running else 'not running'}; its file is {here.file}")
    for line in here.hints:
        typer.echo(f"  {line}")
    if not running:
        raise typer.Exit(3)


def service_of(arguments: Sequence[str]) -> Service:
    """The service for these arguments, which are tried as `serve` would read them."""
    config = _checked(arguments)
    words = [_from_anywhere(word) for word in arguments]
    if config is not None and "--config" not in " ".join(words):
        words += ["--config", os.path.abspath(config)]
    for word in words:
        if not word.isprintable():
            raise SetupError(f"A service's arguments are plain text, not {word!r}.")
    variables = {name: os.environ[name] for name in TAKEN_OVER if os.environ.get(name)}
    return Service(
        command=(sys.executable, "-P", "-m", "millrace", "serve", *words),
        variables={name: os.path.abspath(os.path.expanduser(v)) for name, v in variables.items()},
    )


def left_out() -> set[str]:
    """Options in this environment, which the service does not have."""
    return {n for n in os.environ if n.startswith("MILLRACE_")} - set(TAKEN_OVER)


def _checked(arguments: Sequence[str]) -> str | None:
    """The configuration file that they lead to; what is wrong with them is said now, not in a log."""
    from millrace.cli.app import app as whole

    group = typer.main.get_command(whole)
    serve = group.commands["serve"]  # type: ignore[attr-defined]
    context = serve.make_context("millrace serve", list(arguments))
    found: str | None = context.params["config_"]
    return found


def _from_anywhere(word: str) -> str:
    """A path that holds in any folder; all else as it is."""
    start, equals, value = word.rpartition("=")
    if os.path.exists(word):
        start, equals, value = "", "", word
    is_path = "/" in value or value.startswith(".") or Path(value).suffix in _FILES
    if is_path and not value.startswith("~") and os.path.exists(value):
        return f"{start}{equals}{os.path.abspath(value)}"
    return word


_FILES = (".toml", ".gguf", ".jsonl", ".txt", ".json")


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # It may hold a key, and says where things lie: nobody else's business.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {error.strerror}.") from None


def _run(commands: Sequence[Sequence[str]], *, required: bool = True) -> bool:
    """Whether all of them ended well."""
    well = True
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            said, ended = str(error), 1
        else:
            said, ended = (done.stderr or done.stdout).strip(), done.returncode
        if ended and required:
            raise SetupError(
                f"The file is written, but `{' '.join(command)}` failed: {said or ended}. "
                "Is there a session of yours that could run it? `millrace service remove` undoes it."
            )
        well = well and not ended
    return well
