"""Output formats: what a family's answers look like, and the machine that reads them."""

from millrace.text.formats.detect import (
    ThinkingControls,
    by_name,
    choose,
    detect,
    names,
    thinking_controls,
    thought_by_name,
    thought_names,
)
from millrace.text.formats.machine import OutputParser, inside_thought, primer
from millrace.text.formats.sink import random_id
from millrace.text.formats.syntax import OutputFormat, ThoughtSyntax
from millrace.text.formats.tools import ToolSpec, tool_from_openai

__all__ = [
    "OutputFormat",
    "OutputParser",
    "ThinkingControls",
    "ThoughtSyntax",
    "ToolSpec",
    "by_name",
    "choose",
    "detect",
    "inside_thought",
    "names",
    "primer",
    "random_id",
    "thinking_controls",
    "thought_by_name",
    "thought_names",
    "tool_from_openai",
]
