"""JSON inside text: arguments of calls, schemas that are strings, what a model wrote.

Python's reader takes what no other can write again: half a surrogate pair, any depth. Here that is a
ValueError like every other fault, or is mended where the text is a model's and not a client's.
"""

from __future__ import annotations

import json
from typing import Any


def read(text: str) -> Any:
    """The value; raises ValueError if it is none that can be passed on."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def mended(text: str) -> Any:
    """The value, with a mark in the place of characters that are none."""
    try:
        return read(text)
    except UnicodeEncodeError:
        whole = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")
        return json.loads(whole)
