"""Calls in the markup of many families, for models that write another's or belong to none.

Everything here is soft: it is a call only where a tool that was offered is called, and plain text
otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.text.formats.syntax import HeaderCalls, JsonCalls, OutputFormat, PythonCalls
from millrace.text.formats.tagged_families import MINIMAX_CALLS, QWEN_CALLS

TAGGED_FUNCTION = replace(QWEN_CALLS, opens=(), soft=("<function=",))
NAMED_FUNCTION = HeaderCalls(
    opens=(),
    soft=("<function=",),
    first="name",
    fields={">": "arguments"},
    fence="</function>",
    template="<function={name}>{arguments}</function>",
)
TOOLS_TAG = JsonCalls(soft=("<tools>",), soft_inside=False, fence="</tools>")
"""Qwen2.5-Coder takes the tag that its tools are listed in for the one to call them by."""

PLAIN = OutputFormat(
    "plain",
    (
        JsonCalls(soft=("<tool_call>",), soft_inside=False, fence="</tool_call>"),
        NAMED_FUNCTION,
        TAGGED_FUNCTION,
        replace(MINIMAX_CALLS, opens=(), soft=("<invoke name=",)),
        JsonCalls(soft=("<function_call>",), soft_inside=False, fence="</function_call>"),
        TOOLS_TAG,
        JsonCalls(soft=("<tool_calls>",), soft_inside=False, fence="</tool_calls>"),
        JsonCalls(soft=("[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>"), soft_inside=False),
        HeaderCalls(
            opens=(),
            soft=("[TOOL_CALLS]",),
            first="name",
            fields={"[CALL_ID]": "id", "[ARGS]": "arguments"},
        ),
        HeaderCalls(
            opens=(),
            soft=("[Calling tool:",),
            first="name",
            fields={"(": "arguments"},
            fence=")]",
        ),
        PythonCalls(bare=True, soft=("```tool_code",), fence="```"),
    ),
)
"""What is read of a model whose template and vocabulary say nothing; it is told of the first."""
