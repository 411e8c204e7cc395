"""The forms that a request may demand of its answer, each as one llguidance grammar.

A schema, a regular expression, a choice, or a grammar in Lark, EBNF or GBNF; what cannot be enforced
is refused by the name of the field that asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from millrace.errors import BadRequest
from millrace.text.grammar.lark import UNFORCED, Entry, pattern, quoted, refuse_long, single
from millrace.text.grammar.schema import BLANKS, NO_BLANKS, enforceable, problem_of


def from_schema(schema: Any, param: str, *, compact: bool = False) -> Entry:
    return {"json_schema": enforceable(schema, param, NO_BLANKS if compact else BLANKS)}


def from_regex(regex: Any, param: str) -> Entry:
    if not isinstance(regex, str) or not regex:
        raise BadRequest(f"'{param}' must be a regular expression.", param=param)
    refuse_long(len(regex), param)
    return _checked({"lark_grammar": f"{UNFORCED}start: {pattern(regex)}\n"}, param)


def from_choice(choices: Any, param: str) -> Entry:
    if (
        not isinstance(choices, Sequence)
        or isinstance(choices, str)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise BadRequest(f"'{param}' must be a list of non-empty strings.", param=param)
    refuse_long(sum(map(len, choices)), param)
    # One lexeme and not one for each: as alternatives of a rule, more than 2000 are too many.
    text = " | ".join(map(quoted, choices))
    return _checked({"lark_grammar": f"start: CHOICE\nCHOICE: {text}\n"}, param)


def from_grammar(text: Any, param: str) -> Entry:
    """Lark, EBNF or GBNF: the last two are told by their `::=` and translated."""
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"'{param}' must be the text of a grammar.", param=param)
    refuse_long(len(text), param)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the translator raises whatever it stumbles over
        raise BadRequest(f"'{param}' is not a grammar: {error}.", param=param) from error
    if (most := most_alternatives(lark)) > MOST_ALTERNATIVES:
        raise BadRequest(
            f"'{param}' has {most} alternatives at one place; the most are {MOST_ALTERNATIVES}. A "
            "list of choices (guided_choice, or an enum) may have more.",
            param=param,
        )
    return _checked({"lark_grammar": UNFORCED + lark}, param)


MOST_ALTERNATIVES = 2000
"""llguidance gives up where more than so many may come next."""
_MARKS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|^[ \t]*[?!]*(?P<rule>[A-Za-z_]\w*)[^\n:|"/]*:|[()|]',
    re.MULTILINE,
)


def most_alternatives(lark: str) -> int:
    """The most alternatives that a rule of a Lark grammar, or a group in one, has.

    Those of a terminal, whose name is in capitals, do not count: they become one expression.
    """
    most, counts = 0, [0]
    for mark in _MARKS.finditer(lark):
        match mark.group():
            case "(":
                counts.append(0)
            case ")":
                counts = counts[:-1] or [0]
            case "|":
                counts[-1] += 1
                most = max(most, counts[-1])
            case _ if (rule := mark.group("rule")) is not None:
                counts = [-len(lark) if rule.isupper() else 0]
    return most + 1


def _checked(entry: Entry, param: str) -> Entry:
    problem = problem_of(single(entry))
    if problem is not None:
        reason = " ".join(problem.split())
        raise BadRequest(f"'{param}' cannot be enforced: {reason[:300]}.", param=param)
    return entry
