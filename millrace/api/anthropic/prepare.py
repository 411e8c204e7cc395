"""From a wire request to a conversation, the form its answer must have, and what was left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from millrace.api.anthropic.effort import effort_word
from millrace.api.anthropic.messages import conversation_of
from millrace.api.anthropic.schema import (
    AnyChoice,
    Form,
    NoChoice,
    PromptFields,
    ThinkingAdaptive,
    ThinkingOff,
    ThinkingOn,
    Tool,
    ToolChoice,
)
from millrace.errors import BadRequest, Unsupported
from millrace.serving.forms import demanded
from millrace.serving.thinking import strange_arguments, template_switch
from millrace.serving.toolbox import check_tools
from millrace.text.conversation import Conversation, ConversationTurn
from millrace.text.dialect import Dialect
from millrace.text.grammar import Demand

_DATE = re.compile(r"_\d{8}\Z")
_NAMES = {"effort": "output_config.effort", "thinking": "thinking"}
"""Fields of a conversation in Anthropic's words."""


class ThreadUnsupported(Unsupported):
    """Clients send the whole conversation again when they are told so."""

    details: ClassVar[dict[str, object] | None] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@dataclass
class PreparedRequest:
    chat: Conversation
    demand: Demand | None = None
    """The form that the answer must have."""
    ignored: list[str] = field(default_factory=list)
    """What the request asked for and this model or server does not do."""


def prepare(wire: PromptFields, dialect: Dialect) -> PreparedRequest:
    """Not for the event loop: it renders with the model's template."""
    if wire.thread is not None:
        raise ThreadUnsupported("'thread' is not supported by this server.", param="thread")
    tools, ignored = _tools(wire.tools or [])
    turns, continues = _prefill(conversation_of(wire.system, wire.messages))
    demand = _form(wire)
    if demand is not None and continues:
        raise BadRequest(
            "An answer that must be JSON cannot go on from a message of the assistant: leave out "
            "the last message, or output_config.format.",
            param="output_config.format",
        )
    chat = Conversation(
        messages=turns,
        tools=tools,
        continue_final=continues,
        template_arguments=wire.chat_template_kwargs or {},
    )
    _choose(chat, wire)
    _think(chat, wire, dialect)
    ignored += [_NAMES[name] for name in dialect.ignored(chat)]
    ignored += _edits(wire)
    ignored += strange_arguments(wire.chat_template_kwargs or {}, dialect)
    if wire.container is not None:
        ignored.append("container")
    if wire.output_config is not None and wire.output_config.task_budget is not None:
        ignored.append("output_config.task_budget")
    return PreparedRequest(chat, demand, ignored)


def _prefill(turns: list[ConversationTurn]) -> tuple[list[ConversationTurn], bool]:
    """Whether the answer goes on from the last turn; one that says nothing is left out."""
    last = turns[-1]
    if last.role != "assistant":
        return turns, False
    if last.calls:
        raise BadRequest(
            "The last message calls tools: a message with their results must follow it.",
            param="messages",
        )
    if last.content:
        return turns, True
    if len(turns) == 1:
        raise BadRequest("The messages are empty.", param="messages")
    return turns[:-1], False


def _tools(offered: Sequence[Tool]) -> tuple[list[dict[str, Any]], list[str]]:
    """The client's own tools, and the names of those that are not for this server."""
    check_tools(len(offered))
    tools: dict[str, dict[str, Any]] = {}
    ignored: list[str] = []
    for index, tool in enumerate(offered):
        where = f"tools.{index}"
        if tool.type == "function":
            raise BadRequest(
                f"{where}.type: 'function' is OpenAI's; a tool here has name, description and "
                "input_schema.",
                param=where,
            )
        if tool.type not in (None, "custom"):
            ignored.append(f"tools.{_DATE.sub('', tool.type or '')}")
            continue
        if not tool.name:
            raise BadRequest(f"{where}.name: a tool needs a name.", param=where)
        if tool.input_schema is None:
            raise BadRequest(f"{where}.input_schema: a tool needs a JSON schema.", param=where)
        if tool.name in tools:
            raise BadRequest(f"{where}.name: '{tool.name}' is there twice.", param=where)
        if tool.allowed_callers and "direct" not in tool.allowed_callers:
            ignored.append(f"tools.{tool.name}")
            continue
        if tool.input_examples:
            ignored.append(f"tools.{tool.name}.input_examples")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict:
            function["strict"] = True
        tools[tool.name] = {"type": "function", "function": function}
    return list(tools.values()), list(dict.fromkeys(ignored))


def _choose(chat: Conversation, wire: PromptFields) -> None:
    match wire.tool_choice:
        case None:
            return
        case ToolChoice(name=name):
            chat.tool_choice, chat.tool_name = "required", name
        case AnyChoice():
            chat.tool_choice = "required"
        case NoChoice():
            chat.tool_choice = "none"
    chat.parallel = not wire.tool_choice.disable_parallel_tool_use


def _think(chat: Conversation, wire: PromptFields, dialect: Dialect) -> None:
    match wire.thinking:
        case ThinkingOn(budget_tokens=budget):
            chat.thinking = True
            # Clients ask any model to think: one that cannot is let off, and the header says so.
            chat.thinking_budget = budget if dialect.thinks else None
        case ThinkingAdaptive():
            chat.thinking = True
        case ThinkingOff():
            chat.thinking = False
        case None:
            chat.thinking = template_switch(wire.chat_template_kwargs or {})
    wish = wire.output_config.effort if wire.output_config else None
    if wish is not None:
        chat.effort = effort_word(dialect, wish) if dialect.controls.effort else wish


def _form(wire: PromptFields) -> Demand | None:
    asked: dict[str, Form | None] = {
        "output_config.format": wire.output_config.format if wire.output_config else None,
        "output_format": wire.output_format,
    }
    found = {name: form for name, form in asked.items() if form is not None}
    if len(found) > 1:
        raise BadRequest(f"Give only one of {' and '.join(found)}.", param="output_format")
    other = demanded(wire)
    for name, form in found.items():
        if other is not None:
            raise BadRequest(f"Give only one of {name} and {other.param}.", param=name)
        return Demand("schema", form.schema, f"{name}.schema")
    return other


def _edits(wire: PromptFields) -> list[str]:
    """Edits of the context that would change it; keeping all thoughts changes nothing."""
    edits = wire.context_management.edits if wire.context_management else []
    return [
        f"context_management.{_DATE.sub('', edit.type)}"
        for edit in edits
        if not (edit.type.startswith("clear_thinking") and edit.keep in ("all", {"type": "all"}))
    ]
