"""`millrace launch`: a coding agent on a model of one's own, in one command.

It finds a server or has one started for the while, and runs the agent in this terminal. How an agent is
set up is in `millrace.cli.agents`, and which model it gets in `millrace.cli.agent_models`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from millrace.cli.agents import AGENTS, AgentName, Launch, Target
from millrace.cli.remote import DEFAULT_URL, KEY_VARIABLE, Key, Server, Url, own_server, wait_ready
from millrace.errors import SetupError


def register(app: typer.Typer) -> None:
    app.command()(launch)


def launch(
    agent: Annotated[AgentName, typer.Argument(metavar="claude|codex|opencode", help="The agent.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --, what the agent itself is told.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of the running server, or one to start a server for; if left out, one "
            "whose window holds what the agent sends."
        ),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="The window of a server that is started; the model's own if left out."
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Fetch a model that fits, unasked, where none is here."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Only show what would be run, as lines for a shell.")
    ] = False,
) -> None:
    """Run a coding agent (Claude Code, Codex, OpenCode) on a model of your own."""
    from millrace.cli.agent_models import of_machine, of_server, tell

    chosen, given = AGENTS[agent], arguments or []
    program = shutil.which(chosen.program)
    if program is None and not show:
        raise SetupError(
            f"{chosen.title} is not installed: there is no '{chosen.program}' on the PATH. Get it with: "
            f"{chosen.install}"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_in_order())
        if (server := _running(url, api_key, model, context)) is not None:
            choice = of_server(chosen, server, model)
        else:
            choice = of_machine(chosen, model, context, download=not show, yes=yes)
            api_key = None
            more = ["--context", str(context)] if context is not None else []
            if show:
                typer.echo(f"# Before, in another terminal: {_served(choice.model, more)}")
                server = Server(DEFAULT_URL)
            else:
                server = stack.enter_context(own_server(choice.model, more))
        settings = chosen.launch(Target(server.url, choice.name, choice.window, api_key))
        if show:
            typer.echo("\n".join(settings.lines(chosen.program, given, _held(api_key))))
            return
        if sys.stderr.isatty():
            tell(f"{chosen.title} on {choice.name}, {choice.window:,} tokens, at {server.url}")
        assert program is not None
        status = _run(program, given, settings)
    raise typer.Exit(status)


def _running(
    url: str | None, api_key: str | None, model: str | None, context: int | None
) -> Server | None:
    """The server that was named, or the one at the usual address if it has what is asked for."""
    from millrace.cli.agent_models import tell

    server = Server(url or DEFAULT_URL, api_key=api_key)
    if url is not None and context is not None:
        raise SetupError("--context is for a server that is started here, and --url names another.")
    if url is None and (context is not None or server.health() is None):
        return None
    wait_ready(server)
    if url is None and model is not None and model not in server.models():
        tell(f"The server at {server.url} has no model '{model}'; another server is needed.")
        return None
    if model is not None:
        server.check_model(model)
    return server


def _run(program: str, arguments: list[str], settings: Launch) -> int:
    """Run the agent in this terminal; its exit status, as a shell tells it."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for child in children:
            child.send_signal(number)

    # The terminal's keys reach the agent by themselves. They are heard here and left alone, not ignored:
    # a program inherits what is ignored.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    command = [program, *settings.arguments, *arguments]
    child = subprocess.Popen(command, env=settings.environment(os.environ))
    children.append(child)
    status = child.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """A server of our own ends, too, when this command is told to end while it waits for it."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    yield


def _served(model: str, options: list[str]) -> str:
    import shlex

    return shlex.join(["millrace", "serve", model, *options])


def _held(api_key: str | None) -> dict[str, str]:
    """A key that the shell has in a variable is called by the variable's name, and not shown."""
    held = os.environ.get(KEY_VARIABLE)
    return {held: KEY_VARIABLE} if held and held == api_key else {}
