"""Options of `serve` for the sampling of requests that set none."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature of requests that set none; the model's own if not given, as with the "
        "options below."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens that have this share of the probability."),
]
TopK = Annotated[
    int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Keep tokens with at least this share of the likeliest token's probability."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divide the logits of tokens that the context has by this.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Subtract this from the logits of tokens that the answer has.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Subtract this for each time that the answer has a token.")
]
LoopGuard = Annotated[
    bool | None,
    typer.Option(
        help="End an answer once more than 256 of its tokens repeat with a period of at most 64; off if "
        "not given. Requests say otherwise with loop_guard."
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="The most tokens of an answer; what the window leaves if not given."),
]
