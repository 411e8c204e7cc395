"""Whole grammars for an answer: a thought first where the model thinks, then what is demanded.

The functions a request's translation calls. They know formats and tools, not protocols, and
return grammar text for an LLMatcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from millrace.errors import BadRequest, Unsupported
from millrace.text.formats.machine import primer
from millrace.text.formats.syntax import JsonCalls, Messages, OutputFormat, PythonCalls
from millrace.text.formats.tools import ToolSpec
from millrace.text.grammar.calls import CallGrammar
from millrace.text.grammar.lark import Builder, Entry, quoted
from millrace.text.grammar.schema import problem_of

Thinking = Literal["no", "may", "inside"]
"""Whether the answer holds no thought, may begin with one, or begins inside one."""

_GAP = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class Lazy:
    """A grammar for what follows a text: it applies once one of `triggers` was generated."""

    triggers: tuple[str, ...]
    grammar: str


def answer_grammar(
    entry: Entry, format: OutputFormat, tokens: Mapping[str, int], thinking: Thinking = "no"
) -> str:
    """An answer whose content has the demanded form."""
    build = Builder(tokens)
    return _finished(build, format, _content(build, format, entry), thinking)


def calls_grammar(
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    tokens: Mapping[str, int],
    *,
    name: str | None = None,
    parallel: bool = True,
    thinking: Thinking = "no",
    prompt: str = "",
) -> str:
    """An answer that is calls: of any tool, or only of the one named.

    `prompt` is the rendered prompt or its tail, for families whose prompt opens the first call.
    """
    build = Builder(tokens)
    body = _calls(build, format, chosen_tools(tools, name), parallel, prompt)
    return _finished(build, format, body, thinking)


def calls_or_answer_grammar(
    entry: Entry,
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    tokens: Mapping[str, int],
    *,
    parallel: bool = True,
    thinking: Thinking = "no",
    prompt: str = "",
) -> str:
    """Tools and a demanded form together: the model calls, or answers in that form."""
    build = Builder(tokens)
    calls = _calls(build, format, tools, parallel, prompt, marked=True)
    body = build.rule("either", f"{calls} | {_content(build, format, entry)}")
    return _finished(build, format, body, thinking)


def strict_grammar(
    format: OutputFormat, tools: Sequence[ToolSpec], tokens: Mapping[str, int]
) -> Lazy | None:
    """Calls the model makes of itself, held to the schema of every strict tool once they open.

    None when no tool is strict. Tools that are not strict may be called with any arguments.
    """
    if not any(tool.strict for tool in tools):
        return None
    tools = [tool if tool.strict else _loose(tool) for tool in tools]
    build = Builder(tokens)
    grammar = CallGrammar(build, format, tools, parallel=True)
    messages = format.messages
    if messages is not None and not messages.inline_bodies:
        header = "(/[a-z ]+/ | " + " | ".join(build.literal(m) for m in messages.header) + ")*"
        body = " | ".join(
            f"{quoted(tool.name)} {header} {build.literal(messages.message)} "
            f"{grammar.arguments(index)} {build.literal(messages.ends[-1])}"
            for index, tool in enumerate(tools)
        )
        build.rule("start", body)
        return Lazy((f"to={messages.recipient_prefix}",), _checked(build))
    trigger = _trigger(format, grammar)
    build.rule("start", grammar.all(skip=trigger))
    return Lazy((trigger,), _checked(build))


def _calls(
    build: Builder,
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    parallel: bool,
    prompt: str,
    marked: bool = False,
) -> str:
    grammar = CallGrammar(build, format, tools, parallel)
    messages = format.messages
    if messages is None:
        return grammar.all(opened=primer(format, prompt), marked=marked)
    if messages.inline_bodies:
        ends = " | ".join(build.literal(end) for end in messages.ends)
        bodies = [
            f"{build.literal(f' to={tool.name}{messages.message}')} {grammar.all()} ({ends})?"
            for tool in tools
        ]
    else:
        bodies = [
            f"{_to_tool(build, messages, tool)} {grammar.arguments(index)} "
            f"{build.literal(messages.ends[-1])}"
            for index, tool in enumerate(tools)
        ]
    return build.rule("messages", " | ".join(bodies))


def _content(build: Builder, format: OutputFormat, entry: Entry) -> str:
    body = build.entry(entry)
    messages = format.messages
    if messages is not None:
        channel = f"{messages.header[0]}final" if messages.header else ""
        return f"{build.literal(channel + messages.message)} {body}"
    before, after = (f"({build.literal(text)})?" if text else "" for text in format.wrapper)
    return build.rule("content", f"{before} {body} {after}".strip())


def _loose(tool: ToolSpec) -> ToolSpec:
    """The tool with its parameters' names, and nothing said of their values."""
    properties: dict[str, object] = {key: {} for key in tool.properties}
    return ToolSpec(
        tool.name, {"type": "object", "properties": properties, "additionalProperties": True}
    )


