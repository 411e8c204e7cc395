"""The fields of OpenAI's and Anthropic's protocols that say how an answer is drawn, ended and scheduled:
our own words beside theirs, declared once.
"""

from __future__ import annotations

import msgspec

from millrace.serving.forms import FormFields
from millrace.serving.ranges import (
    BadWords,
    Biases,
    Count,
    Penalty,
    Priority,
    RepetitionPenalty,
    Salt,
    Share,
    Timeout,
    TokenIds,
    TopK,
    Unit,
)
from millrace.serving.request import Request


class OwnFields(msgspec.Struct, kw_only=True):
    """Fields of this server's own, for protocols whose sampling fields are in an object of the body.

    They are accepted in that object and in the body itself.
    """

    loop_guard: bool | None = None
    specprefill: bool | None = None
    specprefill_keep_pct: Share | None = None

    def apply(self, request: Request) -> None:
        """Set the fields of the body itself, which win over those of the object."""
        if self.loop_guard is not None:
            request.loop_guard = self.loop_guard
        if self.specprefill is not None:
            request.specprefill = self.specprefill
        if self.specprefill_keep_pct is not None:
            request.specprefill_keep_pct = self.specprefill_keep_pct


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
    logit_bias: Biases | None = None
    bad_words: BadWords | None = None
    min_tokens: Count | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    loop_guard: bool | None = None
    """Whether the answer ends once it repeats itself."""
    stop_token_ids: TokenIds | None = None
    stop_in_reasoning: bool | None = None
    """Whether stop strings end the answer inside a thought too."""
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    """Higher goes first."""
    timeout: Timeout | None = None
    """Seconds until the request ends with an error."""
    cache_salt: Salt | None = None
    """Cached state is shared only with requests of the same salt."""
    specprefill: bool | None = None
    """Whether a draft chooses what of a long prompt is run."""
    specprefill_keep_pct: Share | None = None
    """The share of it that stays: 0.3 is 30 %."""
