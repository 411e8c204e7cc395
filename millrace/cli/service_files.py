"""The file of a service and the commands that start and end it, for systemd and for launchd.

The one place that knows how the two differ. It writes nothing and starts nothing.
"""

from __future__ import annotations

import os
import plistlib
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.errors import SetupError

_STOP = 60
"""Seconds that an ending server has: what streams get to finish, and some for its engines."""


@dataclass(frozen=True)
class Service:
    """What is run, and with which variables besides the session's own."""

    command: Sequence[str]
    variables: Mapping[str, str]


Commands = Sequence[Sequence[str]]


class Manager(Protocol):
    """What starts services for a user here."""

    @property
    def file(self) -> Path: ...

    def text(self, service: Service) -> str: ...

    @property
    def starting(self) -> Commands: ...

    @property
    def ending(self) -> Commands: ...

    @property
    def after(self) -> Commands:
        """What is run once the file is gone."""

    @property
    def asking(self) -> Commands:
        """End well if the service runs."""

    @property
    def hints(self) -> Sequence[str]: ...


def manager() -> Manager:
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform.startswith("linux"):
        return Systemd()
    raise SetupError(f"Services are for systemd on Linux and launchd on macOS, not {sys.platform}.")


class Systemd:
    name = "millrace.service"

    @property
    def file(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        return Path(base) / "systemd" / "user" / self.name

    def text(self, service: Service) -> str:
        lines = [f"Environment={_word(f'{n}={v}')}" for n, v in service.variables.items()]
        program, *arguments = service.command
        # Of variables, systemd expands those in arguments alone.
        words = [_word(program), *(_word(a.replace("$", "$$")) for a in arguments)]
        return "\n".join(
            [
                "[Unit]",
                "Description=millrace, an LLM inference server",
                "After=network.target",
                "",
                "[Service]",
                f"ExecStart={' '.join(words)}",
                *lines,
                "WorkingDirectory=%h",
                "Restart=on-failure",
                "RestartSec=2",
                # Engines end when the server tells them to; only what is left then is killed.
                "KillMode=mixed",
                f"TimeoutStopSec={_STOP}",
                "",
                "[Install]",
                "WantedBy=default.target",
                "",
            ]
        )

    @property
    def starting(self) -> Commands:
        # An older one that runs takes the new file only when it is started again.
        verbs = (("daemon-reload",), ("enable", self.name), ("restart", self.name))
        return [self._control(*verb) for verb in verbs]

    @property
    def ending(self) -> Commands:
        return [self._control("disable", "--now", self.name)]

    @property
    def after(self) -> Commands:
        return [self._control("daemon-reload")]

    @property
    def asking(self) -> Commands:
        return [self._control("is-active", "--quiet", self.name)]

    @property
    def hints(self) -> Sequence[str]:
        return (
            f"journalctl --user -u {self.name} -f   shows its log",
            "loginctl enable-linger              starts it with the machine, before you log in",
        )

    def _control(self, *arguments: str) -> Sequence[str]:
        return ("systemctl", "--user", *arguments)


class Launchd:
    label = "org.millrace.server"

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self.label}.plist"

    @property
    def log(self) -> Path:
        return Path.home() / "Library" / "Logs" / "millrace.log"

    def text(self, service: Service) -> str:
        entries = {
            "Label": self.label,
            "ProgramArguments": list(service.command),
            "EnvironmentVariables": dict(service.variables),
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ProcessType": "Interactive",
            "ExitTimeOut": _STOP,
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        return plistlib.dumps(entries, sort_keys=False).decode()

    @property
    def starting(self) -> Commands:
        # Of one that is loaded already launchd keeps the old file, and takes no new one before it is gone.
        gone = 'while launchctl print "$0" >/dev/null 2>&1; do sleep 0.2; done'
        end = ("sh", "-c", f'launchctl bootout "$0" 2>/dev/null; {gone}', self._target)
        return [end, ("launchctl", "bootstrap", self._domain, str(self.file))]

    @property
    def ending(self) -> Commands:
        return [("launchctl", "bootout", self._target)]

    @property
    def after(self) -> Commands:
        return []

    @property
    def asking(self) -> Commands:
        return [("sh", "-c", 'launchctl print "$0" | grep -q "state = running"', self._target)]

    @property
    def hints(self) -> Sequence[str]:
        return (f"tail -f {self.log}   shows its log",)

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{self.label}"


def _word(text: str) -> str:
    """One word of a unit file: quoted where need be, with what systemd would expand written twice."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if not text or set(text) - _PLAIN else text


_PLAIN = {*string.ascii_letters, *string.digits, *"_-+=./:,@%"}
