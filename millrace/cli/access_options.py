"""Options that say who may ask the server, how much, and under which names."""

from __future__ import annotations

from typing import Annotated

import typer

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="MILLRACE_API_KEY",
        help="A key that requests must bring; may be repeated. Without any, all are let in.",
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(help="A file of such keys, one a line: KEY or NAME:KEY, # for comments."),
]
RateRequests = Annotated[
    int | None,
    typer.Option(
        help="Requests per minute for each key, or each address without keys; each prompt of a list is one."
    ),
]
RateTokens = Annotated[
    int | None, typer.Option(help="Tokens per minute, prompt and answer, in the same way.")
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(help="A web site whose pages may use this server, or *; may be repeated."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="A name under which this server may be asked, as a proxy's, or *; may be repeated. Without "
        "any, a server without keys that only this machine reaches answers under this machine's alone."
    ),
]
