"""A model's text work as data: what is to be done, and what comes of it.

One way from a conversation or a text to tokens, for every protocol. A task runs the same on a thread
of the front and in a worker process, to which it travels as JSON; it knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ContextLengthExceeded
from millrace.protocol import LazyGrammar, Span, Thinking
from millrace.text.conversation import Conversation
from millrace.text.dialect import Dialect
from millrace.text.grammar.demand import Demand
from millrace.text.inputs import Inputs, PairsTask, TextsTask
from millrace.text.message_boundaries import borders, boundaries, opening
from millrace.text.pictures import ExpandedPrompt, Expansion, PictureWords
from millrace.text.template_renderer import TemplateRenderer
from millrace.text.tokenizer import Tokenizer
from millrace.text.volatile import Volatile

_SHORT_TOKEN = 16
"""Every vocabulary has longer tokens than this."""


class TextSideConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that it takes to open a model's text side."""

    folder: str
    window: int
    tool_format: str | None = None
    reasoning_format: str | None = None
    strip_volatile: tuple[str, ...] = ()
    pictures: PictureWords | None = None
    """How prompts speak of pictures; None for a model that takes none."""


class TokenisedPrompt(msgspec.Struct):
    """A conversation's prompt in tokens."""

    text: str
    """As the template wrote it, with one placeholder for each picture."""
    tokens: list[int]
    media: list[Span] = []
    ends: list[int] = []
    """The character at which each token ends, in the text as it was tokenised."""
    place: Callable[[int], int] = int
    """Where in that text a place of the template's is."""


