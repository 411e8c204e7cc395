"""What the fields of wire types mean: the docstring below a field, else what its name means everywhere."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import msgspec.inspect

EVERYWHERE = {
    "model": "The name of a model, or one of its aliases; may be left out where one was named.",
    "messages": "The conversation so far.",
    "prompt": "The text to go on with.",
    "input": "What is asked.",
    "stream": "Whether the answer comes piece by piece, as it is made.",
    "stream_options": "What a stream tells beside the answer.",
    "temperature": "How freely tokens are drawn; 0 takes the likeliest one.",
    "top_p": "Only the likeliest tokens are drawn that make up this share.",
    "top_k": "Only so many of the likeliest tokens are drawn.",
    "min_p": "Only tokens at least this likely, beside the likeliest, are drawn.",
    "typical_p": "Only tokens about as surprising as expected are drawn, that make up this share.",
    "xtc_probability": "How often the likeliest tokens are left out where several would do.",
    "xtc_threshold": "How likely a token must be for that.",
    "max_tokens": "The most tokens of the answer; what the window leaves if left out.",
    "max_completion_tokens": "The most tokens of the answer; what the window leaves if left out.",
    "max_output_tokens": "The most tokens of the answer; what the window leaves if left out.",
    "min_tokens": "The answer does not end before so many tokens.",
    "repetition_penalty": "Above 1, tokens of the context become less likely.",
    "presence_penalty": "Above 0, tokens that the answer has become less likely.",
    "frequency_penalty": "The same for every time that it has them.",
    "logit_bias": "Token ids, and how much likelier or less likely they are made.",
    "bad_words": "Words that are never said.",
    "seed": "The same seed draws the same tokens.",
    "stop": "Texts that end the answer.",
    "stop_sequences": "Texts that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Whether the answer goes on where the model would end it.",
    "n": "How many answers are made.",
    "best_of": "How many are made, of which the best are given.",
    "logprobs": "Whether, or for how many tokens, log probabilities are given.",
    "top_logprobs": "For how many of the likeliest tokens at each place.",
    "echo": "Whether the prompt comes before the answer.",
    "tools": "What the model may call.",
    "tool_choice": "Whether it must, may or must not call, or which.",
    "parallel_tool_calls": "Whether it may make several calls at once.",
    "response_format": "The form of the answer: text, JSON, or JSON of a schema.",
    "format": "The form of the answer: JSON, or JSON of a schema.",
    "regex": "A regular expression that the answer fits.",
    "grammar": "A grammar that the answer fits.",
    "ebnf": "A grammar that the answer fits.",
    "json_schema": "A schema that the answer fits.",
    "structured_outputs": "The form of the answer, as vLLM spells it.",
    "enable_thinking": "Whether the model thinks first, where it can.",
    "think": "Whether the model thinks first, where it can.",
    "thinking_token_budget": "The most tokens of a thought.",
    "reasoning_effort": "How hard the model thinks, where its template knows that.",
    "chat_template_kwargs": "Further arguments of the model's template.",
    "system": "What the model is told before the conversation.",
    "instructions": "What the model is told before the conversation.",
    "keep_alive": "How long the model stays loaded after this: seconds, or a time like 5m.",
    "ttl": "How long the model stays loaded after this: seconds, or a time like 5m.",
    "dimensions": "How many numbers a vector has, for models that may be cut.",
    "encoding_format": "Numbers as a list, or packed in base64.",
    "query": "What is looked for.",
    "documents": "The texts that are ranked.",
    "top_n": "How many of the best are given.",
    "previous_response_id": "The stored response that this goes on from.",
    "store": "Whether the response is kept for later ones to go on from.",
    "lora_path": "An adapter's folder on the server's machine.",
}


def annotate(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Write what is known of each field into the schemas of these types and of all they hold."""
    by_name = {name: cls for cls in _structs(types) for name in (cls.__name__, _qualified(cls))}
    for name, schema in components.items():
        notes = field_notes(by_name[name]) if name in by_name else {}
        for field, described in schema.get("properties", {}).items():
            if "description" not in described and (
                text := notes.get(field) or EVERYWHERE.get(field)
            ):
                described["description"] = text


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _structs(types: Iterable[Any]) -> Iterator[type]:
    left, seen = list(msgspec.inspect.multi_type_info(list(types))), set[int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, msgspec.inspect.StructType):
            yield found.cls
            left += [field.type for field in found.fields]
        for name in ("item_type", "key_type", "value_type", "type"):
            if isinstance(inner := getattr(found, name, None), msgspec.inspect.Type):
                left.append(inner)
        for name in ("types", "item_types"):
            left += getattr(found, name, ())


@functools.cache
def field_notes(cls: type) -> dict[str, str]:
    """The texts below a class's fields, those of its bases included."""
    notes: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("millrace."):
            notes |= _own_notes(base)
    return notes


def _own_notes(cls: type) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return {}  # without its source a program runs as well, and only says less
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
