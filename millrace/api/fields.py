"""The names of all fields that would change an answer, whichever server has them.

A field that changes the answer is honoured where an endpoint's type has it, and refused by name
everywhere else; what is in neither is unknown, and named in the response's header.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from millrace.serving.forms import FormFields

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
        *("loop_guard",),
        *("stop", "stop_sequences", "stop_token_ids", "stop_in_reasoning"),
        *("include_stop_str_in_output", "no_stop_trim", "skip_special_tokens"),
        *("thinking", "enable_thinking", "think", "reasoning", "reasoning_effort"),
        *("thinking_token_budget", "chat_template_kwargs", "chat_template", "documents"),
        *("add_generation_prompt", "continue_final_message"),
        *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
        *("echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("logits_processors", "custom_logit_processor", "truncate_prompt_tokens", "lora_path"),
        *("specprefill", "specprefill_keep_pct"),
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
