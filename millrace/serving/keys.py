"""API keys: where they come from, whose a given one is, and what others may know of it.

Pure: no transport and no files but the key file. Secrets are hashed at once and compared as hashes, all
of them each time, so that an answer's timing says nothing about any key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.config import ApiKey
from millrace.errors import SetupError


@dataclass(frozen=True)
class Caller:
    """Whoever holds a key. `id` is stable over restarts and does not give the key away."""

    id: str
    name: str


class Keys:
    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._known = [(_digest(k.secret.encode()), _caller(k)) for k in keys]

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, given: Iterable[bytes]) -> Caller | None:
        """Who one of the given secrets belongs to."""
        found = None
        for secret in given:
            digest = _digest(secret)
            for known, caller in self._known:
                if hmac.compare_digest(known, digest):
                    found = caller
        return found


def secrets_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What a request's headers offer as keys: a bearer token, an `x-api-key`, or both."""
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(token.strip())
    return found


def gather(given: Sequence[str], file: str | None) -> tuple[ApiKey, ...]:
    """The keys of the command line and of the key file; raises what is wrong with one."""
    found = [_checked("", secret, "--api-key") for secret in given]
    if file is not None:
        path = Path(file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--api-key-file {file} cannot be read: {error}.") from error
        found += parse(text, file)
        if not found:
            raise SetupError(f"--api-key-file {file} holds no key.")
    unique: dict[str, ApiKey] = {}
    for key in found:
        unique.setdefault(key.secret, key)
    return tuple(unique.values())


def parse(text: str, source: str) -> list[ApiKey]:
    """One key a line, as `name:key` or alone; `#` begins a line of comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, secret = line.split(":", 1) if ":" in line else ("", line)
        found.append(_checked(name.strip(), secret.strip(), f"{source}, line {number}"))
    return found


def _checked(name: str, secret: str, source: str) -> ApiKey:
    if not secret:
        raise SetupError(f"{source}: the key is empty.")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise SetupError(
            f"{source}: a key consists of printable ASCII characters without spaces, "
            "since it travels in a header."
        )
    return ApiKey(secret=secret, name=name)


def is_exposed(address: str, keys: Sequence[ApiKey]) -> bool:
    """Whether others than this machine's users can reach the server, and need no key for it."""
    return not keys and not is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether only this machine's users reach what listens there."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"  # another name's address may be anybody's


def _caller(key: ApiKey) -> Caller:
    hashed = hashlib.blake2b(key.secret.encode(), digest_size=8, person=b"millrace-caller")
    return Caller(id=hashed.hexdigest(), name=key.name)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
