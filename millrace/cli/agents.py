"""Coding agents, and how each is pointed at a server: variables, arguments, and nothing written anywhere.

docs/agents.md tells the same settings for people who set them by hand. What an agent is run with is made
here; servers, models and processes are not known.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

KEY = "MILLRACE_KEY"
"""The variable that agents read the key from. Not the one that `serve` takes keys from: a word that
stands for no key would become one there."""
_NO_KEY = "none"
_MOST_OUTPUT = 8192


@dataclass(frozen=True)
class Target:
    """The server and the model that an agent is to use."""

    url: str
    model: str
    window: int
    key: str | None = None


@dataclass(frozen=True)
class Launch:
    """What an agent is run with, beside its user's own arguments."""

    variables: dict[str, str]
    arguments: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Variables that would lead the agent elsewhere."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in base.items() if k not in self.removed} | self.variables

    def lines(
        self, program: str, arguments: Sequence[str], known: Mapping[str, str] | None = None
    ) -> list[str]:
        """The same as lines for a shell. `known` are values that the shell has under a name of its own,
        by which they are called, so that no secret is shown."""
        names = known or {}
        shown = [f"unset {' '.join(self.removed)}"] if self.removed else []
        for name, value in self.variables.items():
            said = f'"${names[value]}"' if value in names else shlex.quote(value)
            shown.append(f"export {name}={said}")
        return [*shown, shlex.join([program, *self.arguments, *arguments])]


@dataclass(frozen=True)
class Agent:
    program: str
    title: str
    install: str
    first_prompt: int
    """Tokens of what it sends before its user has said much: a smaller window is of no use."""
    settings: Callable[[Target], Launch] = field(repr=False)

    def launch(self, target: Target) -> Launch:
        return self.settings(target)


def _claude(target: Target) -> Launch:
    same = (f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU"))
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_MODEL": target.model,
        **dict.fromkeys(same, target.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.window),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # Variables in a settings file of the user's come before those of the process, and these before both.
    settings = json.dumps({"env": variables}, ensure_ascii=False)
    # Unlike a key, a token needs no consent in a session with a person. Others see a command's arguments.
    return Launch(
        variables | {"ANTHROPIC_AUTH_TOKEN": target.key or _NO_KEY},
        ("--settings", settings),
        removed=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_OAUTH_TOKEN",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_VERTEX",
            "CLAUDE_CODE_USE_FOUNDRY",
        ),
    )


def _codex(target: Target) -> Launch:
    provider = "model_providers.millrace"
    values: dict[str, str | int] = {
        "model": target.model,
        "model_provider": "millrace",
        "model_context_window": target.window,
        f"{provider}.name": "millrace",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": KEY,
    }
    # What JSON makes of a text or a number is TOML, too.
    said = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    arguments = tuple(part for value in said for part in ("-c", value))
    return Launch({KEY: target.key or _NO_KEY}, arguments)


def _opencode(target: Target) -> Launch:
    output = min(_MOST_OUTPUT, target.window // 4)
    model = {"name": target.model, "limit": {"context": target.window, "output": output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "millrace",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {target.model: model},
    }
    whole = f"millrace/{target.model}"
    config = {"model": whole, "small_model": whole, "provider": {"millrace": provider}}
    content = json.dumps(config, ensure_ascii=False)
    return Launch({"OPENCODE_CONFIG_CONTENT": content, KEY: target.key or _NO_KEY})


class AgentName(StrEnum):
    claude = "claude"
    codex = "codex"
    opencode = "opencode"


AGENTS = {
    AgentName.claude: Agent(
        "claude", "Claude Code", "npm install -g @anthropic-ai/claude-code", 20_000, _claude
    ),
    AgentName.codex: Agent("codex", "Codex", "npm install -g @openai/codex", 9_000, _codex),
    AgentName.opencode: Agent(
        "opencode", "OpenCode", "npm install -g opencode-ai", 8_000, _opencode
    ),
}
