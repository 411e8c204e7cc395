"""What a request may demand of its answer's form, whichever protocol's words it uses.

Each demand becomes one llguidance grammar: response_format, the guided_* family, SGLang's
json_schema, regex and ebnf, and GBNF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from millrace.errors import BadRequest
from millrace.text.grammar.lark import Entry, pattern, quoted, single
from millrace.text.grammar.schema import enforceable, problem_of


def from_response_format(value: Any) -> Entry | None:
    """The OpenAI field, in its chat and its Responses spelling; None for plain text."""
    param = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadRequest(f"'{param}' must be an object with a type.", param=param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return from_schema(schema, param) if schema is not None else json_object()
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None:
            raise BadRequest(f"'{param}.json_schema' has no schema.", param=f"{param}.json_schema")
        return from_schema(schema, f"{param}.json_schema")
    if kind in ("regex", "grammar", "ebnf", "gbnf"):
        text = value.get("pattern") or value.get("grammar") or value.get("value")
        return from_regex(text, param) if kind == "regex" else from_grammar(text, param)
    raise BadRequest(
        f"'{param}.type' is {kind!r}; it must be text, json_object or json_schema.", param=param
    )


def json_object() -> Entry:
    return from_schema({"type": "object"}, "response_format")


def from_schema(schema: Any, param: str) -> Entry:
    return {"json_schema": enforceable(schema, param)}


def from_regex(regex: Any, param: str) -> Entry:
    if not isinstance(regex, str) or not regex:
        raise BadRequest(f"'{param}' must be a regular expression.", param=param)
    return _checked({"lark_grammar": f"start: {pattern(regex)}\n"}, param)


def from_choice(choices: Any, param: str) -> Entry:
    if (
        not isinstance(choices, Sequence)
        or isinstance(choices, str)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise BadRequest(f"'{param}' must be a list of non-empty strings.", param=param)
    return _checked({"lark_grammar": "start: " + " | ".join(map(quoted, choices)) + "\n"}, param)


def from_grammar(text: Any, param: str) -> Entry:
    """Lark, EBNF or GBNF: the last two are told by their `::=` and translated."""
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"'{param}' must be the text of a grammar.", param=param)
    try:
        lark = any_to_lark(text)
    except Exception as error:
        raise BadRequest(f"'{param}' is not a grammar: {error}.", param=param) from error
    return _checked({"lark_grammar": lark}, param)


def _checked(entry: Entry, param: str) -> Entry:
    problem = problem_of(single(entry))
    if problem is not None:
        reason = " ".join(problem.split())
        raise BadRequest(f"'{param}' cannot be enforced: {reason[:300]}.", param=param)
    return entry


_GUIDED = {
    "guided_json": from_schema,
    "guided_regex": from_regex,
    "guided_choice": from_choice,
    "guided_grammar": from_grammar,
    "json_schema": from_schema,
    "regex": from_regex,
    "ebnf": from_grammar,
    "grammar": from_grammar,
}


def from_fields(fields: Mapping[str, Any]) -> Entry | None:
    """The one demand among a request's fields; two of them would contradict each other."""
    found = [name for name in _GUIDED if fields.get(name) is not None]
    if fields.get("response_format") is not None:
        entry = from_response_format(fields["response_format"])
        if entry is not None and not found:
            return entry
        found += ["response_format"] if entry is not None else []
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in sorted(found))
        raise BadRequest(f"Give only one of {names}.", param=found[0])
    return _GUIDED[found[0]](fields[found[0]], found[0]) if found else None
