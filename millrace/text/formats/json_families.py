"""The families that write JSON objects: format and signs of each, the general ones last."""

from __future__ import annotations

from millrace.text.formats import thoughts
from millrace.text.formats.generic import NAMED_FUNCTION, TAGGED_FUNCTION, TOOLS_TAG
from millrace.text.formats.syntax import FormatFamily, JsonCalls, OutputFormat, PythonCalls

_CITATIONS = {"<co:": ">", "</co:": ">"}
"""`<co>text</co: 0:[1,2]>` says which results support a text; the numbers mean nothing outside."""

JSON: tuple[FormatFamily, ...] = (
    FormatFamily(
        OutputFormat(
            "internlm",
            (
                JsonCalls(
                    opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
                    closes=("<|action_end|>",),
                    args_keys=("parameters", "arguments"),
                    between="",
                ),
            ),
            thoughts.THINK,
            drops=frozenset({"<|action_start|>", "<|plugin|>"}),
        ),
        (("<|action_start|>",), ("<|plugin|>",)),
        ("<|plugin|>",),
    ),
    FormatFamily(
        OutputFormat(
            "command-r",
            (
                JsonCalls(
                    opens=("<|START_ACTION|>",),
                    closes=("<|END_ACTION|>",),
                    name_keys=("tool_name", "name"),
                    args_keys=("parameters", "arguments"),
                    layout="list",
                    padding="\n",
                    between=",\n",
                    write_id="before",
                ),
            ),
            thoughts.COMMAND,
            drops=frozenset(
                {"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"}
            )
            | {"<co>", "</co>"},
            tails=_CITATIONS,
            wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        (("<|START_ACTION|>",),),
        ("<|START_ACTION|>",),
    ),
    FormatFamily(
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
            drops=frozenset({"<co>", "</co>"}),
            tails=_CITATIONS,
        ),
        (("Action:", '"tool_name"', "<|CHATBOT_TOKEN|>"),),
    ),
    FormatFamily(
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
    FormatFamily(
        OutputFormat(
            "gigachat",
            (
                JsonCalls(
                    opens=("<|function_call|>", "function call<|role_sep|>"),
                    soft=("function call",),
                    soft_inside=False,
                    layout="list",
                    padding="",
                ),
            ),
            drops=frozenset({"<|message_sep|>", "<|role_sep|>"}),
        ),
        (("<|role_sep|>", "<|message_sep|>"),),
    ),
    FormatFamily(
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
    FormatFamily(
        OutputFormat(
            "granite",
            (
                JsonCalls(
                    opens=("<|tool_call|>", "<tool_call>"), layout="list", padding="", between=", "
                ),
            ),
            thoughts.GRANITE,
            drops=frozenset({"<response>", "</response>", "</tool_call>"}),
        ),
        (("<|start_of_role|>", "<|tool_call|>"),),
    ),
    FormatFamily(
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
    FormatFamily(
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
    FormatFamily(
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
    FormatFamily(
        OutputFormat(
            "hunyuan-a13b",
            (
                JsonCalls(
                    opens=("<tool_calls>",),
                    closes=("</tool_calls>",),
                    layout="list",
                    padding="",
                    between=", ",
                ),
            ),
            thoughts.THINK,
            drops=frozenset({"<answer>", "</answer>"}),
        ),
        (("<tool_calls>", "<answer>"),),
    ),
    FormatFamily(
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
    FormatFamily(
        OutputFormat(
            "hermes",
            (
                JsonCalls(opens=("<tool_call>",), closes=("</tool_call>",)),
                NAMED_FUNCTION,
                TAGGED_FUNCTION,
                TOOLS_TAG,
            ),
            thoughts.THINK,
        ),
        (("<tool_call>",),),
        ("<tool_call>",),
    ),
    FormatFamily(
        OutputFormat(
            "xlam",
            (
                JsonCalls(
                    soft=('[{"name"', '{"name"', '{"tool_calls"'),
                    start="[{",
                    layout="list",
                    padding="",
                    between=", ",
                ),
                JsonCalls(soft=("```json", "```"), soft_inside=False, fence="```"),
                JsonCalls(soft=("<tool_call>",), soft_inside=False, fence="</tool_call>"),
                JsonCalls(soft=("[TOOL_CALLS]",), soft_inside=False),
            ),
        ),
        (('"tool_call_name"',),),
    ),
    FormatFamily(
        OutputFormat(
            "granite-20b",
            (JsonCalls(opens=("<function_call>",), padding=" ", between=""),),
            drops=frozenset({"</function_call>"}),
        ),
        (("<function_call>",),),
        ("<function_call>",),
    ),
    FormatFamily(
        OutputFormat(
            "llama-3",
            (
                JsonCalls(
                    opens=("<|python_tag|>",),
                    soft=('{"name"', '{"type": "function"', '{"type":"function"', '[{"name"'),
                    start="[{",
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
)
