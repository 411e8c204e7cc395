"""What a family's output looks like, as data: markers, nesting, and how arguments are written.

Only declarations. The machine and the decoders read them to parse; the grammars read them to
enforce. The first entry of every tuple of markers is the one the family itself writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from millrace.text.formats.values import JSON, ValueDialect

Field = Literal["name", "id", "kind", "arguments"]


@dataclass(frozen=True)
class ThoughtSyntax:
    """Reasoning between two markers."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    lead: str = "\n"
    """What the family writes after the opening marker and before the closing one."""

    @property
    def close_text(self) -> str:
        """The text that ends a thought and leads on to the answer."""
        return self.lead + self.closes[0] + 2 * self.lead


@dataclass(frozen=True)
class JsonCalls:
    """Objects that hold a name and arguments, alone, in a list or on lines."""

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    name_keys: tuple[str, ...] = ("name", "tool_name")
    args_keys: tuple[str, ...] = ("arguments", "parameters")
    id_keys: tuple[str, ...] = ("id", "tool_call_id")
    keep_ids: bool = True
    name_is_key: bool = False
    """`{"get_weather": {…}}`: the name is the object's only key."""
    soft: tuple[str, ...] = ()
    """Texts that begin a call, and are plain content if no offered tool turns out to be called."""
    soft_inside: bool = True
    """The soft text is part of the call itself, not markup before it."""
    start: str = ""
    """Characters that may begin such a call at the start of the answer."""
    fence: str = ""
    """A closing text that is markup right after a call only."""
    layout: Literal["each", "list", "lines"] = "each"
    padding: str = "\n"
    between: str = "\n"
    write_id: Literal["none", "before", "after"] = "none"
    ignored: tuple[str, ...] = ()
    """Names the template invents for "no call"."""


@dataclass(frozen=True)
class HeaderCalls:
    """A header with the name, then the arguments as one value."""

    opens: tuple[str, ...]
    first: Field
    fields: Mapping[str, Field]
    """Which field a marker inside the header begins."""
    closes: tuple[str, ...] = ()
    name_pattern: re.Pattern[str] = re.compile(r"\s*(?P<name>\S+)\s*\Z")
    keep_ids: bool = True
    id_is_header: bool = False
    """The whole first field is the call's id, with the name inside it."""
    dialect: ValueDialect = JSON
    content_name: str | None = None
    """A name that means plain content follows."""
    soft: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    """Texts that begin a call without its mark, if an offered name and a brace follow."""
    section: tuple[str, str] | None = None
    fence: str = ""
    """A closing text that is markup right after a call only."""
    between: str = ""
    template: str = ""
    """How one call is written, with {name}, {id}, {index} and {arguments}."""


@dataclass(frozen=True)
class TaggedCalls:
    """A tag for the call and one for each parameter."""

    opens: tuple[str, ...]
    header_end: tuple[str, ...]
    param_opens: tuple[str, ...]
    param_end: str
    value_closes: tuple[str, ...]
    closes: tuple[str, ...]
    name_pattern: re.Pattern[str] = re.compile(
        r"\s*[\"']?(?P<name>[^\s\"'<>]+?)[\"']?\s*(?P<closed>/)?\s*\Z"
    )
    """The call's name in its header, and `closed` where the tag has no body."""
    param_pattern: re.Pattern[str] = re.compile(r"\s*\"?(?P<name>[^\"<>\n]*?)\"?\s*\Z")
    value_open: str = ""
    header_optional: bool = False
    """The name may be followed directly by a parameter or the end."""
    type_tags: tuple[str, str] = ("", "")
    """Around a parameter's type, where it may stand before the value."""
    escaped: Mapping[str, str] = field(default_factory=dict)
    """Spellings inside values, and what they mean."""
    cdata: bool = False
    nested: str = ""
    """A token before every tag of values that are written as elements in elements."""
    section: tuple[str, str] | None = None
    soft: tuple[str, ...] = ()
    wrap: tuple[str, str] = ("", "")
    """What stands around all calls of an answer."""
    call_open: str = ""
    """The call's opening as written, with {name}; parameters have {key}, {value} and types."""
    param_write: str = ""
    call_close: str = ""
    between: str = ""
    trims: bool = False
    """One line break inside each end of a value is markup."""


