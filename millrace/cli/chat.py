"""`millrace chat`: a conversation in the terminal with any OpenAI-compatible server.

`Server` speaks HTTP and `Terminal` reads and prints; what a conversation is lives in
`millrace.cli.conversation`. Without a server at hand, one is started for the while.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from millrace.cli.conversation import (
    Event,
    Reply,
    ReplyUsage,
    SavedConversation,
    data_uri,
    figures,
    printable,
)
from millrace.errors import EngineUnavailable, MillraceError, RequestFailed, SetupError

if TYPE_CHECKING:
    import subprocess

    from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model to start a server for; with --url, the name to ask for. If left out: "
            "the server on port 8000 if one runs, else the default model."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help=f"A running server, such as {DEFAULT_URL}.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens in an answer.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MILLRACE_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Talk to a model in the terminal."""
    import signal

    from rich.console import Console

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, leave)
    conversation = SavedConversation(system=system, temperature=temperature, max_tokens=max_tokens)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_connect(model, url, api_key))
        stack.enter_context(_line_editing())
        Terminal(server, conversation, Console(highlight=False)).run()


@contextlib.contextmanager
def _connect(model: str | None, url: str | None, api_key: str | None) -> Iterator[Server]:
    """The server the user named, the one that runs anyway, or one of our own."""
    server = Server(url or DEFAULT_URL, api_key=api_key, model=model)
    if url is not None or (model is None and server.health() is not None):
        _wait_ready(server)
        known = server.models()
        if model is not None and model not in known:
            names = ", ".join(known) or "none"
            raise SetupError(f"{server.url} has no model '{model}'. Models served: {names}.")
        server.model = model or next(iter(known), None)
        yield server
        return
    with _own_server(model) as server:
        server.model = next(iter(server.models()), None)
        yield server


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[Server]:
    """`millrace serve` as a child on a free port, ended with the chat."""
    import socket
    import subprocess
    import tempfile

    from millrace.cli.progress import reporter
    from millrace.models.resolve import resolve

    with reporter() as progress:
        resolve(model, progress=progress)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "millrace", "serve", *([model] if model else [])]
    with tempfile.TemporaryFile() as output:
        # A session of its own: Ctrl-C in this terminal is for the answer, not for the server.
        child = subprocess.Popen(
            [*command, "--port", str(port), "--only", "--config", os.devnull],
            # A key in the environment is meant for a server that others can reach.
            env={k: v for k, v in os.environ.items() if k != "MILLRACE_API_KEY"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}")
            try:
                _wait_ready(server, child)
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


def _wait_ready(server: Server, child: subprocess.Popen[bytes] | None = None) -> None:
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


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys and a history across sessions, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    from millrace.config import home

    path = home() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(path)
            os.chmod(path, 0o600)


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        import httpx

        whole = url if "://" in url else f"http://{url}"
        self.url = whole.rstrip("/").removesuffix("/v1")
        self.model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=None)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def health(self) -> tuple[str, str] | None:
        """The server's state and its error; None when nothing answers."""
        import httpx

        try:
            body = msgspec.json.decode(self._http.get("/health", timeout=2.0).content)
            return str(body["status"]), str(body.get("error", ""))
        except (httpx.HTTPError, msgspec.MsgspecError, TypeError, KeyError, AttributeError):
            return None

    def models(self) -> list[str]:
        with self._errors():
            response = self._http.get("/v1/models", timeout=10.0)
        self._check(response.status_code, response.content)
        try:
            return [str(entry["id"]) for entry in msgspec.json.decode(response.content)["data"]]
        except (msgspec.MsgspecError, TypeError, KeyError) as error:
            raise RequestFailed(f"{self.url} does not speak OpenAI's protocol.") from error

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
            raise RequestFailed(error_text(body) or f"The server answered with status {status}.")

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
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"The connection to {self.url} broke: {error}") from error


