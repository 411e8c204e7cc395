"""A server as the commands that talk to one see it: its address, what it serves, its answers.

Whoever needs a server and finds none has one started here, which ends with the command. What is said to
a server, and what becomes of its answers, is not known here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from millrace.cli.conversation import Event
from millrace.errors import EngineUnavailable, RequestFailed, SetupError

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE, KEY_VARIABLE = "MILLRACE_URL", "MILLRACE_API_KEY"
ADMIN_VARIABLE = "MILLRACE_ADMIN_KEY"
Url = Annotated[
    str | None,
    typer.Option(envvar=URL_VARIABLE, help=f"A running server; {DEFAULT_URL} if one is there."),
]
Key = Annotated[
    str | None, typer.Option(envvar=KEY_VARIABLE, help="The server's API key, if it wants one.")
]
ChatKey = Annotated[
    str | None,
    typer.Option(
        envvar=[KEY_VARIABLE, ADMIN_VARIABLE], help="The server's API key, if it wants one."
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar=[ADMIN_VARIABLE, KEY_VARIABLE],
        help="An API key of the server's with the role admin, if it wants one.",
    ),
]


def whole_address(url: str) -> str:
    """An address as requests need it, of what people type: the scheme and the path may be left out."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")


def is_local(url: str) -> bool:
    """Whether an address is this machine's own, which no proxy of the environment leads to."""
    import ipaddress
    from urllib.parse import urlsplit

    try:
        host = urlsplit(whole_address(url)).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RemoteModel(msgspec.Struct, frozen=True):
    """A model as /v1/models tells of it; other servers than ours tell less."""

    id: str
    context_window: int | None = None
    max_model_len: int | None = None
    state: str | None = None
    alias_of: str | None = None
    owned_by: Any = None
    profile: Any = None
    """What the server's configuration sets for it, by the names of a request's fields."""

    @property
    def window(self) -> int | None:
        return self.context_window or self.max_model_len


class _Listed(msgspec.Struct):
    data: list[RemoteModel]


class _Shown(msgspec.Struct):
    capabilities: list[str]


class _Kept(msgspec.Struct):
    name: str
    disk_bytes: int | None = None


