"""The wire types of SGLang's /generate, and the line between honoured, refused and advisory fields."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from millrace.api.fields import foreign
from millrace.api.sampling import OwnFields
from millrace.serving.ranges import (
    MOST,
    BadWords,
    Biases,
    Choices,
    Count,
    Penalty,
    Priority,
    RepetitionPenalty,
    Salt,
    Share,
    StopText,
    Temperature,
    Timeout,
    TokenId,
    TokenIds,
    TopK,
    Unit,
    WideTop,
)

DEFAULT_TOKENS = 128
"""SGLang's own default."""
Start = Annotated[int, Meta(ge=-1, le=MOST)]


class SamplingParams(OwnFields, kw_only=True):
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    bad_words: BadWords | None = None
    max_new_tokens: Count | None = DEFAULT_TOKENS
    """With null, what the context window leaves."""
    min_new_tokens: Count | None = None
    stop: StopText | list[StopText] | None = None
    stop_token_ids: TokenIds | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    n: Choices | None = None
    sampling_seed: int | None = None


class GenerateRequest(OwnFields, kw_only=True):
    """Where a batch takes a list, one value stands for all of its prompts."""

    model: str | None = None
    ttl: float | str | None = None
    """How long the model is to stay loaded after this, as LM Studio has it; below 0 for ever."""
    text: str | list[str] | None = None
    """The text to go on with, or several."""
    input_ids: list[TokenId | list[TokenId]] | None = None
    image_data: str | list[str | list[str]] | None = None
    """Pictures, as data URIs, addresses or base64: of the prompt, or a list for each of a batch."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: WideTop | list[WideTop] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    """Seconds until the request ends with an error, all prompts of a batch."""
    cache_salt: Salt | list[Salt] | None = None
    extra_key: Salt | list[Salt] | None = None
    lora_path: str | list[str | None] | None = None
    """The name of an adapter that is loaded for the model."""


REFUSED: dict[str, tuple[Any, ...]] = {
    "input_embeds": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_indexer_topk": (False,),
    "return_sampling_mask": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_bytes": (False,),
    "background": (False,),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    "session_params": ({},),
    "lora_id": ("",),
    "custom_logit_processor": ("",),
    "positional_embed_overrides": (),
    "multi_item_delimiter_indices": ([],),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}

ADVISORY_SAMPLING = frozenset({"spaces_between_special_tokens", "stream_interval"})

REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = foreign(SamplingParams.__struct_fields__) | {
    "structural_tag": ("",),
    "custom_params": ({},),
    "beam_width": (0, 1),
}

ADVISORY = frozenset(
    {
        "session_id",
        "conversation_id",
        "routing_key",
        "routed_dp_rank",
        "data_parallel_rank",
        "modalities",
        "log_metrics",
        "no_logs",
        "custom_labels",
        "external_trace_header",
        "received_time",
    }
)
"""Fields that only label or advise: accepted, whatever they say."""

KNOWN_SAMPLING = (
    frozenset(SamplingParams.__struct_fields__) | ADVISORY_SAMPLING | frozenset(REFUSED_SAMPLING)
)
