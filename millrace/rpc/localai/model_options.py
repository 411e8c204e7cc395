"""What becomes of each field of ModelOptions: honoured, refused by its name, or known to be advice.

A field that would change answers and cannot be honoured is refused. One that only says how work is to be
done, or is for another kind of model, has no effect here; a log line names those that were set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from millrace.errors import BadRequest

log = logging.getLogger("millrace.rpc")

_OWN_POSITIONS = "positions are encoded as the model's files say"
_OWN_SHAPE = "the model's files say it"
_OWN_STATE = "key-value state is not quantised while a request runs"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "VocabOnly": ((False,), "a model is loaded with its weights"),
    "RopeFreqBase": ((0.0,), _OWN_POSITIONS),
    "RopeFreqScale": ((0.0, 1.0), _OWN_POSITIONS),
    "RMSNormEps": ((0.0,), _OWN_SHAPE),
    "NGQA": ((0,), _OWN_SHAPE),
    "Tokenizer": (("",), "the model's own tokenizer is used"),
    "LoraBase": (("",), "an adapter is applied to the model that is loaded"),
    "DraftModel": (("",), "answers are guessed ahead from their own text instead"),
    "Quantization": (("", "none"), "choose a model whose weights are quantised"),
    "MMProj": (("",), "a model's folder holds all that it needs"),
    "RopeScaling": (("", "none"), _OWN_POSITIONS),
    "YarnExtFactor": ((0.0,), _OWN_POSITIONS),
    "YarnAttnFactor": ((0.0,), _OWN_POSITIONS),
    "YarnBetaFast": ((0.0,), _OWN_POSITIONS),
    "YarnBetaSlow": ((0.0,), _OWN_POSITIONS),
    "LoadFormat": (
        ("", "auto", "safetensors", "gguf"),
        "weights are read from safetensors and GGUF",
    ),
    "CacheTypeKey": (("", "auto", "f16", "bf16", "f32"), _OWN_STATE),
    "CacheTypeValue": (("", "auto", "f16", "bf16", "f32"), _OWN_STATE),
    "GrammarTriggers": ((), "a grammar holds from the first token of an answer on"),
    "Overrides": ((), "they change a GGUF file's own facts"),
}
"""Fields that cannot be honoured: the values that ask for nothing, and the reason."""

ADVICE = frozenset(
    {
        *(
            "Seed",
            "NBatch",
            "Threads",
            "Type",
        ),  # requests bring seeds, a model's files say its type
        *("F16Memory", "MLock", "MMap", "LowVRAM", "NUMA", "NoMulMatQ", "NoKVOffload"),
        *("NGPULayers", "MainGPU", "TensorSplit", "CUDA", "FlashAttention"),
        *("EnforceEager", "SwapSpace", "DisableLogStatus"),
        # For models that draw or speak.
        *("PipelineType", "SchedulerType", "CFGScale", "IMG2IMG", "ControlNet", "AudioPath"),
        *("CLIPModel", "CLIPSubfolder", "CLIPSkip"),
    }
)
"""Fields that change no answer of a model that is served here."""


def check(wire: Any) -> None:
    """Refuse what cannot be honoured, and log what has no effect."""
    for name, (plain, reason) in REFUSED.items():
        value = getattr(wire, name)
        if not (value in plain or (not plain and not value)):
            raise BadRequest(f"'{name}' ({_shown(value)}) is not supported: {reason}")
    for name in ("LimitImagePerPrompt", "LimitVideoPerPrompt", "LimitAudioPerPrompt"):
        if getattr(wire, name) < 0:
            raise BadRequest(f"'{name}' is negative")
    if unused := without_effect(wire):
        log.warning("LoadModel: these settings have no effect here: %s", ", ".join(unused))


def without_effect(wire: Any) -> list[str]:
    """The names of fields that were set and change nothing; the numbers of those that are not known."""
    known = [field.name for field, _ in wire.ListFields() if field.name in ADVICE]
    unknown: Any = UnknownFieldSet(wire)
    numbers = sorted({field.field_number for field in unknown})
    return [*known, *(f"field {number}" for number in numbers)]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str | int | float) else ", ".join(map(str, value))
    return " ".join(str(text).split())[:100]