class _Library(msgspec.Struct):
    models: list[_Kept]


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        import httpx

        self.url = whole_address(url)
        self.model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=None)
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                trust_env=not is_local(self.url),
            )
        except httpx.InvalidURL as error:
            raise SetupError(f"{url} is no address of a server: {error}.") from None

    def health(self) -> tuple[str, str] | None:
        """The server's state and its error; None when nothing answers."""
        import httpx

        try:
            body = msgspec.json.decode(self._http.get("/health", timeout=2.0).content)
            return str(body["status"]), str(body.get("error", ""))
        except (httpx.HTTPError, msgspec.MsgspecError, TypeError, KeyError, AttributeError):
            return None

    def listed(self) -> list[RemoteModel]:
        with self._errors():
            response = self._http.get("/v1/models", timeout=10.0)
        self._check(response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=_Listed).data
        except msgspec.MsgspecError as error:
            raise RequestFailed(f"{self.url} does not speak OpenAI's protocol.") from error

    def models(self) -> list[str]:
        return [model.id for model in self.listed()]

    def check_model(self, name: str) -> None:
        """Raises, with the names there are, where the server has none of this name."""
        if name not in (known := self.models()):
            names = ", ".join(known) or "none"
            raise SetupError(f"{self.url} has no model '{name}'. Models served: {names}.")

    def capabilities(self, model: str) -> list[str] | None:
        """What a model can do (completion, tools, ...); None where the server does not tell."""
        shown = self._told("POST", "/api/show", _Shown, json={"model": model})
        return None if shown is None else shown.capabilities

    def sizes(self) -> dict[str, int]:
        """Bytes of models on disk, as far as the server tells."""
        library = self._told("GET", "/v1/library", _Library)
        return {m.name: m.disk_bytes or 0 for m in library.models} if library else {}

    def _told(self, method: str, path: str, kind: type[T], **request: Any) -> T | None:
        """What only servers like ours tell."""
        with self._errors():
            response = self._http.request(method, path, timeout=30.0, **request)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError:
            return None

    def stream(self, payload: dict[str, Any]) -> Generator[Event, None, None]:
        """The events of one answer; closing the iterator ends the request."""
        from millrace.bench.sse import DONE, Events, error_text

        events = Events()
        with (
            self._errors(),
            self._http.stream("POST", "/v1/chat/completions", json=payload) as response,
        ):
            if response.status_code >= 400:
                self._check(response.status_code, response.read())
            for data in (d for received in response.iter_bytes() for d in events.feed(received)):
                if data == DONE:
                    return
                try:
                    event = msgspec.json.decode(data, type=Event)
                except msgspec.MsgspecError as error:
                    raise RequestFailed("The server sent an event that is not JSON.") from error
                if bytes(event.error) not in (b"", b"null"):
                    raise RequestFailed(error_text(bytes(event.error)))
                yield event

    def _check(self, status: int, body: bytes) -> None:
        from millrace.bench.sse import error_text

        if status >= 400:
            reason = error_text(body)
            if not body.lstrip().startswith(b"{"):  # no error of an API
                reason = f"{self.url} answered with status {status}. {reason}".rstrip()
            raise RequestFailed(reason)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            raise EngineUnavailable(
                f"No server answers at {self.url}. Start one with millrace serve, "
                f"or leave --url out to have one started."
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnavailable(f"The connection to {self.url} broke: {error}") from error


@contextlib.contextmanager
def own_server(model: str | None, options: Sequence[str] = ()) -> Iterator[Server]:
    """`millrace serve` as a child on a free port, ended with the command."""
    import subprocess
    import tempfile

    from millrace.cli.progress import reporter
    from millrace.models.resolve import resolve
    from millrace.models.short_names import AUTO
    from millrace.ports import free_port

    with reporter() as progress:
        found = resolve(model, progress=progress)
    if found.note:
        typer.echo(f"millrace: {found.note}", err=True)
    if model == AUTO:
        model = found.name  # the server does not choose again
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", *([model] if model else []), *options]
    with tempfile.TemporaryFile() as output:
        # A session of its own: Ctrl-C in this terminal is for the answer, not for the server.
        child = subprocess.Popen(
            [*command, "--port", str(port), "--only", "--config", os.devnull],
            env=_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}")
            try:
                wait_ready(server, child)
            except EngineUnavailable as error:
                output.seek(0)
                said = output.read().decode("utf-8", "replace").strip().splitlines()[-12:]
                raise SetupError("\n".join([error.message, *said])) from error
            yield server
        finally:
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()


def _child_environment() -> dict[str, str]:
    """Says that the server is this command's own. A key, or a name, is meant for one that others use."""
    from millrace.cli.neighbours import STARTED_BY

    left_out = (KEY_VARIABLE, ADMIN_VARIABLE, "MILLRACE_SERVER_NAME")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    return kept | {STARTED_BY: next((a for a in sys.argv[1:] if not a.startswith("-")), "chat")}


def wait_ready(server: Server, child: subprocess.Popen[bytes] | None = None) -> None:
    """Return when the server says ready, or has no notion of it; a child may take its time."""
    from rich.console import Console

    with Console(stderr=True).status("Loading the model") as status:
        while child is None or child.poll() is None:
            health = server.health()
            if health is None and child is None:
                return
            state, reason = health or ("starting", "")
            if state in ("failed", "stopped"):
                raise EngineUnavailable(f"The server cannot load the model: {reason or state}")
            if state == "ready":
                return
            status.update(f"Loading the model ({state})")
            time.sleep(0.05)
    raise EngineUnavailable(f"The server ended with status {child.returncode}:")
