"""`millrace ps` and `millrace stop`: what running servers hold in memory, and ending it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from millrace.cli import local_servers
from millrace.cli.local_servers import Port, ServerName
from millrace.cli.remote import (
    ADMIN_VARIABLE,
    DEFAULT_URL,
    URL_VARIABLE,
    AdminKey,
    is_local,
    whole_address,
)
from millrace.errors import EngineUnavailable, MillraceError, RequestFailed, RoleNeeded, SetupError
from millrace.sizes import format_bytes

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from millrace.servers import ServerRecord

Url = Annotated[
    str | None,
    typer.Option(envvar=URL_VARIABLE, help="A server by its address, also on another machine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]
_PATIENCE = 120.0
"""Seconds that a server has to end: running answers may take some of them."""


def register(app: typer.Typer) -> None:
    app.command("ps")(ps)
    app.command("stop")(stop)


def ps(
    url: Url = None,
    port: Port = None,
    server: ServerName = None,
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """List the servers on this machine and the models that each has loaded."""
    address = local_servers.chosen(url, port, server)
    if as_json:
        import msgspec

        if address is None:
            record = local_servers.only("ps --json")
            address = record.url if record is not None else DEFAULT_URL
        status = _status(address, api_key)
        typer.echo(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    from rich.console import Console

    out = Console(highlight=False)
    records = local_servers.all_servers() if address is None else []
    if not records:
        _show(out, _status(address or DEFAULT_URL, api_key))
        return
    failed = 0
    for number, record in enumerate(records):
        if number:
            out.print()
        out.print(local_servers.described(record), markup=False, style="bold", soft_wrap=True)
        try:
            _show(out, _status(record.url, api_key))
        except MillraceError as error:
            if len(records) == 1:
                raise
            failed += 1
            out.print(f"error: {error.message}", markup=False, style="red", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _status(url: str, key: str | None) -> dict[str, Any]:
    return _ask(url, key, "GET", "/v1/status", "models", "memory")


def _show(out: Console, status: dict[str, Any]) -> None:
    from rich.table import Table

    models = status["models"]
    if models:
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = (
            "NAME",
            "STATE",
            "WEIGHTS",
            "KV IN USE",
            "AT MOST",
            "CONTEXT",
            "REQUESTS",
            "UNTIL",
        )
        for column in columns:
            table.add_column(column, overflow="fold")
        for model in models:
            table.add_row(*_row(model))
        out.print(table, markup=False)
    else:
        out.print("No model is loaded.")
    memory = status["memory"]
    limit = "what the device has" if memory["limit"] is None else format_bytes(memory["limit"])
    weights = format_bytes(sum(m["weight_bytes"] or 0 for m in models))
    state = format_bytes(sum(m["kv_bytes"] + m["cache_bytes"] for m in models))
    out.print(
        f"\nIn all: weights {weights}, key-value memory {state} in use, at most "
        f"{format_bytes(memory['reserved'])} of {limit}.",
        markup=False,
        soft_wrap=True,
    )
    if others := memory.get("other_servers"):
        out.print(f"Other servers held {format_bytes(others)} at its last load.", markup=False)
    for model in models:
        if note := model.get("cache_note"):
            out.print(f"{model['name']}: {note}", markup=False, soft_wrap=True)


def _row(model: dict[str, Any]) -> list[str]:
    state = {"wished": "waiting", "leaving": "leaving"}.get(model["residency"], model["state"])
    if model["residency"] == "loading":
        state = f"loading: {model['stage']}"
    window, weights = model["context_window"], model["weight_bytes"]
    until = "pinned" if model["pinned"] else _clock(model["expires_at"])
    return [
        model["name"],
        state,
        "-" if weights is None else format_bytes(weights),
        format_bytes(model["kv_bytes"] + model["cache_bytes"]),
        format_bytes(model["reserved_bytes"]),
        "-" if window is None else f"{window:,}",
        str(len(model["requests"])),
        until,
    ]


def _clock(expires: str | None) -> str:
    if expires is None:
        return "for ever"
    from datetime import datetime

    return datetime.fromisoformat(expires).astimezone().strftime("%H:%M:%S")


def stop(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model from 'millrace ps', or a server by its name or port. If left out, the server "
            "that --port or --server names is ended."
        ),
    ] = None,
    url: Url = None,
    port: Port = None,
    server: ServerName = None,
    api_key: AdminKey = None,
) -> None:
    """Unload a model from a running server, or end a server, once it has answered what it was asked."""
    address = local_servers.chosen(url, port, server)
    if model is None:
        _end(_server_to_end(port, server))
        return
    if address is None and (found := _server_called(model)) is not None:
        _end(found)
        return
    if address is None:
        record = local_servers.only(f"stop {model}")
        address = record.url if record is not None else DEFAULT_URL
    path = f"/v1/models/{quote(model, safe='/')}/unload"
    card = _ask(address, api_key, "POST", path, "id")
    typer.echo(f"{card['id']} is not loaded any more.")


def _server_called(name: str) -> ServerRecord | None:
    """The server of this name or port; None where a model may be meant."""
    records = local_servers.all_servers()
    if any(name in record.models for record in records):
        return None
    return (
        local_servers.named(name) if any(name in (r.name, str(r.port)) for r in records) else None
    )


def _server_to_end(port: int | None, name: str | None) -> ServerRecord:
    wanted = name if port is None else str(port)
    if wanted is None:
        raise SetupError(
            "Say what to stop: a model, as in millrace stop MODEL, or a server on this machine, as in "
            f"millrace stop --port PORT. {local_servers.listed(local_servers.all_servers())}"
        )
    return local_servers.named(wanted)


def _end(record: ServerRecord) -> None:
    """Have a server end, and wait until it has. Its record is locked, so that its process lives."""
    import os
    import signal
    import time

    try:
        os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it ended a moment ago
    except OSError as error:
        raise SetupError(f"{record.url} cannot be ended: {error.strerror}.") from None
    deadline = time.monotonic() + _PATIENCE
    while any(r.pid == record.pid for r in local_servers.all_servers()):
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{record.url} was asked to end and has not yet.")
        time.sleep(0.05)
    typer.echo(f"{record.url} has ended.")


def _ask(url: str, key: str | None, method: str, path: str, *fields: str) -> dict[str, Any]:
    """A server's answer, which has these fields."""
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(
            method,
            f"{whole_address(url)}{path}",
            headers=headers,
            timeout=600,
            trust_env=not is_local(url),
        )
    except httpx.ConnectError:
        raise EngineUnavailable(
            f"No server answers at {url}. Start one with millrace serve, or name another with --port, "
            "--server or --url."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error).rstrip(".")
        raise EngineUnavailable(f"No server answers at {url}: {why}.") from None
    if answer.status_code != 200:
        raise _refusal(answer)
    try:
        body = answer.json()
    except ValueError:
        raise _refusal(answer) from None
    if not isinstance(body, dict) or not set(fields) <= body.keys():
        raise RequestFailed(f"{whole_address(url)} is no server of millrace's.")
    return body


def _refusal(answer: httpx.Response) -> MillraceError:
    try:
        error = answer.json()["error"]
        if error["code"] == RoleNeeded.code:
            return RoleNeeded(
                f"{error['message']} This command takes the key from --api-key or {ADMIN_VARIABLE}."
            )
        return RequestFailed(str(error["message"]))
    except (ValueError, KeyError, TypeError):
        from millrace.bench.sse import error_text

        where = str(answer.url.copy_with(path="/", query=None)).rstrip("/")
        return RequestFailed(
            f"{where} answered with status {answer.status_code}. {error_text(answer.content)}"
        )
