"""Hostfiles: where the ranks of a split model are. Pure but for the reading of the file, and the looking up
of names.

Three ways of writing them are in use, and all are read: mlx.launch's list of hosts with `ssh` and `ips`,
the lists of `ip:port` that MLX's ring takes, and the flat list of `ip:port` that LocalAI writes. For JACCL,
the entries hold the names of RDMA devices.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from millrace.config import GroupBackend, GroupConfig, Parallel, RankHost
from millrace.errors import SetupError

FIRST_PORT = 32323
"""The port of the first rank where a hostfile names none, as mlx.launch has it."""
CONTROL = 1000
"""A rank hears orders at the port of its collectives plus this."""
MOST_RANKS = 256
LEAST_SECRET = 16
"""Bytes."""


def read_hostfile(
    path: str,
    *,
    backend: str | None = None,
    parallel: Parallel = "auto",
    coordinator: str | None = None,
    secret: str = "",
) -> GroupConfig:
    """The group that a file describes; raises SetupError that names what is wrong with it, or with the
    secret."""
    check_secret(secret)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SetupError(f"The hostfile {path} cannot be read: {error}.") from None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SetupError(f"The hostfile {path} is not JSON: {error}.") from None
    try:
        return group_of(
            raw,
            backend=backend,
            parallel=parallel,
            coordinator=coordinator,
            secret=secret or _digest(text),
        )
    except ValueError as error:
        raise SetupError(f"The hostfile {path}: {error}.") from None


def check_secret(secret: str) -> None:
    """Raise SetupError where a secret is given that can be guessed."""
    length = len(secret.encode(errors="surrogateescape"))
    if 0 < length < LEAST_SECRET:
        raise SetupError(
            f"MILLRACE_RANKS_SECRET is {length} bytes long and must be at least {LEAST_SECRET}: whoever "
            "hears a handshake can test guesses of it. Make one with `openssl rand -hex 32` and set it on "
            "all ranks."
        )


_DIGEST = "hostfile:"


def _digest(text: str) -> str:
    """A secret for those who have set none: it tells groups apart; who has the file has it, too."""
    return _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def peers_of(group: GroupConfig) -> tuple[str, ...]:
    """Who alone may come where the hostfile's text is the only secret; with one of its own, anybody who
    has it."""
    return tuple(h.address for h in group.hosts) if group.secret.startswith(_DIGEST) else ()


def group_of(
    raw: Any,
    *,
    backend: str | None = None,
    parallel: Parallel = "auto",
    coordinator: str | None = None,
    secret: str = "",
) -> GroupConfig:
    """The group that parsed JSON describes; ValueError says what is wrong with it."""
    if isinstance(raw, dict):
        backend = backend or _text(raw.get("backend"), "'backend'")
        raw = raw.get("hosts")
    if not isinstance(raw, list) or not raw:
        raise ValueError("it is a list of hosts, and has at least one")
    if len(raw) > MOST_RANKS:
        raise ValueError(f"it has {len(raw)} ranks; {MOST_RANKS} are the most")
    named = _backend(backend, raw)
    hosts = tuple(_host(entry, rank, named) for rank, entry in enumerate(raw))
    ends = [(h.address, port) for h in hosts for port in (h.port, h.control)]
    if len(set(ends)) < len(ends):
        twice = next(end for end in ends if ends.count(end) > 1)
        raise ValueError(
            f"two ranks would use {twice[0]}:{twice[1]} (a rank takes its own port and the one "
            f"{CONTROL} above it)"
        )
    devices: tuple[Any, ...] = ()
    if named == "jaccl":
        devices = tuple(_devices(entry, rank, len(raw)) for rank, entry in enumerate(raw))
        coordinator = coordinator or f"{hosts[0].address}:{hosts[0].port}"
    return GroupConfig(
        hosts=hosts,
        backend=named,
        parallel=parallel,
        devices=devices,
        coordinator=coordinator or "",
        secret=secret,
    )


def _backend(wanted: str | None, raw: list[Any]) -> GroupBackend:
    if wanted in (None, "", "any", "auto"):
        rdma = any(isinstance(e, dict) and e.get("rdma") for e in raw)
        return "jaccl" if rdma or _is_matrix(raw) else "ring"
    if wanted == "mpi":
        raise ValueError("mpi needs its own launcher, mpirun; choose ring, which needs none")
    for known in get_args(GroupBackend):
        if wanted == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"'{str(wanted)[:40]}' is none of {', '.join(get_args(GroupBackend))}")


def _is_matrix(raw: list[Any]) -> bool:
    """Whether the entries are names of RDMA devices, by rank."""
    lists = [e for e in raw if isinstance(e, list)]
    return len(lists) == len(raw) and any(v is None for e in lists for v in e)


def _host(entry: Any, rank: int, backend: GroupBackend) -> RankHost:
    ssh = ""
    if isinstance(entry, dict):
        ssh = _text(entry.get("ssh"), f"'ssh' of rank {rank}") or ""
        if ssh.startswith("-"):
            raise ValueError(f"'ssh' of rank {rank} is no host but an option of ssh")
        ips = entry.get("ips") or ([ssh.rpartition("@")[2]] if ssh else [])
        if not isinstance(ips, list) or not ips:
            raise ValueError(f"rank {rank} has neither 'ips' nor 'ssh'")
        entry = ips[0]
    elif isinstance(entry, list):
        if backend == "jaccl":
            raise ValueError(
                "names of RDMA devices alone do not say where the ranks are; write each as "
                '{"ips": ["IP"], "rdma": [...]}'
            )
        if not entry:
            raise ValueError(f"rank {rank} has no address")
        entry = entry[0]
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"rank {rank} is no address like 192.168.1.2:32323")
    address, port = split_address(entry, f"rank {rank}")
    port = FIRST_PORT + rank if port is None else port
    return RankHost(address=address, port=port, control=control_port(port), ssh=ssh)


def control_port(port: int) -> int:
    return port + CONTROL if port + CONTROL <= 65535 else port - CONTROL


def split_address(text: str, what: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    text = text.strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        rest = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, rest = text, ""
    else:
        host, _, rest = text.partition(":")
    if not host or any(c.isspace() or c in "/@\0" for c in host):
        raise ValueError(f"{what} '{text[:80]}' is no address")
    if not rest:
        return host, None
    if not rest.isascii() or not rest.isdigit() or not 0 < int(rest) <= 65535:
        raise ValueError(f"{what} '{text[:80]}' has no port from 1 to 65535")
    return host, int(rest)


def _devices(entry: Any, rank: int, ranks: int) -> tuple[str | None, ...]:
    names = entry.get("rdma") if isinstance(entry, dict) else entry
    if isinstance(names, list) and len(names) == ranks:
        found = tuple(n for n in names if n is None or isinstance(n, str))
        if len(found) == ranks:
            return found
    raise ValueError(f"rank {rank} names one RDMA device for each of the {ranks} ranks, or null")


def _text(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{what} is no text")


def among(peer: str, addresses: Iterable[str]) -> bool:
    """Whether a connection's other end is one of some addresses, or of the names of some."""
    found = _plain(peer)
    names = []
    for address in addresses:
        try:
            if _plain(address) == found:
                return True
        except ValueError:
            names.append(address)
    return any(found in _looked_up(name) for name in names)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def _looked_up(name: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return {_plain(str(info[4][0])) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def is_here(address: str) -> bool:
    """Whether an address is this machine talking to itself."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
