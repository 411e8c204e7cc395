"""Grammars for llguidance: demanded forms, tool calls in a family's markup, thoughts before them."""

from millrace.text.grammar.compose import (
    Lazy,
    Thinking,
    answer_grammar,
    calls_grammar,
    calls_or_answer_grammar,
    strict_grammar,
)
from millrace.text.grammar.demand import Demand, any_object, demand_of, demand_of_format
from millrace.text.grammar.outputs import from_choice, from_grammar, from_regex, from_schema

__all__ = [
    "Demand",
    "Lazy",
    "Thinking",
    "answer_grammar",
    "any_object",
    "calls_grammar",
    "calls_or_answer_grammar",
    "demand_of",
    "demand_of_format",
    "from_choice",
    "from_grammar",
    "from_regex",
    "from_schema",
    "strict_grammar",
]
