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
    "loop_guard": "Whether the answer ends once more than 256 of its tokens repeat with a period of at "
    "most 64.",
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
    "abort_all": "Whether all that is under way ends.",
    "add_generation_prompt": "Whether the template ends with the beginning of an answer.",
    "background": "Whether the response is made while nobody waits, to be asked for later by its id.",
    "cache_salt": "Requests share kept state only where they have the same.",
    "container": "Accepted; there are no containers here.",
    "context": "What an earlier answer gave as `context`: the conversation in tokens.",
    "context_management": "What of earlier turns is left out, as thoughts are.",
    "continue_final_message": "Whether the answer goes on with the last message.",
    "conversation": "The stored conversation that this is a part of.",
    "conversations": "Lists of messages to be run ahead, each with its template.",
    "extra_key": "Requests share kept state only where they have the same.",
    "function_call": "The older `tool_choice`.",
    "guided_choice": "Texts of which the answer is one.",
    "guided_grammar": "A grammar that the answer fits.",
    "guided_json": "A schema that the answer fits.",
    "guided_regex": "A regular expression that the answer fits.",
    "include": "What the response tells beside its text.",
    "include_stop_str_in_output": "Whether the text that ended the answer is a part of it.",
    "input_ids": "The prompt in tokens, or several.",
    "input_type": "query or document: which of the model's prompts is put before each text.",
    "inputs": "The texts.",
    "insecure": "Accepted; models are fetched over HTTPS whatever it says.",
    "instruction": "What the model is told to judge by, where it can be told.",
    "items": "What the conversation begins with, or gets.",
    "logprob_start_len": "The prompt token from which log probabilities are given; -1 for none.",
    "lora_name": "An adapter's name.",
    "max_tokens_per_doc": "Tokens to which each document is cut.",
    "metadata": "Labels of the caller's own, kept with what is stored.",
    "normalize": "Whether vectors are made of length 1.",
    "options": "Sampling and length, as Ollama names them.",
    "output_config": "The form of the answer, and how hard the model thinks.",
    "priority": "Higher ones are run first.",
    "prompt_cache_key": "A hint for where state is kept; accepted.",
    "prompt_logprobs": "For how many of the likeliest tokens at each place of the prompt.",
    "prompt_name": "Which of the model's own prompts is put before each text.",
    "prompts": "Texts to be run ahead.",
    "raw": "Whether the prompt is taken as it is, without the template.",
    "raw_scores": "Whether scores are given as the model makes them, before they become probabilities.",
    "reasoning": "How hard the model thinks, and whether its thoughts are told.",
    "return_documents": "Whether the documents are given with their scores.",
    "return_logprob": "Whether log probabilities are given.",
    "return_text": "Whether the texts are given with their scores.",
    "return_text_in_logprobs": "Whether tokens are given as texts, too.",
    "return_token_strs": "Whether tokens are given as texts, too.",
    "rid": "An id of the caller's own.",
    "safety_identifier": "A label; accepted.",
    "sampling_params": "How tokens are drawn, and when the answer ends.",
    "skip_special_tokens": "Whether tokens that are no text are left out of it.",
    "specprefill": "Whether a draft model chooses what of a long prompt is run.",
    "specprefill_keep_pct": "How much of the prompt stays then.",
    "text_1": "A text, or several, held against the second.",
    "text_2": "A text, or several.",
    "texts": "The texts that are ranked, as TEI names them.",
    "thinking": "Whether the model thinks first, and for how many tokens at most.",
    "tokens": "Token ids.",
    "top_logprobs_num": "For how many of the likeliest tokens at each place.",
    "truncate": "Whether what is too long is cut, and not refused.",
    "truncate_prompt_tokens": "Tokens to which inputs are cut; -1 is as many as the model takes.",
    "truncation": "`auto` leaves the oldest items of a conversation out that is too long.",
    "truncation_direction": "The side that is cut.",
    "use_activation": "Whether scores become probabilities.",
    "user": "A label; accepted.",
    "verbosity": "How much the model says, where its template knows that.",
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
