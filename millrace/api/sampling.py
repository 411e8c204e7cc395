"""The fields of OpenAI's and Anthropic's protocols that say how an answer is drawn, ended and scheduled:
our own words beside theirs, declared once.
"""

from __future__ import annotations

from millrace.serving.forms import FormFields
from millrace.serving.ranges import (
    BadWords,
    Bias,
    Count,
    Penalty,
    Priority,
    RepetitionPenalty,
    Salt,
    Share,
    Timeout,
    TokenId,
    TopK,
    Unit,
)


class AnswerFields(FormFields, kw_only=True):
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    typical_p: Share | None = None
    xtc_probability: Unit | None = None
    xtc_threshold: Unit | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    bad_words: BadWords | None = None
    min_tokens: Count | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_in_reasoning: bool | None = None
    """Whether stop strings end the answer inside a thought too."""
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    """Higher goes first."""
    timeout: Timeout | None = None
    """Seconds until the request ends with an error."""
    cache_salt: Salt | None = None
    """Cached state is shared only with requests of the same salt."""
