"""What a protocol adapter makes of a wire request: everything in tokens and plain values.

`fit` is the last look at one before it becomes a message to the engine: whatever the adapter let
through, all its numbers are in range after it, and all its token ids have logits.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millrace.errors import BadRequest
from millrace.protocol import LazyGrammar, Sampling, Span, Thinking
from millrace.serving.adapters import ServedAdapter
from millrace.serving.ranges import (
    LEAST_SEED,
    MOST_SEED,
    Bias,
    Choices,
    Count,
    Positive,
    Priority,
    RepetitionPenalty,
    Share,
    Temperature,
    Timeout,
    TopK,
    Unit,
    WidePenalty,
    WideTop,
)
from millrace.text.conversation import Conversation

_SEED_BITS = (1 << 64) - 1


class Request(msgspec.Struct, kw_only=True):
    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    """None takes what the context window leaves."""
    default_tokens: int | None = None
    """The endpoint's own `max_tokens` of requests that set none."""
    window: int | None = None
    """A window smaller than the model's own, prompt and answer together."""
    only_prompt: bool = False
    """Nothing is to be made: the prompt is scored."""
    stop_token_ids: list[int] = []
    end_token_ids: list[int] = []
    """Further ends of this answer, that mean what the model's own end tokens mean."""
    stops: list[str] = []
    include_stop: bool = False
    stop_in_reasoning: bool = False
    chat: Conversation | None = None
    """The conversation that the prompt was made from; None for a raw prompt."""
    prompt_text: str = ""
    grammar: str | None = None
    lazy_grammar: LazyGrammar | None = None
    thinking: Thinking | None = None
    ignore_eos: bool = False
    loop_guard: bool = False
    """Whether an answer that repeats itself ends (millrace.text.loops)."""
    logprobs: int | None = None
    """How many alternatives beside each token's own logprob; None asks for none."""
    prompt_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None
    """Seconds until the request ends with an error, finished or not."""
    endpoint: str = ""
    """Where it came from, for the metrics."""
    caller: str = ""
    """The id of the key that it came with; empty on a server without keys."""
    skip_special_tokens: bool = True
    cache_salt: str = ""
    """Requests share cached state only with those of the same salt."""
    boundaries: list[int] = []
    """Lengths of the prompt at which a message ends."""
    stripped: int = 0
    """Lines of the conversation that were left out of the prompt."""
    media: list[Span] = []
    """Where the prompt's pictures stand."""
    pictures: dict[str, Any] = {}
    """Those pictures by their digests (millrace.serving.pictures.HeldPicture)."""
    specprefill: bool | None = None
    """Whether a draft chooses what of the prompt runs; None leaves it to the server."""
    specprefill_keep_pct: float | None = None
    """The share that stays; None takes the server's."""
    head: int = 0
    """Tokens up to the end of the system prompt and the tools, which are never left out."""
    tail: int | None = None
    """Where the last message begins, which is never left out either."""
    adapter: ServedAdapter | None = None
    """What it runs with; None is what its model does."""


class SamplingRanges(msgspec.Struct, kw_only=True):
    """What each field of Sampling may be."""

    temperature: Temperature = 1.0
    top_p: Share = 1.0
    top_k: TopK = 0
    min_p: Unit = 0.0
    typical_p: Share = 1.0
    xtc_probability: Unit = 0.0
    xtc_threshold: Unit = 0.1
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: WidePenalty = 0.0
    frequency_penalty: WidePenalty = 0.0
    logit_bias: dict[int, Bias] = {}
    min_tokens: Count = 0


def in_range(name: str, value: object) -> bool:
    """Whether a field of Sampling may have this value."""
    try:
        msgspec.convert({name: value}, SamplingRanges)
    except msgspec.ValidationError:
        return False
    return value is not None


class _Ranges(SamplingRanges, kw_only=True):
    n: Choices
    max_tokens: Positive | None
    priority: Priority
    logprobs: WideTop | None
    prompt_logprobs: WideTop | None
    timeout: Timeout | None
    loop_guard: bool
    specprefill: bool | None
    specprefill_keep_pct: Share | None


_PLAIN = (
    *("n", "max_tokens", "priority", "logprobs", "prompt_logprobs", "timeout"),
    *("loop_guard", "specprefill", "specprefill_keep_pct"),
)


def seed_of(value: int | None) -> int | None:
    """A client's seed as the engine's; every number of 64 bits is one."""
    whole = isinstance(value, int) and LEAST_SEED <= value <= MOST_SEED
    if value is not None and not whole:
        raise BadRequest("seed must be a whole number of 64 bits.", param="seed")
    return None if value is None else value & _SEED_BITS


def fit(request: Request, width: int, room: int) -> None:
    """Refuse what is out of range, and bring down to what there is what asks for more.

    `width` is the number of the model's logits, `room` how many tokens the answer may have.
    """
    sampling = request.sampling
    asked = msgspec.structs.asdict(sampling)
    asked |= {name: getattr(request, name) for name in _PLAIN}
    try:
        msgspec.convert(asked, _Ranges)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        name = where.strip("`$.").partition("[")[0]
        raise BadRequest(f"{name}: {message}.", param=name) from error
    check_tokens("prompt", request.prompt, width)
    check_tokens("stop_token_ids", request.stop_token_ids, width)
    check_tokens("logit_bias", list(sampling.logit_bias), width)
    for word in sampling.bad_words:
        check_tokens("bad_words", word, width)
    if request.thinking is not None:
        check_tokens("thinking", request.thinking.ending, width)
        budget = max(0, min(request.thinking.budget, room))
        request.thinking = msgspec.structs.replace(request.thinking, budget=budget)
    request.seed = seed_of(request.seed)
    request.sampling = msgspec.structs.replace(
        sampling,
        top_k=sampling.top_k if 0 < sampling.top_k < width else 0,
        min_tokens=min(sampling.min_tokens, room),
    )


def check_tokens(name: str, ids: list[int], width: int) -> None:
    """Refuse what is no token of a model with that many logits."""
    try:
        msgspec.convert(ids, list[Annotated[int, Meta(ge=0, le=width - 1)]])  # type: ignore[misc]
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{name} holds what is no token of this model: its ids are 0 to {width - 1}.",
            param=name,
        ) from error
