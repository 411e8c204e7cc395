"""Rate limits: the headers that tell of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from millrace.api.middleware import anthropic_headers, duration, openai_headers
from millrace.serving.limits import LimitStanding


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (4.5, "4.5s"),
        (59.99, "60s"),
        (60, "1m0s"),
        (360, "6m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_of_both_protocols() -> None:
    standing = LimitStanding("tokens", 1000, 400, 36.0)
    assert openai_headers(standing) == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "36s",
    }
    assert anthropic_headers(standing, datetime(2026, 11, 1, 12, 0, 0, 5, tzinfo=UTC)) == {
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "400",
        "anthropic-ratelimit-tokens-reset": "2026-11-01T12:00:36Z",
    }