class TextSide:
    """The text side of a model: what tasks work with."""

    def __init__(self, config: TextSideConfig, renderer: TemplateRenderer | None = None) -> None:
        """`renderer` runs the chat template; without one, it runs in this process."""
        self.config = config
        self.tokenizer = Tokenizer(Path(config.folder))
        volatile = Volatile(config.strip_volatile)
        self.dialect = Dialect(
            self.tokenizer,
            config.tool_format,
            config.reasoning_format,
            volatile,
            config.pictures,
            renderer,
        )

    def read_ahead(self) -> None:
        """Read what the first large prompt and the first grammar need."""
        self.tokenizer.fewest_tokens("")
        _ = self.dialect.marker_tokens

    def tokenised(
        self,
        text: str,
        digests: Sequence[str] = (),
        expansions: Mapping[str, Expansion] | None = None,
        *,
        fit: bool = True,
        placed: bool = False,
        special: bool = False,
    ) -> TokenisedPrompt:
        """What a template wrote as tokens; `placed` asks where each of them ends."""
        if fit:
            self.refuse_too_long(text)
        words = self.config.pictures
        if words is None:
            pieces, plain, prompt = [text], text, None
        else:
            if fit:  # before there is a text of that length
                self.refuse_beyond(sum((expansions or {})[d].tokens for d in digests))
            prompt = ExpandedPrompt(text, digests, words, expansions or {})
            pieces, plain = prompt.pieces, prompt.plain
        tokens: list[int] = []
        ends: list[int] = []
        begin = 0
        for number, piece in enumerate(pieces):
            if placed:
                found, stops = self.tokenizer.encode_placed(piece)
                ends += [begin + stop for stop in stops] if begin else stops
            else:
                found = self.tokenizer.encode(piece, special=special and number == 0)
            tokens += found
            begin += len(piece)
        if fit:
            self.refuse_beyond(len(tokens))
        if prompt is None:
            return TokenisedPrompt(plain, tokens, ends=ends)
        return TokenisedPrompt(plain, tokens, prompt.spans(tokens), ends, prompt.place)

    def fitting(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a prompt that has room in the window, or a refusal with its length."""
        self.refuse_too_long(text)
        tokens = self.tokenizer.encode(text, special=special)
        self.refuse_beyond(len(tokens))
        return tokens

    def refuse_too_long(self, text: str) -> None:
        """Refuse what cannot have room by its mere length, before the work of tokenising it."""
        if len(text) <= self.config.window * _SHORT_TOKEN:
            return
        least = self.tokenizer.fewest_tokens(text)
        if least >= self.config.window:
            raise ContextLengthExceeded(least, self.config.window, at_least=True)

    def refuse_beyond(self, tokens: int) -> None:
        if tokens >= self.config.window:
            raise ContextLengthExceeded(tokens, self.config.window)


class WrittenPrompt(msgspec.Struct, kw_only=True):
    """A conversation in tokens, and what its answer must look like."""

    tokens: list[int]
    text: str
    grammar: str | None = None
    lazy_grammar: LazyGrammar | None = None
    thinking: Thinking | None = None
    boundaries: list[int] = []
    stripped: int = 0
    media: list[Span] = []
    """Where the prompt's pictures stand."""
    head: int = 0
    tail: int | None = None
    """Between which tokens may be left out, where that was asked for."""


class PromptLength(msgspec.Struct):
    tokens: int
    stripped: int = 0


class ChatTask(msgspec.Struct, tag="chat", kw_only=True):
    """A conversation that is to be answered."""

    chat: Conversation
    demand: Demand | None = None
    boundaries: bool = True
    """Whether the engine has a use for the places at which messages end."""
    borders: bool = False
    """Whether something may be left out between the first message and the last."""

    def run(self, side: TextSide) -> WrittenPrompt:
        dialect, chat = side.dialect, self.chat
        rendered, digests = dialect.render_pictures(chat)
        placed = self.boundaries or self.borders
        prompt = side.tokenised(rendered, digests, chat.expansions, placed=placed)
        places: list[int] = []
        if self.boundaries:
            places = boundaries(dialect, chat, rendered, prompt.ends, prompt.place)
        head, tail = 0, None
        if self.borders:
            head, tail = borders(dialect, chat, rendered, prompt.ends, prompt.place)
        text = prompt.text
        grammar, lazy = form_of(dialect, chat, self.demand, text)
        return WrittenPrompt(
            tokens=prompt.tokens,
            text=text,
            media=prompt.media,
            grammar=grammar,
            lazy_grammar=lazy,
            thinking=dialect.limit(chat, text),
            boundaries=places,
            head=head,
            tail=tail,
            stripped=dialect.stripped(chat),
        )

    def size(self) -> int:
        parts = (self.chat.messages, self.chat.tools, self.chat.template_arguments, self.demand)
        return size_of(parts)


class CountTask(msgspec.Struct, tag="count", kw_only=True):
    """A conversation whose tokens are to be counted, however many they are."""

    chat: Conversation
    demand: Demand | None = None

    def run(self, side: TextSide) -> PromptLength:
        rendered, digests = side.dialect.render_pictures(self.chat)
        prompt = side.tokenised(rendered, digests, self.chat.expansions, fit=False)
        form_of(side.dialect, self.chat, self.demand, prompt.text)
        return PromptLength(len(prompt.tokens), side.dialect.stripped(self.chat))

    def size(self) -> int:
        return size_of((self.chat.messages, self.chat.tools, self.demand))


class OpeningTask(msgspec.Struct, tag="opening"):
    """All that a conversation's prompt has before its first user's words."""

    chat: Conversation

    def run(self, side: TextSide) -> WrittenPrompt:
        prompt = side.tokenised(opening(side.dialect, self.chat))
        return WrittenPrompt(
            tokens=prompt.tokens, text=prompt.text, stripped=side.dialect.stripped(self.chat)
        )

    def size(self) -> int:
        return size_of((self.chat.messages, self.chat.tools))


class RenderTask(msgspec.Struct, tag="render", kw_only=True):
    """A conversation as its template writes it, in tokens, whatever their number."""

    chat: Conversation
    special: bool = False

    def run(self, side: TextSide) -> WrittenPrompt:
        rendered, digests = side.dialect.render_pictures(self.chat)
        expansions = self.chat.expansions
        prompt = side.tokenised(rendered, digests, expansions, fit=False, special=self.special)
        return WrittenPrompt(tokens=prompt.tokens, text=prompt.text, media=prompt.media)

    def size(self) -> int:
        return size_of((self.chat.messages, self.chat.tools))


class EncodeTask(msgspec.Struct, tag="encode", kw_only=True):
    """Texts as tokens."""

    texts: list[str]
    special: bool = True
    fit: bool = True
    """Whether each is a prompt, and must have room in the window."""

    def refuse(self, side: TextSide) -> None:
        for text in self.texts if self.fit else ():
            side.refuse_too_long(text)

    def run(self, side: TextSide) -> list[list[int]]:
        if self.fit:
            return [side.fitting(t, special=self.special) for t in self.texts]
        return [side.tokenizer.encode(t, special=self.special) for t in self.texts]

    def size(self) -> int:
        return size_of(self.texts)


class FormTask(msgspec.Struct, tag="form"):
    """The grammar of an answer to a raw prompt."""

    demand: Demand

    def run(self, side: TextSide) -> str:
        side.dialect.trial.check_spelling(texts_in(self.demand.value), self.demand.param)
        grammar = self.demand.alone(side.dialect.marker_tokens)
        return side.dialect.trial.check(grammar, self.demand.param)

    def size(self) -> int:
        return size_of(self.demand)


Task = (
    ChatTask | CountTask | OpeningTask | RenderTask | EncodeTask | FormTask | TextsTask | PairsTask
)
Result = WrittenPrompt | PromptLength | Inputs | list[list[int]] | str


def form_of(
    dialect: Dialect, chat: Conversation, demand: Demand | None, text: str
) -> tuple[str | None, LazyGrammar | None]:
    """The grammar that holds the whole answer, and the one that holds calls once they open."""
    if demand is not None:
        dialect.trial.check_spelling(texts_in(demand.value), demand.param)
    entry = demand.entry() if demand is not None else None
    lazy = dialect.strict(chat) if entry is None else None
    grammar = dialect.grammar(chat, entry, text)
    param = demand.param if demand is not None else "tools"
    if grammar is not None:
        dialect.trial.check(grammar, param)
    if lazy is None:
        return grammar, None
    return grammar, LazyGrammar(list(lazy.triggers), dialect.trial.check(lazy.grammar, param))


_NOTES = frozenset({"description", "title", "examples", "default", "$comment"})
"""Fields of a schema whose texts no answer has to have."""


def texts_in(value: object) -> Iterator[str]:
    """All texts of a schema or a list of choices that an answer may have to spell."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += [k for k in item if k not in _NOTES]
            waiting += [v for k, v in item.items() if k not in _NOTES]
        elif isinstance(item, Sequence):
            waiting += item


ENOUGH = 1 << 20
"""Characters at which `size_of` stops counting."""
_ENTRY = 16
"""Characters that an entry of a list or an object counts for, beside its text."""


def size_of(value: object) -> int:
    """About how many characters a value holds; beyond `ENOUGH` it does not matter how many."""
    size, waiting = 0, [iter((value,))]
    while waiting and size < ENOUGH:
        item: Any = next(waiting[-1], _END)
        if item is _END:
            waiting.pop()
            continue
        size += _ENTRY
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting.append(iter(_flat(item)))
        elif isinstance(item, msgspec.Struct):
            waiting.append(iter(msgspec.structs.astuple(item)))
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            waiting.append(iter(item))
    return size


_END = object()


def _flat(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    for key, value in mapping.items():
        yield key
        yield value
