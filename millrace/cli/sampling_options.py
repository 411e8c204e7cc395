"""Options of `serve` for requests that say nothing of how tokens are drawn."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[
    float | None,
    typer.Option(help="Where a request has none; the model's own if not given. So do these:"),
]
TopP = Annotated[float | None, typer.Option(help="Share of the probability kept.")]
TopK = Annotated[int | None, typer.Option(help="Tokens kept; 0 keeps all.")]
MinP = Annotated[
    float | None, typer.Option(help="Least share of the likeliest token's probability.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divides the logits of what the context has.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken from the logits of what was said.")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same for each time it was said.")]
LoopGuard = Annotated[
    bool | None,
    typer.Option(
        help="End an answer once more than 256 of its tokens repeat with a period of at most 64; off if "
        "not given. Requests say otherwise with loop_guard."
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens of an answer; what the window leaves if not given.")
]
