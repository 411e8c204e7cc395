"""Checks of a config.json: the fields that loading is steered by have the type and range they must have.

Only what would do harm is refused here: a type that readers do not expect, or a count so large that
building the model would not end. What a model's class makes of the rest is for it to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.errors import ModelError

MOST_LAYERS = 10_000
MOST_WINDOW = 1 << 40

_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (str, ("model_type",)),
    (dict, ("text_config", "llm_config", "quantization")),
    (list, ("architectures",)),
)
_WINDOWS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
_COUNTS = (
    "num_hidden_layers",
    "n_layers",
    "n_layer",
    "num_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_num_experts",
    "num_labels",
)
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_RANGES = (
    dict.fromkeys(_WINDOWS, (1, MOST_WINDOW))
    | dict.fromkeys(_COUNTS, (0, MOST_LAYERS))
    | dict.fromkeys(_SIZES, (0, 1 << 31))
)
_KINDS: dict[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


def check_config(config: dict[str, Any], file: Path) -> None:
    """Raise ModelError with the first field that is wrong."""
    for where, part in _parts(config):
        for problem in _problems(part):
            raise ModelError(f"{file}: {where}{problem}. Fetch the model again.")


def _parts(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", config
    for name in ("text_config", "llm_config"):
        if isinstance(part := config.get(name), dict):
            yield f"{name}.", part


def _problems(part: dict[str, Any]) -> Iterator[str]:
    for kind, names in _TYPES:
        for name in names:
            if (value := part.get(name)) is not None and not isinstance(value, kind):
                yield f"{name} should be {_KINDS[kind]}, and is {_kind(value)}"
    for name, (least, most) in _RANGES.items():
        yield from _number(name, part.get(name), least, most)
    if isinstance(setting := part.get("quantization"), dict):
        yield from _quantization(setting)


def _number(name: str, value: object, least: int, most: int) -> Iterator[str]:
    if isinstance(value, bool | str | dict):
        yield f"{name} should be a number, and is {_kind(value)}"
    elif isinstance(value, int | float) and not least <= value <= most:
        yield f"{name} is {_shown(value)}, outside of {least} to {most}"


def _quantization(setting: dict[str, Any]) -> Iterator[str]:
    own = {f"quantization.{n}": s for n, s in setting.items() if isinstance(s, dict)}
    for where, one in ({"quantization": setting} | own).items():
        for name, most in (("bits", 64), ("group_size", 1 << 20)):
            value = one.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                yield f"{where}.{name} should be a whole number, and is {_kind(value)}"
            elif value is not None and not 1 <= value <= most:
                yield f"{where}.{name} is {_shown(value)}, outside of 1 to {most}"


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shown(value: float) -> str:
    # Python refuses to write numbers of thousands of digits.
    return str(value) if abs(value) < 1e30 else "too large a number"
