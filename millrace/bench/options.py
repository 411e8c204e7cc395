"""The command line's words into what a run is told. Pure; every error names the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from millrace.bench.samples import BenchTarget
from millrace.errors import SetupError

_VERSIONED = re.compile(r"/v\d+$")
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|)")
N = TypeVar("N", int, float)


def parse_targets(targets: list[str], models: list[str], keys: list[str]) -> list[BenchTarget]:
    """Targets in order, with their model and key; the model is empty where none was named."""
    urls: dict[str, str] = {}
    for text in targets:
        name, url = _named(text)
        if name in urls:
            raise SetupError(f"--target {name} is given twice; give each server its own name.")
        urls[name] = _base(text, url)
    chosen = _overrides("--model", models, list(urls))
    secrets = _overrides("--api-key", keys, list(urls))
    return [
        BenchTarget(name=name, url=url, model=chosen.get(name, ""), api_key=secrets.get(name))
        for name, url in urls.items()
    ]


def parse_numbers(option: str, text: str, convert: Callable[[str], N]) -> list[N]:
    """A comma-separated list of numbers above zero."""
    try:
        numbers = [convert(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise SetupError(f"{option} {text}: write numbers above 0, separated by commas.")
    return numbers


def parse_duration(option: str, text: str | None) -> float | None:
    """Seconds, from `500ms`, `2s` or plain seconds."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    if not found or float(found[1]) <= 0:
        raise SetupError(f"{option} {text} is not a duration; write 500ms, 2s or 0.5.")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def parse_prefix(text: str | None) -> tuple[int, float]:
    """`TOKENS` or `TOKENS:SHARE`: how long the shared prefix is, and how many requests have it."""
    if text is None:
        return 0, 1.0
    tokens, _, share = text.partition(":")
    try:
        length, part = int(tokens), float(share or 1)
    except ValueError:
        length, part = 0, 0.0
    if length < 1 or not 0 < part <= 1:
        raise SetupError(
            f"--shared-prefix {text}: write TOKENS or TOKENS:SHARE, such as 500 or 500:0.8."
        )
    return length, part


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if equals and "/" not in name:
        return name, url
    return re.sub(r"^\w+://", "", text).split("/")[0], text


def _base(text: str, url: str) -> str:
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not re.match(r"https?://[^/\s]+", url):
        raise SetupError(f"--target {text}: write NAME=URL, such as ours=http://127.0.0.1:8000.")
    return url if _VERSIONED.search(url) else f"{url}/v1"


def _overrides(option: str, values: list[str], names: list[str]) -> dict[str, str]:
    """`NAME=VALUE` for one target, a plain value for all that have none of their own."""
    found: dict[str, str] = {}
    plain: str | None = None
    for text in values:
        name, equals, value = text.partition("=")
        if equals and name in names:
            found[name] = value
        elif plain is None:
            plain = text
        else:
            known = ", ".join(names)
            raise SetupError(f"{option} is given twice for all targets; the targets are: {known}.")
    if plain is not None:
        found = dict.fromkeys(names, plain) | found
    return found