class Terminal:
    """Reads lines and prints answers; prompts and figures only where a person sits."""

    def __init__(self, server: Server, conversation: SavedConversation, console: Console) -> None:
        self.server = server
        self.conversation = conversation
        self.console = console
        self.interactive = sys.stdin.isatty()
        self.used = ReplyUsage()

    def run(self) -> None:
        if self.interactive:
            self._say(f"{self.server.model} at {self.server.url} · /help lists the commands")
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if not line.startswith("/"):
                self.conversation.ask(line)
                self._answer()
            elif not self._do(self.conversation.command(line)):
                return

    def _read(self) -> str | None:
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "› ") if self.interactive else "")
            except EOFError:
                if self.interactive:
                    self.console.print()
                return "\n".join(lines) or None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.console.print()
                self._say("/quit or Ctrl-D leaves")
                return ""
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _do(self, reply: Reply) -> bool:
        """Carry out what a command left to do; False ends the conversation."""
        if reply.text:
            self._say(reply.text)
        try:
            match reply.action:
                case "ask":
                    self._answer()
                case "save":
                    path = Path(reply.argument).expanduser()
                    saved = msgspec.json.format(msgspec.json.encode(self.conversation), indent=1)
                    path.write_bytes(saved + b"\n")
                    self._say(f"Saved to {path}.")
                case "load":
                    path = Path(reply.argument).expanduser()
                    self.conversation = msgspec.json.decode(
                        path.read_bytes(), type=SavedConversation
                    )
                    self._say(f"{len(self.conversation.messages)} messages are back.")
                case "model":
                    self.server.model = reply.argument or self.server.model
                    self._say(f"{self.server.model} (served: {', '.join(self.server.models())})")
                case "image":
                    path = Path(reply.argument).expanduser()
                    if (picture := data_uri(path.read_bytes())) is None:
                        self._say(f"{path} is no PNG, JPEG, WebP or GIF.")
                    else:
                        self.conversation.images.append(picture)
                        self._say(f"{path.name} goes with your next question.")
                case "tokens":
                    prompt, generated = self.used.prompt_tokens, self.used.completion_tokens
                    self._say(f"{prompt} tokens read and {generated} made in this session.")
        except OSError as error:
            self._say(f"{reply.argument} cannot be used: {error.strerror or error}")
        except msgspec.MsgspecError:
            self._say(f"{reply.argument} is not a saved conversation.")
        except MillraceError as error:
            self._fail(error)
        return reply.action != "quit"

    def _answer(self) -> None:
        text, usage, finish, start, first = "", ReplyUsage(), "", time.monotonic(), 0.0
        thinking = False
        events = self.server.stream(self.conversation.payload(self.server.model))
        try:
            for event in events:
                for piece, reasoning in event.pieces():
                    first = first or time.monotonic()
                    if reasoning:
                        self._think(piece)
                    else:
                        self._write("\n\n" + piece.lstrip() if thinking else piece)
                        text += piece
                    thinking = reasoning and self.interactive
                usage = event.usage or usage
                finish = next((c.finish_reason for c in event.choices if c.finish_reason), finish)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            finish = "stopped"
        except MillraceError as error:
            self.console.print()
            self._fail(error)
        finally:
            events.close()
            if text:
                self.conversation.answer(text)
        self.console.print()
        self.used.prompt_tokens += usage.prompt_tokens
        self.used.completion_tokens += usage.completion_tokens
        if self.interactive and first:
            self._say(figures(usage, first - start, time.monotonic() - first, finish))

    def _think(self, text: str) -> None:
        if self.interactive:
            self._write(text, "dim")

    def _write(self, text: str, style: str | None = None) -> None:
        self.console.out(printable(text), end="", style=style, highlight=False)

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False)

    def _fail(self, error: MillraceError) -> None:
        if not self.interactive:
            raise error
        self.console.print(f"error: {error.message}", style="red", markup=False, highlight=False)
