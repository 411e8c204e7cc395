"""API keys: where they come from, whose a given one is, its role, and what others may know of it.

Pure: no transport and no files but the key file. Secrets are hashed at once and compared as hashes, all
of them each time, so that an answer's timing says nothing about any key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from millrace.config import ApiKey, LimitSettings, Role
from millrace.errors import SetupError

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Caller:
    """Whoever holds a key. `id` is stable over restarts and does not give the key away."""

    id: str
    name: str
    role: Role = "use"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    @property
    def label(self) -> str:
        """What administrators know the key by."""
        return self.name or self.id


@dataclass(frozen=True)
class KeyEntry:
    """What the configuration file says of a key."""

    name: str
    secret: str | None
    """None for keys of that name in the key file."""
    role: Role | None
    limits: LimitSettings
    place: str
    """Where it stands, for errors."""


_LABEL = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
"""What is before the first colon of a line of the key file: `NAME` or `NAME[ROLE]`. The role is there and
not behind the key, since a key may contain colons and brackets of its own."""


class Keys:
    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._known = [(_digest(k.secret.encode()), _caller(k)) for k in keys]
        self._labels = {caller.id: caller.label for _, caller in self._known}

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def has_admin(self) -> bool:
        return any(caller.is_admin for _, caller in self._known)

    def label(self, id: str) -> str | None:
        """What administrators know the key with this caller id by; None if there is none."""
        return self._labels.get(id)

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


def gather(
    given: Sequence[str],
    file: str | None,
    admins: Sequence[str] = (),
    entries: Sequence[KeyEntry] = (),
) -> tuple[ApiKey, ...]:
    """The keys of the command line, the key file and the configuration; raises what is wrong with one.

    A key that is given as an admin key and in another place too has the role admin, so that a client's
    MILLRACE_API_KEY in the environment of the server does no harm.
    """
    found = [_checked("", secret, "--api-key") for secret in given]
    found += [_checked("", secret, "--admin-key", "admin") for secret in admins]
    if file is not None:
        path = Path(file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--api-key-file {file} cannot be read: {error}.") from error
        found += parse(text, file)
        if not found:
            raise SetupError(f"--api-key-file {file} holds no key.")
    for entry in entries:
        found += _of_entry(entry, [key for key in found if key.name == entry.name])
    unique: dict[str, ApiKey] = {}
    for key in found:
        known = unique.get(key.secret, key)
        if known.limits.given and known.name != key.name:
            raise SetupError(
                f"[keys.{known.name}] and [keys.{key.name}] of the configuration have the same key."
            )
        roles: tuple[Role, Role] = (known.role, key.role)
        unique[key.secret] = ApiKey(
            secret=key.secret,
            # The name under which its limits are set, so that what is said of them is found.
            name=key.name if key.limits.given else known.name or key.name,
            role="admin" if "admin" in roles else "use",
            limits=key.limits if key.limits.given else known.limits,
        )
    return tuple(unique.values())


def _of_entry(entry: KeyEntry, named: Sequence[ApiKey]) -> list[ApiKey]:
    """The keys that an entry of the configuration is about; `named` are those of its name elsewhere."""
    if entry.secret is None:
        if not named:
            raise SetupError(
                f"{entry.place} has no 'key', and no line of the --api-key-file has the name "
                f"'{entry.name}'. Write the key here, or name that of a line there."
            )
        secrets = [key.secret for key in named]
    else:
        if any(key.secret != entry.secret for key in named):
            raise SetupError(
                f"{entry.place}: the --api-key-file has another key of this name. Leave 'key' out here, "
                "or give one of them another name."
            )
        secrets = [_checked(entry.name, entry.secret, entry.place).secret]
    return [
        ApiKey(secret=s, name=entry.name, role=entry.role or "use", limits=entry.limits)
        for s in secrets
    ]


def parse(text: str, source: str) -> list[ApiKey]:
    """One key a line, as `KEY`, `NAME:KEY` or `NAME[ROLE]:KEY`; `#` begins a line of comment."""
    found: dict[str, tuple[int, ApiKey]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{source}, line {number}"
        key = _line(line, where)
        first, known = found.setdefault(key.secret, (number, key))
        if known.role != key.role:
            raise SetupError(f"{where}: the key has another role in line {first}.")
    return [key for _, key in found.values()]


def _line(line: str, where: str) -> ApiKey:
    label, colon, secret = line.partition(":")
    if not colon:
        return _checked("", line, where)
    match = _LABEL.fullmatch(label.strip())
    if match is None:
        raise SetupError(
            f"{where}: '{label.strip()}' is no name with a role. Write NAME[admin]:KEY, and no other "
            "brackets in a name."
        )
    role = "use" if match[2] is None else match[2].strip()
    if (chosen := next((r for r in ROLES if r == role), None)) is None:
        raise SetupError(f"{where}: there is no role '{role}'. Roles are {' and '.join(ROLES)}.")
    return _checked(match[1].strip(), secret.strip(), where, chosen)


def _checked(name: str, secret: str, source: str, role: Role = "use") -> ApiKey:
    if not secret:
        raise SetupError(f"{source}: the key is empty.")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise SetupError(
            f"{source}: a key consists of printable ASCII characters without spaces, "
            "since it travels in a header."
        )
    return ApiKey(secret=secret, name=name, role=role)


def is_exposed(address: str, keys: Sequence[ApiKey]) -> bool:
    """Whether others than this machine's users can reach the server, and need no key for it."""
    return not keys and not is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether only this machine's users reach what listens there."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"  # another name's address may be anybody's


def caller_id(secret: str) -> str:
    """The id of whoever holds a key, which does not give the key away."""
    hashed = hashlib.blake2b(secret.encode(), digest_size=8, person=b"millrace-caller")
    return hashed.hexdigest()


def _caller(key: ApiKey) -> Caller:
    return Caller(id=caller_id(key.secret), name=key.name, role=key.role)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
