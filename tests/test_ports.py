"""Ports that are chosen for processes to come."""

from __future__ import annotations

import socket

import pytest

from millrace import ports
from millrace.ports import free_ports


def test_as_many_as_are_wanted_and_no_two_alike() -> None:
    found = free_ports(40)
    assert len(set(found)) == 40
    assert all(1024 <= port < 32_768 for port in found)


def test_one_that_somebody_has_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(1)
    monkeypatch.setattr(ports, "_LOWEST", taken)
    monkeypatch.setattr(ports, "_END", taken + 1)
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(OSError, match="no port"):
        free_ports(1)
