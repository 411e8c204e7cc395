"""`millrace chat`: a conversation in the terminal with any OpenAI-compatible server.

`Terminal` asks, shows and carries out commands. What a conversation is lives in
`millrace.cli.conversation`, how messages are typed in `millrace.cli.typed`, and how answers are shown in
`millrace.cli.answer_display`. Without a server at hand, one is started for the while.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from millrace.cli import local_servers
from millrace.cli.answer_display import AnswerDisplay, MarkdownAnswer, PlainAnswer
from millrace.cli.chat_limits import DEFAULT_MAX_TOKENS, ChatLimits, limits_for
from millrace.cli.completion import fetchable_names
from millrace.cli.conversation import (
    FinishDetails,
    Reply,
    ReplyUsage,
    SavedConversation,
    data_uri,
    figures,
)
from millrace.cli.local_servers import Port, ServerName
from millrace.cli.remote import DEFAULT_URL, ChatKey, Server, Url, own_server, wait_ready
from millrace.cli.typed import line_editing, read_message
from millrace.errors import MillraceError

if TYPE_CHECKING:
    from rich.console import Console


def register(app: typer.Typer) -> None:
    app.command()(chat)
    app.command("run", help="Talk to a model in the terminal; the same as chat.")(chat)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model to start a server for: a short name (qwen3-4b), auto, a folder, a GGUF file, "
            "a Hugging Face id or a local name; with --url, --port or --server, the name to ask for. If "
            "left out: the server that runs on this machine, else the default model.",
            autocompletion=fetchable_names,
        ),
    ] = None,
    url: Url = None,
    port: Port = None,
    server: ServerName = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"The most tokens in an answer; {DEFAULT_MAX_TOKENS} if not given, 0 for no limit.",
        ),
    ] = None,
    loop_guard: Annotated[
        bool | None,
        typer.Option(
            help="End an answer once it repeats itself: more than 256 tokens with a period of at most "
            "64. On with servers of millrace."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show answers as they are written, not as Markdown.")
    ] = False,
    api_key: ChatKey = None,
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
        address = local_servers.chosen(url, port, server)
        connected = stack.enter_context(_connect(model, address, api_key))
        stack.enter_context(line_editing())
        limits = limits_for(connected.listed(), connected.model, loop_guard)
        console = Console(highlight=False)
        Terminal(connected, conversation, console, plain=plain, limits=limits).run()


@contextlib.contextmanager
def _connect(model: str | None, url: str | None, api_key: str | None) -> Iterator[Server]:
    """The server the user named, one that runs on this machine, or one of our own."""
    if url is None and model is None and (found := local_servers.only("chat")) is not None:
        url = found.url
    server = Server(url or DEFAULT_URL, api_key=api_key, model=model)
    if url is not None or (model is None and server.health() is not None):
        wait_ready(server)
        if model is not None:
            server.check_model(model)
        server.model = model or next(iter(server.models()), None)
        yield server
        return
    with own_server(model) as server:
        server.model = next(iter(server.models()), None)
        yield server


class Terminal:
    """Reads messages and shows answers; prompts and figures only where a person sits."""

    def __init__(
        self,
        server: Server,
        conversation: SavedConversation,
        console: Console,
        *,
        plain: bool = False,
        limits: ChatLimits | None = None,
    ) -> None:
        self.server = server
        self.limits = limits or ChatLimits()
        self.conversation = conversation
        self.console = console
        self.interactive = sys.stdin.isatty()
        self.used = ReplyUsage()
        self.uncounted = 0
        """Answers that were stopped on a server that reports usage at their end alone."""
        self._plain = plain

    def run(self) -> None:
        if self.interactive:
            self._say(f"{self.server.model} at {self.server.url} · /help lists the commands")
        while (message := self._read()) is not None:
            # A text of several lines that begins with a slash was pasted, and is no command.
            if message.startswith("/") and "\n" not in message:
                if not self._do(self.conversation.command(message)):
                    return
            elif message:
                self.conversation.ask(message)
                self._answer()

    def _read(self) -> str | None:
        try:
            message = read_message(self.interactive)
        except EOFError:
            if self.interactive:
                self.console.print()
            return None
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self.console.print()
            self._say("/quit or Ctrl-D leaves")
            return ""
        return message.strip("\n") if message.strip() else ""

    def _do(self, reply: Reply) -> bool:
        """Carry out what a command left to do; False ends the conversation."""
        if reply.text:
            self._say(reply.text)
        try:
            match reply.action:
                case "ask":
                    self._answer()
                case "save":
                    path = _path(reply.argument)
                    saved = msgspec.json.format(msgspec.json.encode(self.conversation), indent=1)
                    path.write_bytes(saved + b"\n")
                    self._say(f"Saved to {path}.")
                case "load":
                    path = _path(reply.argument)
                    self.conversation = msgspec.json.decode(
                        path.read_bytes(), type=SavedConversation
                    )
                    self._say(f"{len(self.conversation.messages)} messages are back.")
                case "model":
                    if reply.argument:
                        self.server.check_model(reply.argument)
                        self.server.model = reply.argument
                    self._say(f"{self.server.model} (served: {', '.join(self.server.models())})")
                case "image":
                    self._attach(_path(reply.argument))
                case "tokens":
                    prompt, generated = self.used.prompt_tokens, self.used.completion_tokens
                    said = f"{prompt} tokens read and {generated} made in this session."
                    if self.uncounted:
                        said += f" Answers that were stopped and are not counted: {self.uncounted}."
                    self._say(said)
        except OSError as error:
            self._say(f"{reply.argument} cannot be used: {error.strerror or error}")
        except msgspec.MsgspecError:
            self._say(f"{reply.argument} is not a saved conversation.")
        except MillraceError as error:
            self._fail(error)
        return reply.action != "quit"

    def _attach(self, path: Path) -> None:
        if (picture := data_uri(path.read_bytes())) is None:
            self._say(f"{path} is no PNG, JPEG, WebP or GIF.")
            return
        self.conversation.images.append(picture)
        self._say(f"{path.name} goes with your next question.")

    def _answer(self) -> None:
        text, usage, finish, start, first = "", ReplyUsage(), "", time.monotonic(), 0.0
        shown: AnswerDisplay = PlainAnswer(self.console, thoughts=self.interactive)
        if self.interactive and self.console.is_terminal and not self._plain:
            shown = MarkdownAnswer(self.console)
        failure: MillraceError | None = None
        details: FinishDetails | None = None
        body = self.conversation.payload(self.server.model) | self.limits.body(self.conversation)
        events = self.server.stream(body)
        try:
            for event in events:
                for piece, reasoning in event.pieces():
                    first = first or time.monotonic()
                    if reasoning:
                        shown.think(piece)
                    else:
                        shown.say(piece)
                        text += piece
                usage = event.usage or usage
                finish = next((c.finish_reason for c in event.choices if c.finish_reason), finish)
                details = next((c.finish_details for c in event.choices), None) or details
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            finish = "stopped"
        except MillraceError as error:
            failure = error
        finally:
            events.close()
            if text:
                self.conversation.answer(text)
            with contextlib.suppress(*([KeyboardInterrupt] if self.interactive else [])):
                shown.end()  # a long answer takes its time to be drawn for good
        if failure is not None:
            self._fail(failure)
        self.used.prompt_tokens += usage.prompt_tokens
        self.used.completion_tokens += usage.completion_tokens
        self.uncounted += bool(text) and not usage.prompt_tokens
        if self.interactive and first:
            self._say(figures(usage, first - start, time.monotonic() - first, finish))
        if notice := self.limits.notice(self.conversation, finish, details, usage):
            if self.interactive:
                self._say(notice)
            else:
                typer.echo(notice, err=True)  # the answer alone is the output

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False)

    def _fail(self, error: MillraceError) -> None:
        if not self.interactive:
            raise error
        self.console.print(f"error: {error.message}", style="red", markup=False, highlight=False)


def _path(text: str) -> Path:
    """A path as it was typed; one that was dragged into the terminal is quoted as for a shell."""
    import shlex

    path = Path(text).expanduser()
    if not path.exists():
        with contextlib.suppress(ValueError):
            unquoted = Path(*shlex.split(text)[:1]).expanduser()
            return unquoted if unquoted.is_file() else path
    return path
