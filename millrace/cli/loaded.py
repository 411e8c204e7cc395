"""`millrace ps` and `millrace stop`: what a running server holds in memory, and letting go of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from millrace.cli.remote import ADMIN_VARIABLE, DEFAULT_URL, URL_VARIABLE, AdminKey, whole_address
from millrace.errors import EngineUnavailable, MillraceError, RequestFailed, RoleNeeded

if TYPE_CHECKING:
    import httpx

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="The server.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]


def register(app: typer.Typer) -> None:
    app.command("ps")(ps)
    app.command("stop")(stop)


def ps(url: Url = DEFAULT_URL, api_key: AdminKey = None, as_json: Json = False) -> None:
    """List the models that a running server has loaded."""
    status = _ask(url, api_key, "GET", "/v1/status")
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False)
    if status["models"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("NAME", "STATE", "MEMORY", "CONTEXT", "IN USE", "UNTIL"):
            table.add_column(column, overflow="fold")
        for model in status["models"]:
            table.add_row(*_row(model))
        out.print(table, markup=False)
    else:
        out.print("No model is loaded.")
    from millrace.models.footprint import in_words

    memory = status["memory"]
    limit = "what the device has" if memory["limit"] is None else in_words(memory["limit"])
    out.print(f"\n{in_words(memory['reserved'])} of {limit} are reserved.", markup=False)


def _row(model: dict[str, Any]) -> list[str]:
    from millrace.models.footprint import in_words

    state = {"wished": "waiting", "leaving": "leaving"}.get(model["residency"], model["state"])
    if model["residency"] == "loading":
        state = f"loading: {model['stage']}"
    window = model["context_window"]
    until = "pinned" if model["pinned"] else _clock(model["expires_at"])
    count = len(model["requests"])
    return [
        model["name"],
        state,
        in_words(model["reserved_bytes"]),
        "-" if window is None else f"{window:,}",
        f"{count} request{'' if count == 1 else 's'}" if count else "no",
        until,
    ]


def _clock(expires: str | None) -> str:
    if expires is None:
        return "for ever"
    from datetime import datetime

    return datetime.fromisoformat(expires).astimezone().strftime("%H:%M:%S")


def stop(
    model: Annotated[str, typer.Argument(help="A name from 'millrace ps'.")],
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
) -> None:
    """Unload a model from a running server, once it has answered what it was asked."""
    path = f"/v1/models/{quote(model, safe='/')}/unload"
    card = _ask(url, api_key, "POST", path)
    typer.echo(f"{card['id']} is not loaded any more.")


def _ask(url: str, key: str | None, method: str, path: str) -> dict[str, Any]:
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, f"{whole_address(url)}{path}", headers=headers, timeout=600)
    except httpx.ConnectError:
        raise EngineUnavailable(
            f"No server answers at {url}. Start one with millrace serve, or name another with --url."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error).rstrip(".")
        raise EngineUnavailable(f"No server answers at {url}: {why}.") from None
    if answer.status_code != 200:
        raise _refusal(answer)
    body: dict[str, Any] = answer.json()
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
        return RequestFailed(f"The server answers {answer.status_code}: {answer.text[:200]}")
