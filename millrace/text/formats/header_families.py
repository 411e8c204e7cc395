"""The families that write a header with the name, then the arguments: format and signs of each."""

from __future__ import annotations

import re

from millrace.text.formats import thoughts
from millrace.text.formats.syntax import FormatFamily, HeaderCalls, JsonCalls, OutputFormat
from millrace.text.formats.values import ValueDialect

_MISTRAL_LIST = JsonCalls(
    opens=("[TOOL_CALLS]",), layout="list", padding="", between=", ", write_id="after"
)
_MISTRAL_NAMED = HeaderCalls(
    opens=("[TOOL_CALLS]",),
    first="name",
    fields={"[CALL_ID]": "id", "[ARGS]": "arguments"},
    template="[TOOL_CALLS]{name}[ARGS]{arguments}",
)
_DEEPSEEK_MARKS = frozenset({"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"})
_DEEPSEEK_V3 = HeaderCalls(
    opens=("<｜tool▁call▁begin｜>",),
    first="kind",
    fields={"<｜tool▁sep｜>": "name", "\n": "arguments"},
    closes=("<｜tool▁call▁end｜>",),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    between="\n",
    template="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_V31 = HeaderCalls(
    opens=("<｜tool▁call▁begin｜>",),
    first="name",
    fields={"<｜tool▁sep｜>": "arguments"},
    closes=("<｜tool▁call▁end｜>",),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    template="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
)
_CALL_COLON = re.compile(r"\s*(?:<call>)?:?(?:call:)?(?P<name>[^\s{}:]+)\s*\Z")
_BARE_CALL = ("call:", "<call>")

HEADER: tuple[FormatFamily, ...] = (
    FormatFamily(
        OutputFormat(
            "gemma-4",
            (
                HeaderCalls(
                    opens=("<|tool_call>",),
                    first="name",
                    fields={},
                    closes=("<tool_call|>",),
                    name_pattern=_CALL_COLON,
                    dialect=ValueDialect(delimiter='<|"|>'),
                    bare=_BARE_CALL,
                    template="<|tool_call>call:{name}{arguments}<tool_call|>",
                ),
            ),
            thoughts.GEMMA4,
            drops=frozenset(
                {
                    "<turn|>",
                    "<|turn>model",
                    "<|turn>",
                    "<|channel>",
                    "<|think|>",
                    "<|tool_response>",
                }
            ),
        ),
        (("<|tool_call>",),),
    ),
    FormatFamily(
        OutputFormat(
            "functiongemma",
            (
                HeaderCalls(
                    opens=("<start_function_call>",),
                    first="name",
                    fields={},
                    closes=("<end_function_call>",),
                    name_pattern=_CALL_COLON,
                    dialect=ValueDialect(delimiter="<escape>"),
                    bare=_BARE_CALL,
                    template="<start_function_call>call:{name}{arguments}<end_function_call>",
                ),
            ),
            drops=frozenset({"<start_function_response>", "<end_of_turn>", "<start_of_turn>"}),
        ),
        (("<start_function_call>",), ("<start_function_declaration>",)),
        ("<start_function_call>",),
    ),
    FormatFamily(
        OutputFormat(
            "kimi-k2",
            (
                HeaderCalls(
                    opens=("<|tool_call_begin|>",),
                    first="name",
                    fields={"<|tool_call_argument_begin|>": "arguments"},
                    closes=("<|tool_call_end|>",),
                    name_pattern=re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?\Z"),
                    id_is_header=True,
                    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                    template="<|tool_call_begin|>functions.{name}:{index}"
                    "<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
                ),
            ),
            thoughts.THINK,
            # The section's marks are sometimes written in the singular.
            drops=frozenset(
                f"<|tool_call{plural}_section_{side}|>"
                for plural in ("s", "")
                for side in ("begin", "end")
            )
            | {"<|im_end|>"},
        ),
        (("<|tool_call_begin|>",),),
        ("<|tool_call_argument_begin|>",),
    ),
    FormatFamily(
        OutputFormat(
            "solar",
            (
                HeaderCalls(
                    opens=("<|tool_call:begin|>",),
                    first="id",
                    fields={"<|tool_call:name|>": "name", "<|tool_call:args|>": "arguments"},
                    closes=("<|tool_call:end|>",),
                    section=("<|tool_calls|>", "<|calls|>"),
                    template="<|tool_call:begin|>{id}<|tool_call:name|>{name}"
                    "<|tool_call:args|>{arguments}<|tool_call:end|>",
                ),
            ),
            thoughts.SOLAR,
            drops=frozenset(
                {"<|begin|>assistant", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>"}
            ),
            wrapper=("<|begin|>assistant<|content|>", "<|end|>"),
        ),
        (("<|tool_call:begin|>",),),
    ),
    FormatFamily(
        OutputFormat(
            "deepseek-v3", (_DEEPSEEK_V3, _DEEPSEEK_V31), thoughts.THINK, drops=_DEEPSEEK_MARKS
        ),
        (("<｜tool▁call▁begin｜>", "```json"), ("<｜tool▁outputs▁begin｜>",)),
    ),
    FormatFamily(
        OutputFormat(
            "deepseek-v3.1", (_DEEPSEEK_V31, _DEEPSEEK_V3), thoughts.THINK, drops=_DEEPSEEK_MARKS
        ),
        (("<｜tool▁call▁begin｜>",),),
        ("<｜tool▁call▁begin｜>",),
    ),
    FormatFamily(
        OutputFormat("mistral", (_MISTRAL_LIST, _MISTRAL_NAMED), thoughts.MISTRAL, written=1),
        (("[TOOL_CALLS]", "[ARGS]"),),
        ("[ARGS]",),
    ),
    FormatFamily(
        OutputFormat("mistral-list", (_MISTRAL_LIST, _MISTRAL_NAMED), thoughts.MISTRAL),
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]",),
    ),
    FormatFamily(
        OutputFormat(
            "functionary-v3.1",
            (
                HeaderCalls(
                    opens=("<function=",),
                    first="name",
                    fields={">": "arguments"},
                    closes=("</function>",),
                    template="<function={name}>{arguments}</function>",
                ),
            ),
        ),
        (("<function=", "</function>"),),
    ),
    FormatFamily(
        OutputFormat(
            "functionary-v3.2",
            (
                HeaderCalls(
                    opens=(),
                    soft=(">>>",),
                    first="name",
                    fields={"\n": "arguments"},
                    content_name="all",
                    template=">>>{name}\n{arguments}",
                ),
            ),
            primers=(">>>",),
            wrapper=("all\n", ""),
        ),
        ((">>>all", "<|end_header_id|>"),),
    ),
)
