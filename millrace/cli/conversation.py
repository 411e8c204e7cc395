"""A conversation as `millrace chat` holds it: turns, settings, /commands, and a stream's events.

Pure: nothing here reads, prints or connects.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

HELP = """\
/clear         forget the conversation    /retry       answer again
/system TEXT   set the system message     /undo        take the last turn back
/temp X        temperature                /save FILE   write the conversation
/top_p X       nucleus sampling           /load FILE   read one back
/max N         most tokens in an answer   /tokens      tokens used so far
/model [NAME]  show or choose the model   /image FILE  a picture for the next
/quit          leave (or Ctrl-D)                       question
Ctrl-C stops an answer and keeps its text. A line that ends with \\ goes on in
the next one; what is pasted is one message, whatever its lines.
/system, /temp, /top_p and /max alone go back to the default; /max 0 sets no
limit."""

_NUMBERS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "/temp": ("temperature", float, 0.0, 100.0),
    "/top_p": ("top_p", float, 0.0, 1.0),
    "/max": ("max_tokens", int, 0, 2**31),
}


class SavedMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str
    images: list[str] = []
    """Pictures that go with it, as data URIs."""

    def spoken(self) -> dict[str, Any]:
        """As the server is sent it."""
        if not self.images:
            return {"role": self.role, "content": self.content}
        shown = [{"type": "image_url", "image_url": {"url": image}} for image in self.images]
        return {"role": self.role, "content": [*shown, {"type": "text", "text": self.content}]}


class Reply(msgspec.Struct, frozen=True):
    """What a command wants: a line on the terminal, and perhaps something done."""

    text: str = ""
    action: Literal["none", "ask", "save", "load", "model", "image", "tokens", "quit"] = "none"
    argument: str = ""


class SavedConversation(msgspec.Struct):
    """The turns so far and the settings they are asked with. Saved as it is, in JSON."""

    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """None is the default (millrace.cli.chat_limits), 0 is no limit."""
    messages: list[SavedMessage] = []
    images: list[str] = []
    """Pictures for the question that comes next."""

    def ask(self, text: str) -> None:
        """Add a question, in place of one that never got an answer."""
        if self.messages and self.messages[-1].role == "user":
            self.messages.pop()
        self.messages.append(SavedMessage("user", text, self.images))
        self.images = []

    def answer(self, text: str) -> None:
        self.messages.append(SavedMessage("assistant", text))

    def payload(self, model: str | None) -> dict[str, Any]:
        """The body of a streamed chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": model,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return {k: v for k, v in body.items() if v is not None} | {
            "messages": [*system, *(m.spoken() for m in self.messages)],
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def command(self, line: str) -> Reply:
        """Carry out a line that starts with a slash."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name in _NUMBERS:
            return self._set_number(name, argument)
        match name:
            case "/help" | "/?":
                return Reply(HELP)
            case "/quit" | "/exit" | "/bye":
                return Reply(action="quit")
            case "/clear":
                self.messages = []
                return Reply("The conversation starts anew.")
            case "/system":
                self.system = argument or None
                return Reply("The system message is set." if argument else "No system message.")
            case "/undo":
                return Reply("The last turn is gone." if self._undo() else "Nothing to undo.")
            case "/retry":
                return self._retry()
            case "/save" | "/load" | "/image" if not argument:
                return Reply(f"Name a file: {name} FILE")
            case "/save" | "/load" | "/model" | "/image" | "/tokens":
                return Reply(action=name[1:], argument=argument)  # type: ignore[arg-type]
        return Reply(f"There is no command {name}; /help lists them.")

    def _set_number(self, name: str, argument: str) -> Reply:
        field, convert, low, high = _NUMBERS[name]
        if not argument:
            setattr(self, field, None)
            return Reply(f"{field} is the default.")
        try:
            value = convert(argument)
        except ValueError:
            return Reply(f"{name} needs a number, as in {name} {convert(1)}")
        if not low <= value <= high:
            return Reply(f"{name} must be from {low:g} to {high:g}.")
        setattr(self, field, value)
        if name == "/max" and not value:
            return Reply("Answers have no limit but the context window.")
        return Reply(f"{field} is {value}.")

    def _undo(self) -> bool:
        asked = [i for i, m in enumerate(self.messages) if m.role == "user"]
        del self.messages[asked[-1] if asked else 0 :]
        return bool(asked)

    def _retry(self) -> Reply:
        while self.messages and self.messages[-1].role == "assistant":
            self.messages.pop()
        return Reply(action="ask") if self.messages else Reply("There is nothing to answer yet.")


class ReplyUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class FinishDetails(msgspec.Struct):
    type: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None
    finish_details: FinishDetails | None = None


class Event(msgspec.Struct):
    """One chunk of a streamed chat completion, as far as a terminal needs it."""

    choices: list[_Choice] = []
    usage: ReplyUsage | None = None
    error: msgspec.Raw = msgspec.Raw()

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The texts, each with whether it is reasoning."""
        for delta in (choice.delta for choice in self.choices if choice.delta):
            if delta.reasoning_content:
                yield delta.reasoning_content, True
            if delta.content:
                yield delta.content, False


def figures(usage: ReplyUsage, wait: float, run: float, finish: str) -> str:
    """The line under an answer."""
    generated = usage.completion_tokens
    parts = [f"first token after {wait:.2f} s"]
    if generated > 1 and run > 0:
        parts.insert(0, f"{generated} tokens, {(generated - 1) / run:.1f} tokens/s")
    if usage.prompt_tokens:
        parts.append(f"prompt {usage.prompt_tokens} tokens")
    if finish in ("length", "stopped"):
        parts.append("cut at the token limit" if finish == "length" else "stopped")
    return " · ".join(parts)


def data_uri(picture: bytes) -> str | None:
    """A picture as requests have it; None where the bytes are of no kind that servers take."""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
    kind = next((k for head, k in kinds.items() if picture.startswith(head)), None)
    if kind is None and picture[:4] == b"RIFF" and picture[8:12] == b"WEBP":
        kind = "webp"
    return kind and f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def printable(text: str) -> str:
    """The text without control characters, with which a model could take over a terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
