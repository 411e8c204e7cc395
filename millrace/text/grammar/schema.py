"""JSON schemas on their way to llguidance: bounded blanks, and refusals that name the keyword.

A schema is either enforced in full or refused; nothing in it is silently dropped but annotations
(an unknown `format` is one, by the standard). Common names of types outside the standard, such as
`float` or `dict`, count as the type they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from millrace.engine.matching import GrammarFault, guarded
from millrace.errors import BadRequest
from millrace.text import embedded
from millrace.text.formats.type_names import standardised
from millrace.text.grammar.exclusive import without_exclusive_one_of
from millrace.text.grammar.lark import refuse_long, single

BLANKS = r"[ \n]?"
"""Between two tokens of JSON: with room for more, small models write blanks instead of going on."""
NO_BLANKS = ""

_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")


def enforceable(schema: Any, param: str, blanks: str = BLANKS) -> Any:
    """The schema ready for the grammar compiler, or a BadRequest that says what stands in the way."""
    if isinstance(schema, str):
        try:
            schema = embedded.read(schema)
        except ValueError as error:
            raise BadRequest(f"'{param}' is not valid JSON: {error}.", param=param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"'{param}' must be a JSON schema, an object.", param=param)
    refuse_long(len(json.dumps(schema)), param)
    ready: dict[str, Any] = {
        **without_exclusive_one_of(standardised(schema)),
        "x-guidance": {"whitespace_pattern": blanks},
    }
    for _ in range(16):
        problem = problem_of(single({"json_schema": ready}))
        if problem is None:
            return ready
        unknown = _UNKNOWN_FORMAT.search(problem)
        if unknown is None:
            raise BadRequest(_explain(problem, param), param=param)
        ready = _without_format(ready, unknown.group(1))
    raise BadRequest(f"The schema in '{param}' has too many unknown formats.", param=param)


def problem_of(grammar: str, tokenizer: Any = None) -> str | None:
    """What llguidance has against a grammar; None when it can be enforced."""
    try:
        failed, messages = guarded(
            lambda: LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        )
    except GrammarFault as fault:
        return str(fault)
    return str(messages[0]) if failed else None


def _explain(problem: str, param: str) -> str:
    unimplemented = _KEYS.search(problem)
    if unimplemented is not None:
        keys = ", ".join(f"'{key}'" for key in json.loads(unimplemented.group(1)))
        return (
            f"The schema in '{param}' uses {keys}, which cannot be enforced here. Remove it, or "
            "say the same with other keywords."
        )
    if "oneOf" in problem:
        return (
            f"The schema in '{param}' uses 'oneOf' with alternatives that overlap, which cannot be "
            "enforced. Use 'anyOf', or make the alternatives exclude each other."
        )
    if "regex" in problem:
        reason = problem.strip().splitlines()[-1]
        return f"A 'pattern' of the schema in '{param}' cannot be enforced: {reason}."
    if "Pointer" in problem or "Resource" in problem:
        return f"A '$ref' of the schema in '{param}' cannot be resolved: {problem.strip()}."
    return f"The schema in '{param}' cannot be enforced: {problem.strip().splitlines()[0]}."


def _without_format(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_format(item, name)
            for key, item in value.items()
            if not (key == "format" and item == name)
        }
    if isinstance(value, list):
        return [_without_format(item, name) for item in value]
    return value


def closed(schema: Any) -> Any:
    """Tool parameters with no room for arguments nobody declared."""
    if not isinstance(schema, Mapping) or not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    found: dict[str, Any] = {"type": "object", **schema}
    if "properties" in found or set(found) <= {"type", "required", "description", "title"}:
        found.setdefault("additionalProperties", False)
        found.setdefault("properties", {})
    return found
