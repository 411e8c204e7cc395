"""How each coding agent is pointed at a server and run without a person: one class per agent.

docs/agents.md tells users the same settings; what is only here keeps a test quiet and alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installing import program

MODEL = "scripted"
WINDOW = 65536
NOWHERE = "http://127.0.0.1:9"
_PATIENCE = 120.0


@dataclass(frozen=True)
class Answer:
    text: str
    log: str
    code: int


@dataclass
class Agent:
    """One installation of an agent: a home of its own, and a folder to work in."""

    url: str
    home: Path
    work: Path

    name = ""
    shell = ""
    """The agent's own tool that runs a command, and the argument that holds the command."""
    command_argument = "command"

    def run(self, prompt: str, *, follow_up: bool = False) -> Answer:
        """Give it one prompt, in a new session or in the last one."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self.configure()
        return self._done(self.command(prompt, follow_up), self.environment())

    def launched(self, prompt: str) -> Answer:
        """The same by `millrace launch`, in a home whose own settings lead elsewhere."""
        (programs := self.home / "programs").mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        (programs / self.name).unlink(missing_ok=True)
        (programs / self.name).symlink_to(self.program())
        command = [sys.executable, "-m", "millrace", "launch", self.name, "--url", self.url]
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.getcwd(),
            "ANTHROPIC_API_KEY": "a key for elsewhere",
            "MILLRACE_HOME": str(self.home / "millrace"),
        }
        return self._done([*command, "--", *self.unattended(prompt)], environment)

    def _done(self, command: list[str], environment: dict[str, str]) -> Answer:
        done = subprocess.run(
            command,
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        return Answer(done.stdout.strip(), done.stderr, done.returncode)

    def command(self, prompt: str, follow_up: bool) -> list[str]:
        raise NotImplementedError

    def program(self) -> Path:
        raise NotImplementedError

    def unattended(self, prompt: str) -> list[str]:
        """The arguments of a run in which nobody is asked, without any configuration."""
        raise NotImplementedError

    def configure(self) -> None:
        """Write the configuration file, where the agent has one."""

    def stray(self) -> Path:
        """Write settings of a user's own that lead elsewhere; the file."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def shell_call(self, command: str) -> dict[str, Any]:
        """The arguments of a call that runs a command."""
        return {self.command_argument: command}

    def file_tools(self, note: Path, text: str) -> dict[str, tuple[str, dict[str, Any]]]:
        """The agent's tools for reading and writing a file, with the arguments for one."""
        return {}


class ClaudeCode(Agent):
    name = "claude"
    shell = "Bash"

    def command(self, prompt: str, follow_up: bool) -> list[str]:
        more = ["--continue"] if follow_up else []
        return [str(self.program()), *self.unattended(prompt), *more]

    def program(self) -> Path:
        return program("@anthropic-ai/claude-code-*/claude")

    def unattended(self, prompt: str) -> list[str]:
        return ["-p", prompt, "--allowedTools", "Bash,Read,Write"]

    def stray(self) -> Path:
        file = self.home / ".claude" / "settings.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"model": "elsewhere", "env": {"ANTHROPIC_BASE_URL": NOWHERE}}))
        return file

    def environment(self) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(WINDOW),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def shell_call(self, command: str) -> dict[str, Any]:
        return {"command": command, "description": "Prints a word"}

    def file_tools(self, note: Path, text: str) -> dict[str, tuple[str, dict[str, Any]]]:
        return {
            "read": ("Read", {"file_path": str(note)}),
            "write": ("Write", {"file_path": str(note), "content": text}),
        }


class Codex(Agent):
    name = "codex"
    shell = "exec_command"
    command_argument = "cmd"

    def command(self, prompt: str, follow_up: bool) -> list[str]:
        more = ["resume", "--last"] if follow_up else []
        return [str(self.program()), "exec", "--skip-git-repo-check", *more, prompt]

    def program(self) -> Path:
        return program(".bin/codex")

    def unattended(self, prompt: str) -> list[str]:
        return ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", prompt]

    def stray(self) -> Path:
        file = self.home / ".codex" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        provider = f'[model_providers.elsewhere]\nname = "elsewhere"\nbase_url = "{NOWHERE}/v1"\n'
        file.write_text(f'model = "elsewhere"\nmodel_provider = "elsewhere"\n\n{provider}')
        return file

    def configure(self) -> None:
        folder = self.home / ".codex"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(
            f"""
model = "{MODEL}"
model_provider = "millrace"
model_context_window = {WINDOW}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.millrace]
name = "millrace"
base_url = "{self.url}/v1"
wire_api = "responses"
env_key = "MILLRACE_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
        )

    def environment(self) -> dict[str, str]:
        return {"MILLRACE_API_KEY": "none"}


class OpenCode(Agent):
    name = "opencode"
    shell = "bash"

    def command(self, prompt: str, follow_up: bool) -> list[str]:
        more = ["--continue"] if follow_up else []
        return [str(self.program()), "run", "--auto", *more, prompt]

    def program(self) -> Path:
        return program(f"opencode-{platform.system().lower()}-*/bin/opencode")

    def unattended(self, prompt: str) -> list[str]:
        return ["run", "--auto", prompt]

    def stray(self) -> Path:
        file = self.work / "opencode.json"
        options = {"baseURL": f"{NOWHERE}/v1"}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {}}}
        # OpenCode writes this line into a file that has none, whoever starts it.
        config = {"$schema": "https://opencode.ai/config.json", "model": "elsewhere/m"}
        config |= {"provider": {"elsewhere": provider}}
        file.write_text(json.dumps(config))
        return file

    def configure(self) -> None:
        model = {"name": MODEL, "limit": {"context": WINDOW, "output": 4096}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "millrace",
            "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
            "models": {MODEL: model},
        }
        config = {
            "model": f"millrace/{MODEL}",
            "small_model": f"millrace/{MODEL}",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {"millrace": provider},
        }
        (self.work / "opencode.json").write_text(json.dumps(config))

    def environment(self) -> dict[str, str]:
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def shell_call(self, command: str) -> dict[str, Any]:
        return {"command": command, "description": "Prints a word"}

    def file_tools(self, note: Path, text: str) -> dict[str, tuple[str, dict[str, Any]]]:
        return {
            "read": ("read", {"filePath": str(note)}),
            "write": ("write", {"filePath": str(note), "content": text}),
        }


AGENTS: tuple[type[Agent], ...] = (ClaudeCode, Codex, OpenCode)
