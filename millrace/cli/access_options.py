"""Options that say who may ask the server, how much, and under which names."""

from __future__ import annotations

from typing import Annotated

import typer

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="MILLRACE_API_KEY",
        help="A key that requests must bring, with the role use; may be repeated. Without any key, all "
        "are let in and may do everything.",
    ),
]
AdminKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="MILLRACE_ADMIN_KEY",
        help="A key with the role admin: it also loads, unloads, pulls and deletes models, empties the "
        "cache, and sees all requests and the log; may be repeated.",
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        help="A file of such keys, one a line: KEY, NAME:KEY or NAME\\[admin]:KEY, # for comments."
    ),
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
AddressConnections = Annotated[
    int | None,
    typer.Option(
        help="Connections that one client address may have open; more are refused with a 429. Half of "
        "the limit of open files if not given, 0 for none: behind a proxy, all clients have its address."
    ),
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
