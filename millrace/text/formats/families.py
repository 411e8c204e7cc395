"""All model families in the order of detection, and the format of models that belong to none.

Adding a family is adding an entry to one of the tables here. The first family all of whose signs
are in a template wins, so that special cases stand before the general ones.
"""

from __future__ import annotations

from millrace.text.formats import thoughts
from millrace.text.formats.generic import PLAIN
from millrace.text.formats.header_families import HEADER
from millrace.text.formats.json_families import JSON
from millrace.text.formats.syntax import (
    FormatFamily,
    JsonCalls,
    Messages,
    OutputFormat,
    PythonCalls,
)
from millrace.text.formats.tagged_families import TAGGED

_MESSAGES: tuple[FormatFamily, ...] = (
    FormatFamily(
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
)

_PYTHON: tuple[FormatFamily, ...] = (
    FormatFamily(
        OutputFormat(
            "olmo3",
            (
                PythonCalls(
                    opens=("<function_calls>",),
                    closes=("</function_calls>",),
                    soft=("<function_calls>",),
                    fence="</function_calls>",
                ),
            ),
            thoughts.THINK,
        ),
        (("<function_calls>", "<functions>"),),
    ),
    FormatFamily(
        OutputFormat(
            "lfm2",
            (
                PythonCalls(opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)),
                JsonCalls(opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)),
            ),
            thoughts.THINK,
            echoes=True,
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: ", "<|im_start|>")),
        ("<|tool_call_start|>",),
    ),
    FormatFamily(
        OutputFormat("pythonic", (PythonCalls(bare=True),)),
        (("[func_name1(",), ("[func1(",)),
    ),
)

_FENCED: tuple[FormatFamily, ...] = (
    FormatFamily(
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

__all__ = ["FAMILIES", "PLAIN"]

FAMILIES: tuple[FormatFamily, ...] = (*_MESSAGES, *TAGGED, *HEADER, *_PYTHON, *JSON, *_FENCED)
