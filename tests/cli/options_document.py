"""docs/options.md: every command with its arguments and options, as the parser has them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import typer

from millrace.cli.app import app
from millrace.cli.panels import PANELS

_HEAD = """# Commands and options

`tests/cli/test_options_document.py` writes this page from the command line's own parser, and fails where
it differs.

Every option of `millrace serve` can also stand in `millrace.toml` under its name without the dashes
([serving.md](serving.md#the-configuration-file)), and in the environment as `MILLRACE_` and its name in
capitals: `--max-running 8` is `max-running = 8` and `MILLRACE_MAX_RUNNING=8`. The command line comes first,
then the environment, then the file.
"""


def document() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join([_HEAD, *(_command(name, each) for name, each in _commands(group))])


def _commands(group: Any, before: str = "millrace") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = [_metavar(p) for p in arguments]
    lines = [f"## {name}", "", _text(command.help.split("\n\n")[0]), ""]
    usage = " ".join([name, "[OPTIONS]" if options else "", *words])
    lines += ["```", " ".join(usage.split()), "```", ""]
    about = [f"| `{_metavar(p).replace('|', ' or ')}` | {_help(p)} |" for p in arguments if p.help]
    if about:
        lines += ["| argument | |", "|---|---|", *about, ""]
    order = ["", *PANELS]
    by_panel = sorted(options, key=lambda option: order.index(_panel(option)))
    for panel, some in groupby(by_panel, key=_panel):
        if panel:
            lines += [f"### {panel}", ""]
        lines += ["| option | default | |", "|---|---|---|", *map(_row, some), ""]
    return "\n".join(lines)


def _metavar(argument: Any) -> str:
    word = (argument.metavar or argument.name).upper()
    word = f"{word}..." if argument.nargs != 1 else word
    return word if argument.required else f"[{word}]"


def _panel(option: Any) -> str:
    return str(getattr(option, "rich_help_panel", None) or "")


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    if default is True:
        shown = "on"
    return f"| {names} | {shown} | {_help(option)} |"


def _help(parameter: Any) -> str:
    return _text(parameter.help or "").replace("|", "\\|")


def _text(text: str) -> str:
    return " ".join(text.replace("\f", " ").split())
