"""PEFT's form of an adapter: what its configuration asks for, and its weights by the base's own names.

What would change the answer and is not served is refused here, each with its reason.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import AdapterError
from millrace.models.adapters.tensors import Floats

_PREFIX = "base_model.model."
_WEIGHT = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_REFUSED: dict[str, str] = {
    "use_dora": "it is DoRA, and only plain LoRA is served",
    "modules_to_save": "it brings whole modules (modules_to_save), and only LoRA factors are served",
    "layer_replication": "it replicates layers",
    "trainable_token_indices": "it brings token embeddings of its own",
    "lora_bias": "its factors have biases",
    "alora_invocation_tokens": "it is an activated LoRA (aLoRA)",
    "target_parameters": "it targets parameters and not modules",
    "megatron_config": "it is for Megatron's layers",
    "use_qalora": "it is a QALoRA",
    "use_bdlora": "it is a BD-LoRA",
    "arrow_config": "it is routed by Arrow",
    "fan_in_fan_out": "its base stores weights transposed (fan_in_fan_out)",
}
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of beginning that change the base's weights: without that other base, the factors mean nothing."""


def pairs(
    config: Mapping[str, Any], weights: Mapping[str, Floats], folder: Path
) -> dict[str, tuple[Floats, Floats, float]]:
    """Factors (inputs, rank) and (rank, outputs) and their scale, by module."""
    _check(config, folder)
    halves: dict[str, dict[str, Floats]] = {}
    for key, value in weights.items():
        match = _WEIGHT.fullmatch(key)
        if match is None:
            raise AdapterError(f"{folder}: {key} is no weight of a plain LoRA adapter.")
        halves.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = value
    ranks = _patterns(config, "rank_pattern", folder)
    alphas = _patterns(config, "alpha_pattern", folder)
    ranks.deadline = alphas.deadline = time.monotonic() + _MOST_SECONDS
    found: dict[str, tuple[Floats, Floats, float]] = {}
    for name, both in halves.items():
        if len(both) != 2 or both["A"].ndim != 2 or both["B"].ndim != 2:
            raise AdapterError(f"{folder}: {name} has no two matrices lora_A and lora_B.")
        a, b = both["A"].T, both["B"].T
        rank = ranks.chosen(name, config.get("r"))
        alpha = alphas.chosen(name, config.get("lora_alpha"))
        if rank is None or alpha is None or not 1 <= rank < 2**31:
            raise AdapterError(
                f"{folder}: adapter_config.json gives no r and lora_alpha for {name}."
            )
        if a.shape[1] != rank:
            raise AdapterError(
                f"{folder}: {name} has rank {a.shape[1]}, and adapter_config.json says {rank:g}."
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found[name] = a, b, scale
    return found


def _check(config: Mapping[str, Any], folder: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{folder}: the adapter is of PEFT's type {str(kind)[:100]}; only LORA is served."
        )
    for field, why in _REFUSED.items():
        if config.get(field):
            raise AdapterError(f"{folder}: the adapter cannot be served: {why}.")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{folder}: the adapter cannot be served: it trains biases.")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASES):
        raise AdapterError(
            f"{folder}: the adapter was begun by {begun}, which changes the base's weights; save it "
            "converted to a plain LoRA."
        )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
        return None
    return float(value) if math.isfinite(value) else None


_TOKEN = re.compile(
    r"(?P<many>\.[*+])|(?P<digits>(?:\\d|\[0-9\])\+)"
    r"|(?P<choice>\((?:\?:)?[\w.\\-]+(?:\|[\w.\\-]+)*\))"
    r"|[\w-]|\\?\.|\\d|\[0-9\]"
)
"""The parts of regular expressions that adapters name modules with: names, dots, numbers, choices."""
_MOST = {"many": 1, "digits": 3, "choice": 3}
"""Of each part that can be matched in several ways: more could be tried for ever, and `re` cannot be
interrupted."""
_LONGEST_PATTERN = 512
_MOST_PATTERNS = 4096
_MOST_SECONDS = 2.0
"""In which all modules are compared with all patterns; those of honest adapters take milliseconds."""


class _Patterns:
    """What the patterns of one field give to modules by their names."""

    def __init__(
        self, found: list[tuple[re.Pattern[str], float]], field: str, folder: Path
    ) -> None:
        self._found = found
        self._field = field
        self._folder = folder
        self.deadline = 0.0

    def chosen(self, name: str, usual: Any) -> float | None:
        """What the first pattern that ends a module's name gives, as PEFT chooses."""
        for pattern, value in self._found:
            if time.monotonic() > self.deadline:
                raise AdapterError(
                    f"{self._folder}: {self._field} takes longer than {_MOST_SECONDS:g} seconds."
                )
            if pattern.match(name):
                return value
        return _number(usual)


def _patterns(config: Mapping[str, Any], field: str, folder: Path) -> _Patterns:
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{folder}: {field} in adapter_config.json should be an object.")
    if len(given) > _MOST_PATTERNS:
        raise AdapterError(f"{folder}: {field} has more than {_MOST_PATTERNS} patterns.")
    found = []
    for key, value in given.items():
        number = _number(value)
        if number is None or not _is_plain(key):
            raise AdapterError(
                f"{folder}: {field} in adapter_config.json is not understood: {key[:200]!r}."
            )
        try:
            found.append((re.compile(rf"(?:.*\.)?({key})$"), number))
        except re.error as error:
            raise AdapterError(
                f"{folder}: {field} has a broken pattern {key!r}: {error}."
            ) from error
    return _Patterns(found, field, folder)


def _is_plain(pattern: str) -> bool:
    """Whether a pattern consists of known parts, few of which can be matched in several ways."""
    if len(pattern) > _LONGEST_PATTERN:
        return False
    body = pattern.removeprefix("^").removesuffix("$")
    counts, at = Counter[str](), 0
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            return False
        if token.lastgroup is not None:
            counts[token.lastgroup] += 1
        at = token.end()
    return all(counts[part] <= most for part, most in _MOST.items())
