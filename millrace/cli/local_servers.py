"""Which of this machine's servers a command talks to: by port or name, the only one, or one picked.

Servers announce themselves in MILLRACE_HOME (`millrace.servers`). Those that a command started for itself
are found by their port alone: they end with that command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli.remote import URL_VARIABLE
from millrace.errors import SetupError

if TYPE_CHECKING:
    from millrace.servers import ServerRecord

Port = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="The port of a server on this machine."),
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="A server on this machine by the name it was given with serve --server-name, or its port.",
    ),
]


def chosen(url: str | None, port: int | None, name: str | None) -> str | None:
    """The address of the server that was named; None where none was."""
    if port is None and name is None:
        return url
    if port is not None and name is not None:
        raise SetupError("--port and --server both name a server; use one of them.")
    if url is not None and url != os.environ.get(URL_VARIABLE):
        raise SetupError("--url already names the server; leave --port and --server out.")
    if name is not None and not name.isdigit():
        return named(name).url
    number = port if port is not None else int(name or 0)
    record = next((r for r in all_servers() if r.port == number), None)
    return record.url if record is not None else f"http://127.0.0.1:{number}"


def named(name: str) -> ServerRecord:
    found = [r for r in all_servers() if name in (r.name, str(r.port))]
    if not found:
        raise SetupError(f"No server here is called '{name}'. {listed(all_servers())}")
    if len(found) > 1:
        raise SetupError(f"Several servers are called '{name}'; use --port. {listed(found)}")
    return found[0]


def all_servers() -> list[ServerRecord]:
    from millrace.servers import running

    return running()


def only(command: str) -> ServerRecord | None:
    """The server for a command that named none: the only one there is, or one that a person picks."""
    found = [record for record in all_servers() if not record.private]
    if len(found) <= 1:
        return next(iter(found), None)
    if not sys.stdin.isatty():
        raise SetupError(
            f"{len(found)} servers run on this machine; choose one with --port or --server, like "
            f"millrace {command} --port {found[0].port}. {listed(found)}"
        )
    typer.echo(f"{len(found)} servers run on this machine:", err=True)
    for number, record in enumerate(found, 1):
        typer.echo(f"  {number}  {described(record)}", err=True)
    while True:
        choice: int = typer.prompt("Which one", type=int, default=1, err=True)
        if 1 <= choice <= len(found):
            return found[choice - 1]
        typer.echo(f"Type a number from 1 to {len(found)}.", err=True)


def described(record: ServerRecord) -> str:
    """A server in one line."""
    models = ", ".join(record.models) or "models on demand"
    started = f", started by millrace {record.private}" if record.private else ""
    name = f"{record.name}: " if record.name else ""
    return f"{name}{record.url}, process {record.pid}{started}, serves {models}"


def listed(records: Sequence[ServerRecord]) -> str:
    if not records:
        return "No server runs on this machine with this MILLRACE_HOME."
    return "\n".join(["Running:", *(f"  {described(record)}" for record in records)])
