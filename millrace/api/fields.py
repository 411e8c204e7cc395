"""Fields that several protocols have in common, and the names of all that would change an answer.

A field that changes the answer is honoured where an endpoint's type has it, and refused by name
everywhere else; what is in neither is unknown, and named in the response's header.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from millrace.errors import BadRequest, Unsupported
from millrace.serving.ranges import Count
from millrace.text.dialect import Dialect
from millrace.text.grammar import Demand, demand_of


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's way to demand a form: exactly one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    """Accepted: there is nothing here to fall back to."""


class FormFields(msgspec.Struct, kw_only=True):
    """The form that the answer must have, in the words of every server that has a way to say it."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


def demanded(wire: FormFields) -> Demand | None:
    """The form that the answer must have, from whichever field asks for one."""
    fields = {name: getattr(wire, name) for name in FormFields.__struct_fields__}
    if wire.structured_outputs is not None:
        fields["structured_outputs"] = _structured(wire.structured_outputs)
    return demand_of(fields)


def _structured(wire: StructuredOutputs) -> dict[str, Any]:
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(wire, name) not in (None, False):
            param = f"structured_outputs.{name}"
            raise Unsupported(f"'{param}' is not supported by this server.", param=param)
    return {k: v for k, v in msgspec.structs.asdict(wire).items() if v not in (None, False)}


class ThinkingWish(msgspec.Struct):
    """Whether the model is to think, as several hosted models' own APIs have it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


_IN_TEMPLATES = ("enable_thinking", "thinking")
"""What templates call their switch."""


class ThinkingFields(Protocol):
    """How the model is told to think, in the words of every server that has a way to say it."""

    enable_thinking: bool | None
    thinking: ThinkingWish | None
    thinking_token_budget: int | None
    chat_template_kwargs: dict[str, Any] | None


class Thinking(NamedTuple):
    wanted: bool | None
    budget: int | None


def thinking_of(wire: ThinkingFields) -> Thinking:
    """What the fields say together."""
    asked: dict[str, bool] = {}
    if wire.enable_thinking is not None:
        asked["enable_thinking"] = wire.enable_thinking
    if wire.thinking is not None:
        asked["thinking"] = wire.thinking.type != "disabled"
    if (switch := template_switch(wire.chat_template_kwargs or {})) is not None:
        asked["chat_template_kwargs"] = switch
    if len(set(asked.values())) > 1:
        names = " and ".join(f"'{name}'" for name in asked)
        raise BadRequest(f"{names} contradict each other.", param=next(iter(asked)))
    budgets = {wire.thinking_token_budget, wire.thinking.budget_tokens if wire.thinking else None}
    budgets.discard(None)
    if len(budgets) > 1:
        raise BadRequest(
            "'thinking.budget_tokens' and 'thinking_token_budget' contradict each other.",
            param="thinking.budget_tokens",
        )
    return Thinking(next(iter(asked.values()), None), next(iter(budgets), None))


def template_switch(arguments: Mapping[str, Any]) -> bool | None:
    """What template arguments say of thinking, under either of the names that templates have."""
    found = {v for n in _IN_TEMPLATES if isinstance(v := arguments.get(n), bool)}
    if len(found) > 1:
        raise BadRequest(
            "'enable_thinking' and 'thinking' contradict each other.", param="chat_template_kwargs"
        )
    return next(iter(found), None)


def strange_arguments(arguments: Mapping[str, Any], dialect: Dialect) -> list[str]:
    """Template arguments without an effect: those that neither the template nor we read."""
    switches = {n for n in _IN_TEMPLATES if isinstance(arguments.get(n), bool)}
    unread = dialect.unknown_arguments(n for n in arguments if n not in switches)
    return [f"chat_template_kwargs.{name}" for name in unread]


_NOTHING: tuple[Any, ...] = (False, [], {}, "")
_CHANGES_THE_ANSWER: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *FormFields.__struct_fields__,
        *("format", "guided_whitespace_pattern", "structural_tag", "stop_regex"),
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "sampling_seed"),
        *("xtc_probability", "xtc_threshold", "logit_bias", "bad_words", "allowed_token_ids"),
        *("repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty"),
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
        *("num_predict", "n_predict", "num_ctx", "min_tokens", "min_new_tokens", "ignore_eos"),
        *("stop", "stop_sequences", "stop_token_ids", "stop_in_reasoning"),
        *("include_stop_str_in_output", "no_stop_trim", "skip_special_tokens"),
        *("thinking", "enable_thinking", "think", "reasoning", "reasoning_effort"),
        *("thinking_token_budget", "chat_template_kwargs", "chat_template", "documents"),
        *("add_generation_prompt", "continue_final_message"),
        *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
        *("echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("logits_processors", "custom_logit_processor", "truncate_prompt_tokens", "lora_path"),
    ),
    _NOTHING,
) | {
    "n": (1,),
    "best_of": (1,),
    "enable_thinking": (),
    "think": (),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "dynatemp_range": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (-1,),
}
"""Every name that some server has for such a field, with the values that ask for nothing."""


def foreign(honoured: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """What an endpoint that honours just these fields must refuse."""
    return {name: v for name, v in _CHANGES_THE_ANSWER.items() if name not in honoured}