@dataclass(frozen=True)
class PythonCalls:
    """Function calls in Python's syntax, in a list or on lines."""

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    soft: tuple[str, ...] = ()
    bare: bool = False
    """`[name(` with an offered name begins calls anywhere."""
    brackets: bool = True
    shell: bool = False
    """Wrapped in `print(…)`, or `name argument argument` on a line, is a call too."""
    fence: str = ""
    padding: str = ""


CallSyntax = JsonCalls | HeaderCalls | TaggedCalls | PythonCalls


@dataclass(frozen=True)
class Messages:
    """Answers made of messages with headers: channels and recipients say what a body is."""

    start: str
    message: str
    ends: tuple[str, ...]
    header: tuple[str, ...] = ()
    """Markers inside a header; the first one begins the channel's name."""
    reasoning: frozenset[str] = frozenset()
    """Channels whose bodies are thoughts."""
    recipient_prefix: str = "functions."
    self_recipient: str | None = None
    """The recipient of thoughts, in families without channels."""
    inline_bodies: bool = False
    """Calls are written in the body, by the format's call syntaxes."""


@dataclass(frozen=True, eq=False)
class OutputFormat:
    """All that is needed to read, prompt for and enforce a family's answers.

    Made once per model and kept: the parser's tables are cached by its identity.
    """

    name: str
    calls: tuple[CallSyntax, ...] = ()
    thought: ThoughtSyntax | None = None
    messages: Messages | None = None
    drops: frozenset[str] = field(default_factory=frozenset)
    """Markup without meaning for a client: turn ends, section borders, response wrappers."""
    primers: tuple[str, ...] = ()
    """Ends of a prompt that put the answer's first character inside markup."""
    tails: Mapping[str, str] = field(default_factory=dict)
    """Markup without meaning that goes on up to a text, by how it begins."""
    written: int = 0
    """Which of `calls` the family itself writes."""
    wrapper: tuple[str, str] = ("", "")
    """What the family may write around its content."""
    echoes: bool = False
    """A call's text may be repeated right after its closing mark; that is neither call nor content."""
    python_tools: bool = False
    """Tools are shown as Python signatures by us, since the template knows nothing of tools."""

    def with_thought(self, thought: ThoughtSyntax | None) -> OutputFormat:
        return replace(self, thought=thought)

    def with_drops(self, drops: frozenset[str]) -> OutputFormat:
        return replace(self, drops=self.drops | drops)

    @property
    def thinking_close(self) -> str | None:
        """What to append when a thinking budget is spent; None for families that do not think."""
        if self.thought is not None:
            return self.thought.close_text
        if self.messages is None:
            return None
        channel = f"{self.messages.header[0]}final" if self.messages.header else ""
        ends, start = self.messages.ends[0], self.messages.start
        return f"{ends}{start}assistant{channel}{self.messages.message}"

    @property
    def markers(self) -> frozenset[str]:
        """Every text that must never reach a client as content."""
        found = set(self.drops)
        for syntax in self.calls:
            if syntax.opens:
                found.update(syntax.opens, syntax.closes)
        if self.thought is not None:
            found.update(self.thought.opens, self.thought.closes)
        if self.messages is not None:
            found.update(self.messages.header, self.messages.ends)
            found.update((self.messages.start, self.messages.message))
        return frozenset(marker for marker in found if marker)


@dataclass(frozen=True)
class FormatFamily:
    """A format, and its signs: any one group, of which every text must be in the template."""

    format: OutputFormat
    signs: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...] = ()
    """Vocabulary entries that give the family away when the template says nothing."""
