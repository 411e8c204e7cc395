"""Which lines of a system prompt count as volatile."""

from __future__ import annotations

import time

import pytest

from millrace.errors import SetupError
from millrace.text.volatile import Volatile

VOLATILE = """Today's date: 2024-05-01
Today’s date is Wednesday, May 15, 2024.
Today is Monday, 3rd of June 2024
Current time: 14:03:22 UTC
Current time: 15:00 Europe/Berlin
Current time: 3:04 p.m.
- **Current date and time:** 2024-05-15 15:00:00 EST
The current time is 2024-05-15 15:00:00 EST.
Current datetime: 2024-05-15T15:00:00Z
Current date (UTC): 2024-05-01 10:00
<date>Date: 2024-01-01</date>
# Date: 01/02/2024
now: 1715781600
Tokens used: 1234/200000
Token usage: 12,345 / 200,000 (6%)
Token usage: 100/200; 100 remaining
Tokens remaining: 30k
Context left: 37%"""

LASTING = """Today's date is 2024-05-01. You are a helpful assistant.
Time: answer within 5 minutes
Time: 5 minutes
Time is money
Date: the day of the flight
Date: Monster 5
Be kind today.
now: go
Tokens: use at most 500 of them please
Context: the user is flying
You have 5 tools.
"""


@pytest.mark.parametrize("line", VOLATILE.splitlines())
def test_lines_that_change(line: str) -> None:
    messages, lines = Volatile(["auto"]).strip([{"role": "system", "content": f"A\n{line}\nB"}])
    assert (messages[0]["content"], lines) == ("A\nB", 1)


@pytest.mark.parametrize("line", LASTING.split("\n"))
def test_lines_that_say_something_else_stay(line: str) -> None:
    given = [{"role": "system", "content": line}]
    assert Volatile(["auto"]).strip(given) == (given, 0)


def test_only_system_messages_are_touched() -> None:
    line = "Current time: 12:00"
    part = [{"type": "text", "text": f"Hi\n{line}"}]
    given = [
        {"role": "developer", "content": part},
        {"role": "user", "content": line},
        {"role": "tool", "content": line},
    ]
    messages, lines = Volatile(["auto"]).strip(given)
    assert lines == 1 and messages[1:] == given[1:]
    assert messages[0]["content"] == [{"type": "text", "text": "Hi"}]
    assert given[0]["content"] == [{"type": "text", "text": f"Hi\n{line}"}]


def test_patterns_of_ones_own() -> None:
    volatile = Volatile([r"Build \d+", "^---"])
    given = [{"role": "system", "content": "a\nthis is Build 7, friends\n--- x\nb ---"}]
    assert volatile.strip(given)[0][0]["content"] == "a\nb ---"
    with pytest.raises(SetupError, match="strip-volatile"):
        Volatile(["("])


@pytest.mark.parametrize(
    "tail", ["1" * 190, "1 " * 95, ",1" * 90, " " * 190, "mon " * 45, "a/b " * 45]
)
def test_no_line_takes_long(tail: str) -> None:
    begin = time.thread_time()
    for head in ("Date:", "Tokens used: 1", "Today's date: 1"):
        Volatile(["auto"]).strip([{"role": "system", "content": f"{head}{tail}!"}])
    assert time.thread_time() - begin < 5  # of this thread's own work, not of the clock
