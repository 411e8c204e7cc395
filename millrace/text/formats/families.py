"""The model families, each a declaration, and the texts of a template that give a family away.

Adding a family is adding an entry here. Order matters for detection: the first family all of whose
signs are in the template wins, so that special cases stand before the general ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from millrace.text.formats import thoughts
from millrace.text.formats.syntax import (
    HeaderCalls,
    JsonCalls,
    Messages,
    OutputFormat,
    PythonCalls,
)
from millrace.text.formats.tagged_families import TAGGED
from millrace.text.formats.values import Dialect


@dataclass(frozen=True)
class Family:
    """A format, and its signs: any one group, of which every text must be in the template."""

    format: OutputFormat
    signs: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...] = ()
    """Vocabulary entries that give the family away when the template says nothing."""


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
_CALL_COLON = re.compile(r"\s*(?:call:)?(?P<name>[^\s{}]+)\s*\Z")

FAMILIES: tuple[Family, ...] = (
    Family(
        OutputFormat(
            "harmony",
            messages=Messages(
                start="<|start|>",
                message="<|message|>",
                ends=("<|end|>", "<|return|>", "<|call|>"),
                header=("<|channel|>", "<|constrain|>"),
                reasoning=frozenset({"analysis"}),
            ),
            primers=("<|start|>assistant",),
        ),
        (("<|channel|>", "<|message|>", "analysis"),),
    ),
    *(Family(*entry) for entry in TAGGED),
    Family(
        OutputFormat(
            "gemma-4",
            (
                HeaderCalls(
                    opens=("<|tool_call>",),
                    first="name",
                    fields={},
                    closes=("<tool_call|>",),
                    name_pattern=_CALL_COLON,
                    dialect=Dialect(delimiter='<|"|>'),
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
    Family(
        OutputFormat(
            "functiongemma",
            (
                HeaderCalls(
                    opens=("<start_function_call>",),
                    first="name",
                    fields={},
                    closes=("<end_function_call>",),
                    name_pattern=_CALL_COLON,
                    dialect=Dialect(delimiter="<escape>"),
                    template="<start_function_call>call:{name}{arguments}<end_function_call>",
                ),
            ),
            drops=frozenset({"<start_function_response>", "<end_of_turn>", "<start_of_turn>"}),
        ),
        (("<start_function_call>",), ("<start_function_declaration>",)),
        ("<start_function_call>",),
    ),
    Family(
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
            drops=frozenset(
                {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|im_end|>"}
            ),
        ),
        (("<|tool_call_begin|>",),),
        ("<|tool_call_argument_begin|>",),
    ),
    Family(
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
    Family(
        OutputFormat(
            "deepseek-v3", (_DEEPSEEK_V3, _DEEPSEEK_V31), thoughts.THINK, drops=_DEEPSEEK_MARKS
        ),
        (("<｜tool▁call▁begin｜>", "```json"), ("<｜tool▁outputs▁begin｜>",)),
    ),
    Family(
        OutputFormat(
            "deepseek-v3.1", (_DEEPSEEK_V31, _DEEPSEEK_V3), thoughts.THINK, drops=_DEEPSEEK_MARKS
        ),
        (("<｜tool▁call▁begin｜>",),),
        ("<｜tool▁call▁begin｜>",),
    ),
    Family(
        OutputFormat("mistral", (_MISTRAL_LIST, _MISTRAL_NAMED), thoughts.MISTRAL),
        (("[TOOL_CALLS]", "[ARGS]"),),
        ("[ARGS]",),
    ),
    Family(
        OutputFormat("mistral-list", (_MISTRAL_LIST, _MISTRAL_NAMED), thoughts.MISTRAL),
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]",),
    ),
    Family(
        OutputFormat(
            "command-r",
            (
                JsonCalls(
                    opens=("<|START_ACTION|>",),
                    closes=("<|END_ACTION|>",),
                    name_keys=("tool_name", "name"),
                    args_keys=("parameters", "arguments"),
                    keep_ids=False,
                    layout="list",
                    padding="\n",
                    between=",\n",
                    write_id="before",
                ),
            ),
            thoughts.COMMAND,
            drops=frozenset(
                {"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"}
            ),
            wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        (("<|START_ACTION|>",),),
        ("<|START_ACTION|>",),
    ),
    Family(
        OutputFormat(
            "command-r-plus",
            (
                JsonCalls(
                    soft=("Action:\n```json", "Action: ```json"),
                    soft_inside=False,
                    name_keys=("tool_name", "name"),
                    args_keys=("parameters", "arguments"),
                    fence="```",
                    layout="list",
                    between=",\n",
                    ignored=("directly-answer", "directly_answer"),
                ),
            ),
        ),
        (("Action:", '"tool_name"', "<|CHATBOT_TOKEN|>"),),
    ),
    Family(
        OutputFormat(
            "apertus",
            (
                JsonCalls(
                    opens=("<|tools_prefix|>",),
                    closes=("<|tools_suffix|>",),
                    name_is_key=True,
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
            thoughts.APERTUS,
        ),
        (("<|tools_prefix|>",),),
        ("<|tools_prefix|>",),
    ),
    Family(
        OutputFormat(
            "gigachat",
            (
                JsonCalls(
                    opens=("<|function_call|>", "function call<|role_sep|>"),
                    layout="list",
                    padding="",
                ),
            ),
            drops=frozenset({"<|message_sep|>", "<|role_sep|>"}),
        ),
        (("<|role_sep|>", "<|message_sep|>"),),
    ),
    Family(
        OutputFormat(
            "nemotron",
            (
                JsonCalls(
                    opens=("<TOOLCALL>",),
                    closes=("</TOOLCALL>",),
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
            thoughts.THINK,
        ),
        (("<TOOLCALL>",),),
    ),
    Family(
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
    Family(
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
    Family(
        OutputFormat(
            "lfm2",
            (PythonCalls(opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)),),
            thoughts.THINK,
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: ", "<|im_start|>")),
        ("<|tool_call_start|>",),
    ),
    Family(
        OutputFormat(
            "granite",
            (JsonCalls(opens=("<|tool_call|>",), layout="list", padding="", between=", "),),
            thoughts.GRANITE,
            drops=frozenset({"<response>", "</response>"}),
        ),
        (("<|start_of_role|>", "<|tool_call|>"),),
    ),
    Family(
        OutputFormat(
            "phi",
            (
                JsonCalls(
                    opens=("<|tool_call|>",),
                    closes=("<|/tool_call|>",),
                    soft=("functools",),
                    soft_inside=False,
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
            thoughts.THINK,
        ),
        (("<|tool|>", "<|/tool|>"), ("<|tool_call|>",)),
        ("<|/tool_call|>",),
    ),
    Family(
        OutputFormat(
            "functools",
            (
                JsonCalls(
                    soft=("functools",),
                    soft_inside=False,
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
        ),
        (("functools[",),),
    ),
    Family(
        OutputFormat(
            "apriel",
            (
                JsonCalls(
                    opens=("<tool_calls>",),
                    closes=("</tool_calls>",),
                    layout="list",
                    padding="",
                    between=", ",
                    write_id="after",
                ),
            ),
            thoughts.APRIEL,
            drops=frozenset({"[END FINAL RESPONSE]"}),
        ),
        (("<tool_calls>", "[BEGIN FINAL RESPONSE]"),),
    ),
    Family(
        OutputFormat(
            "minimax-m1",
            (
                JsonCalls(
                    opens=("<tool_calls>",), closes=("</tool_calls>",), layout="lines", padding="\n"
                ),
            ),
            thoughts.THINK,
        ),
        (("<tool_calls>",),),
    ),
    Family(
        OutputFormat(
            "hermes",
            (JsonCalls(opens=("<tool_call>",), closes=("</tool_call>",)),),
            thoughts.THINK,
        ),
        (("<tool_call>",),),
        ("<tool_call>",),
    ),
    Family(
        OutputFormat("pythonic", (PythonCalls(bare=True),)),
        (("[func_name1(",), ("[func1(",)),
    ),
    Family(
        OutputFormat(
            "xlam",
            (
                JsonCalls(
                    soft=('[{"name"', '{"name"'),
                    start="[{",
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
        ),
        (('"tool_call_name"',),),
    ),
    Family(
        OutputFormat(
            "llama-3",
            (
                JsonCalls(
                    opens=("<|python_tag|>",),
                    soft=('{"name"', '{"type": "function"', '{"type":"function"'),
                    start="{",
                    args_keys=("parameters", "arguments"),
                    padding="",
                    between="; ",
                ),
                PythonCalls(opens=("<|python_tag|>",), brackets=False),
            ),
            drops=frozenset({"<|eom_id|>", "<|eot_id|>"}),
        ),
        (("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        ("<|python_tag|>",),
    ),
    Family(
        OutputFormat(
            "gemma-3",
            (
                PythonCalls(
                    soft=("```tool_code",), fence="```", shell=True, padding="\n", brackets=True
                ),
            ),
            drops=frozenset({"<end_of_turn>", "<start_of_turn>"}),
            python_tools=True,
        ),
        (("<start_of_turn>",),),
    ),
)

PLAIN = OutputFormat(
    "plain",
    (JsonCalls(soft=("<tool_call>",), soft_inside=False, fence="</tool_call>"),),
)
