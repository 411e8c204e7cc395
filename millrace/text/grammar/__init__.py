"""Grammars for llguidance: demanded forms, tool calls in a family's markup, thoughts before them."""

from millrace.text.grammar.compose import (
    Lazy,
    Thinking,
    answer_grammar,
    calls_grammar,
    calls_or_answer_grammar,
    strict_grammar,
)
from millrace.text.grammar.outputs import (
    from_choice,
    from_fields,
    from_grammar,
    from_regex,
    from_response_format,
    from_schema,
    json_object,
)

__all__ = [
    "Lazy",
    "Thinking",
    "answer_grammar",
    "calls_grammar",
    "calls_or_answer_grammar",
    "from_choice",
    "from_fields",
    "from_grammar",
    "from_regex",
    "from_response_format",
    "from_schema",
    "json_object",
    "strict_grammar",
]
