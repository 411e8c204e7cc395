"""Which model a coding agent is run on: one of a server's, or one on this machine to start a server for.

What decides is whether its window holds what the agent sends before its user has said much; then, whether
it is loaded, has learnt to call tools, and how large it is. Nothing is started here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from millrace.cli.agents import Agent
from millrace.cli.remote import DEFAULT_URL, Server
from millrace.errors import MillraceError, SetupError
from millrace.models.store import Model

LITTLE = 32_768
"""Tokens below which a conversation with an agent is soon full."""


@dataclass(frozen=True)
class ModelChoice:
    name: str
    """What it is asked for by."""
    window: int
    model: str = ""
    """What `serve` is told to serve it; empty where a server has it."""


def of_server(agent: Agent, server: Server, name: str | None) -> ModelChoice:
    """The model that was named, or of those that the agent can use a loaded one, or the largest."""
    listed = server.listed()
    if name is not None:
        model = next(m for m in listed if m.id == name)
        return _checked(agent, model.id, model.window, server.capabilities(model.id))
    wide = [m for m in listed if m.alias_of is None and (m.window or 0) >= agent.first_prompt]
    sizes = server.sizes()
    wide.sort(key=lambda m: (m.state != "loaded", -sizes.get(m.id, 0)))
    for candidate in wide:
        does = server.capabilities(candidate.id)
        if does is None or "completion" in does:
            return _checked(agent, candidate.id, candidate.window, does)
    windows = ", ".join(f"{m.id} {m.window:,}" for m in listed if m.window) or "none"
    raise SetupError(
        f"No model at {server.url} has a window for {_need(agent)}. Windows there: {windows}. Start "
        f"the server with another model, or with --context if the model bears it."
    )


def of_machine(
    agent: Agent, name: str | None, context: int | None, *, download: bool, yes: bool = False
) -> ModelChoice:
    """The model that was named, fetched if need be and if allowed, or the best of those that are here.

    Where none is here, one that fits is offered: with `yes`, it is fetched unasked.
    """
    from millrace.cli.progress import reporter
    from millrace.models.description import describe
    from millrace.models.resolve import resolve

    if name is None:
        found = _best(agent, context)
        if found is not None:
            return _checked(agent, found.name, context or found.context, None, found.name)
        name = _offered(agent, yes=yes, download=download)
    with reporter() as progress:
        resolved = resolve(name, progress=progress, download=download)
    window = context or describe(resolved.path).context
    does = ["completion", *(["tools"] if _calls_tools(resolved.path) else [])]
    return _checked(agent, resolved.name, window, does, name)


def _best(agent: Agent, context: int | None) -> Model | None:
    from millrace.models import store

    fitting = [m for m in store.local_models() if _is_of_use(agent, m, context)]
    fitting.sort(key=lambda m: -m.bytes)
    for model in fitting:
        if _calls_tools(Path(model.path)):
            return model
    return None


def _offered(agent: Agent, *, yes: bool, download: bool) -> str:
    """The name of a model to fetch; raises where none fits, or the user does not want it."""
    from millrace.models.footprint import device_budget
    from millrace.models.suggestions import choices
    from millrace.sizes import format_bytes

    lacking = (
        f"No server runs at {DEFAULT_URL}, and no model on this machine calls tools and has a window "
        f"for {_need(agent)}."
    )
    able = choices(device_budget(), frozenset({"code", "tools"}))
    if not able:
        raise SetupError(
            f"{lacking} Name one with --model: a folder, a GGUF file or a Hugging Face id (org/name)."
        )
    best, size = able[0], format_bytes(able[0].bytes)
    if download and not yes and sys.stdin.isatty():
        tell(lacking)
        yes = typer.confirm(f"Fetch {best.name} ({size}), which fits this machine?", default=True)
    if not download or not yes:
        raise SetupError(
            f"{lacking} This machine has room for {best.name} ({size}): --yes or --model {best.name} "
            "fetches it."
        )
    return best.name


def _is_of_use(agent: Agent, model: Model, context: int | None) -> bool:
    from millrace.models.encoders import encoder_of
    from millrace.models.footprint import device_budget, footprint

    if model.error is not None or (context or model.context or 0) < agent.first_prompt:
        return False
    folder, budget = Path(model.path), device_budget()
    try:
        if encoder_of(folder, name=model.name) is not None:
            return False
        need = footprint(folder)
    except MillraceError:
        return False
    return budget is None or need.fixed + need.least_kv <= budget


def _calls_tools(folder: Path) -> bool:
    from millrace.cli.models import formats_of

    try:
        return formats_of(folder)[0] != "plain"
    except MillraceError:
        return False


def _checked(
    agent: Agent, name: str, window: int | None, does: list[str] | None, model: str = ""
) -> ModelChoice:
    """What is wrong with a model is said; only a window that is too small is refused."""
    if does is not None and "tools" not in does:
        tell(f"{name} has not learnt to call tools, by which {agent.title} works.")
    if window is None:
        tell(f"The window of {name} is not told; {LITTLE:,} tokens are assumed.")
        window = LITTLE
    if window < agent.first_prompt:
        raise SetupError(
            f"{name} has a window of {window:,} tokens, too small for {_need(agent)}. Choose another "
            f"with --model."
        )
    if window < LITTLE:
        tell(f"{name} has a window of {window:,} tokens, which is little for {agent.title}.")
    return ModelChoice(name, window, model)


def _need(agent: Agent) -> str:
    return f"{agent.title}, whose first prompt is about {agent.first_prompt:,} tokens"


def tell(text: str) -> None:
    typer.echo(f"millrace: {text}", err=True)
