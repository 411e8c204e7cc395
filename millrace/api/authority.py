"""Host names and ports as `Host` and `Origin` headers write them, read in one way only.

Every check of a name uses this parser: two parsers that disagree about a value are how a check is bypassed.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

LONGEST = 300
"""Characters of a name and its port; DNS names end at 253."""
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{0,5}))?", re.ASCII)


class Authority(NamedTuple):
    name: str
    """In lower case; an IPv6 address without its brackets."""
    port: int | None
    is_address: bool


def parse(text: str) -> Authority | None:
    """The name and the port, or None for anything that is not exactly these.

    Refused are user information, spaces, commas, text after the bracket of an IPv6 address, and zone
    identifiers, which mean something on one machine only and do not belong into a request.
    """
    if len(text) > LONGEST or (match := _AUTHORITY.fullmatch(text)) is None:
        return None
    bracketed, name, digits = match.groups()
    port = int(digits) if digits else None
    if port is not None and port > 65535:
        return None
    if bracketed is not None:
        return Authority(bracketed.lower(), port, True) if _is_ipv6(bracketed) else None
    return Authority(name.lower(), port, _is_ipv4(name))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True
