"""The ranges of all numbers that requests bring, decided once for every protocol.

Wire types are built from these, so that a fault is told in the protocol's own words and place, and
`/openapi.json` says what is allowed. A protocol may ask for less, never for more.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

MOST = 2**63 - 1
"""Where a number means "as much as there is", everything up to this does."""

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
"""A part of the probability; nothing at all would leave no token."""
TopK = Annotated[int, Meta(ge=-1, le=MOST)]
"""0 and -1 keep all, as does anything above the vocabulary."""
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
WidePenalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Held to the model's own width once it is known."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Top = Annotated[int, Meta(ge=0, le=20)]
WideTop = Annotated[int, Meta(ge=0, le=100)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Timeout = Annotated[float, Meta(gt=0.0, le=1e9)]
"""Seconds."""
Salt = Annotated[str, Meta(max_length=1024)]
StopText = Annotated[str, Meta(max_length=4096)]
Biases = Annotated[dict[str, Bias], Meta(max_length=65_536)]
TokenIds = Annotated[list[TokenId], Meta(max_length=4096)]
"""Token ids of a field that means each of them by itself, as stops; prompts may have more."""
Labels = Annotated[dict[str, Any], Meta(max_length=1024)]
"""Names and values of the client's own, as of a template or of metadata."""
BadWords = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=1024)]

LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
"""Any 64 bits, with a sign or without."""
