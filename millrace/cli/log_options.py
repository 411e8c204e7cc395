"""The options that say what a server tells of itself: its log, and its figures."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from millrace.cli.values import one_of
from millrace.config import LogFormat, MetricsNames

LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogForm = Annotated[str, typer.Option(help="text or json.")]
Names = Annotated[
    str, typer.Option(help="Whose names the series of /metrics have: millrace, vllm or both.")
]


def names_of(text: str) -> MetricsNames:
    found: MetricsNames = one_of("--metrics-names", text, get_args(MetricsNames))
    return found


def start_log(level: str, form: str) -> tuple[str, LogFormat]:
    """Set the log up as the options say it; the same, checked, for the engines."""
    from millrace import logs

    found: LogFormat = one_of("--log-format", form, get_args(LogFormat))
    logs.setup(one_of("--log-level", level, ("debug", "info", "warning", "error")), found)
    return level, found
