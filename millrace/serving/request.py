"""What a protocol adapter makes of a wire request: everything in tokens and plain values."""

from __future__ import annotations

import msgspec

from millrace.protocol import LazyGrammar, Sampling, Thinking
from millrace.text.dialect import Conversation


class Request(msgspec.Struct, kw_only=True):
    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    """None takes what the context window leaves."""
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
    logprobs: int | None = None
    """How many alternatives beside each token's own logprob; None asks for none."""
    prompt_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None
    """Seconds until the request ends with an error, finished or not."""
    endpoint: str = ""
    """Where it came from, for the metrics."""
    skip_special_tokens: bool = True
    cache_salt: str = ""
    """Requests share cached state only with those of the same salt."""
    boundaries: list[int] = []
    """Lengths of the prompt at which a message ends."""
    stripped: int = 0
    """Lines of the conversation that were left out of the prompt."""