def _trigger(format: OutputFormat, grammar: CallGrammar) -> str:
    syntax = grammar.syntax
    if isinstance(syntax, JsonCalls) and syntax.soft and syntax.soft_inside:
        return syntax.soft[0]
    if syntax is not None and syntax.opens:
        return syntax.opens[0]
    if isinstance(syntax, JsonCalls | PythonCalls) and syntax.soft:
        return syntax.soft[0]
    raise Unsupported(
        f"Strict tools cannot be enforced for this model: its calls ({format.name}) have no "
        "opening mark. Leave 'strict' out, or use tool_choice 'required'.",
        param="tools",
    )


def chosen_tools(tools: Sequence[ToolSpec], name: str | None) -> list[ToolSpec]:
    if name is None:
        if not tools:
            raise BadRequest("'tool_choice' demands a call, but no tools are given.", param="tools")
        return list(tools)
    found = [tool for tool in tools if tool.name == name]
    if not found:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise BadRequest(
            f"'tool_choice' names '{name}', which is not among the tools: {known}.",
            param="tool_choice",
        )
    return found


def _finished(build: Builder, format: OutputFormat, body: str, thinking: Thinking) -> str:
    if format.messages is not None:
        thoughts = "" if thinking == "no" else _messages_thought(build, format.messages)
        build.rule("start", f"{thoughts} {body}")
        return _checked(build)
    thought = format.thought
    if thought is None or thinking == "no":
        build.rule("start", body)
        return _checked(build)
    rest = build.until("thought_rest", thought.closes[0])
    if thinking == "inside":
        build.rule("start", f"{rest} {_GAP} {body}")
    else:
        opening = build.literal(thought.opens[0])
        build.rule("start", f"({opening} {rest} {_GAP})? {body}")
    return _checked(build)


def _messages_thought(build: Builder, messages: Messages) -> str:
    """Any number of thoughts, each a message, before the one that is demanded."""
    if messages.self_recipient is not None:
        head = build.literal(f" to={messages.self_recipient}{messages.message}")
    else:
        channel = sorted(messages.reasoning)[0]
        head = build.literal(f"{messages.header[0]}{channel}{messages.message}")
    rest = build.until("thought_rest", f"{messages.ends[0]}{messages.start}assistant")
    return build.rule("thoughts", f"({head} {rest})*")


def _to_tool(build: Builder, messages: Messages, tool: ToolSpec) -> str:
    channel, constrain = messages.header
    return build.literal(
        f"{channel}commentary to={messages.recipient_prefix}{tool.name} {constrain}json"
        f"{messages.message}"
    )


def _checked(build: Builder) -> str:
    grammar = build.build()
    problem = problem_of(grammar)
    if problem is not None:
        raise BadRequest(
            f"The tools' schemas cannot be enforced together: {' '.join(problem.split())[:300]}.",
            param="tools",
        )
    return grammar
