"""`millrace chat`: a conversation in the terminal with any OpenAI-compatible server.

`Terminal` asks, shows and carries out commands. What a conversation is lives in
`millrace.cli.conversation`, how messages are typed in `millrace.cli.typed`, and how answers are shown in
`millrace.cli.answers_shown`. Without a server at hand, one is started for the while.
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

from millrace.cli.answers_shown import MarkdownAnswer, PlainAnswer, ShownAnswer
from millrace.cli.conversation import Reply, ReplyUsage, SavedConversation, data_uri, figures
from millrace.cli.remote import DEFAULT_URL, ChatKey, Server, Url, own_server, wait_ready
from millrace.cli.typed import line_editing, read_message
from millrace.errors import MillraceError

if TYPE_CHECKING:
    from rich.console import Console


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
    url: Url = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens in an answer.")
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
        server = stack.enter_context(_connect(model, url, api_key))
        stack.enter_context(line_editing())
        Terminal(server, conversation, Console(highlight=False), plain=plain).run()


@contextlib.contextmanager
def _connect(model: str | None, url: str | None, api_key: str | None) -> Iterator[Server]:
    """The server the user named, the one that runs anyway, or one of our own."""
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
    ) -> None:
        self.server = server
        self.conversation = conversation
        self.console = console
        self.interactive = sys.stdin.isatty()
        self.used = ReplyUsage()
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
                    self._say(f"{prompt} tokens read and {generated} made in this session.")
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
        shown: ShownAnswer = PlainAnswer(self.console, thoughts=self.interactive)
        if self.interactive and self.console.is_terminal and not self._plain:
            shown = MarkdownAnswer(self.console)
        failure: MillraceError | None = None
        events = self.server.stream(self.conversation.payload(self.server.model))
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
        if self.interactive and first:
            self._say(figures(usage, first - start, time.monotonic() - first, finish))

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
