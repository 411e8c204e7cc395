"""Which addresses are on the public internet, and so may be asked for somebody else's sake."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's own service, reached from its machines alone
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
"""Python's own lists differ from version to version, so that these are looked at as well."""
_NAT64 = ip_network("64:ff9b::/96")


def is_public(text: str) -> bool:
    """Whether an address, and every address that is written inside it, is public."""
    try:
        address = ip_address(text)
    except ValueError:
        return False  # a zone (`%eth0`) or no address at all
    return all(map(_public, (address, *_inner(address))))


def _public(address: IPv4Address | IPv6Address) -> bool:
    if address in _NAT64 or (isinstance(address, IPv6Address) and address.ipv4_mapped):
        return True  # what matters is the address inside
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def _inner(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    """The addresses of the older kind that a newer one stands for."""
    if not isinstance(address, IPv6Address):
        return
    if address.ipv4_mapped:
        yield address.ipv4_mapped
    if address.sixtofour:
        yield address.sixtofour
    if address.teredo:
        yield from address.teredo
    if address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
