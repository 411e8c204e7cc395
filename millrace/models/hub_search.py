"""What the Hugging Face hub lists, as models that can be fetched and served here.

The hub lists what a repository holds without its files being fetched: the kind of model, the number of
weights of each type, and how they are quantized. Sizes follow from that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.models import short_names, store, suggestions
from millrace.models.short_names import ShortName
from millrace.models.supported import is_supported_kind

EXPAND = ("config", "downloads", "gated", "pipeline_tag", "safetensors")
ENOUGH = 5
"""Models in MLX's own format; where fewer match, others in safetensors are listed after them."""
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of one element of each type of safetensors."""
_USES = {
    "text-generation": ("chat",),
    "image-text-to-text": ("chat", "pictures"),
    "any-to-any": ("chat", "pictures"),
    "feature-extraction": ("embeddings",),
    "sentence-similarity": ("embeddings",),
}
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,99}/[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
"""A repository's name, by which it is fetched and shown."""
_MOST_BYTES = 1 << 50
_NAMED_BITS = re.compile(r"[-_]([2-8])[-_]?bit", re.IGNORECASE)


class HubModel(msgspec.Struct, kw_only=True):
    name: str | None
    """Its short name, where it has one here."""
    source: str
    """Its repository, by which it is fetched."""
    uses: list[str]
    bits: int | None
    bytes: int | None
    """Of its weights; None where the hub does not say."""
    need_bytes: int | None
    fits: bool
    fit_reason: str
    """Why it fits or not, in one sentence."""
    installed: bool
    downloads: int
    """In the last month."""
    gated: bool
    """Whether its licence must be accepted on the hub before it can be fetched."""


class _Weights(msgspec.Struct):
    parameters: dict[str, int] = {}


class Listed(msgspec.Struct):
    """A model as the hub lists it, with the properties of `EXPAND`."""

    id: str
    config: dict[str, Any] | None = None
    downloads: int | None = None
    gated: bool | str | None = None
    pipeline_tag: str | None = None
    safetensors: _Weights | None = None


_rows = msgspec.json.Decoder(list[msgspec.Raw])
_row = msgspec.json.Decoder(Listed)


def listed(answer: bytes) -> list[Listed]:
    """The models of the hub's answer. A repository's configuration is its owner's text: one that cannot be
    read is left out, and raises only where no other can be read."""
    found: list[Listed] = []
    failure: msgspec.MsgspecError | None = None
    try:
        rows = _rows.decode(answer)
    except RecursionError:
        raise msgspec.DecodeError("a configuration is nested too deeply") from None
    for row in rows:
        try:
            model = _row.decode(row)
        except msgspec.MsgspecError as error:
            failure = error
        else:
            if _ID.fullmatch(model.id):
                found.append(model)
    if failure is not None and not found:
        raise failure
    return found


def queries(words: str, most: int) -> list[dict[str, Any]]:
    """What the hub is asked, one after another until enough is found: MLX's own format comes first."""
    shared = {"search": words, "sort": "downloads", "limit": str(most), "expand": list(EXPAND)}
    return [shared | {"filter": kind} for kind in ("mlx", "safetensors")]


def described(listed: list[Listed], most: int, memory: int | None) -> list[HubModel]:
    """The models of a listing, each once; those that do not fit or cannot be served come last."""
    known = {model.id: model for model in reversed(listed)}
    models = [_model(model, memory) for model in reversed(known.values())]
    return sorted(models, key=lambda m: not m.fits)[:most]


def _model(listed: Listed, memory: int | None) -> HubModel:
    config = listed.config or {}
    kind = str(config.get("model_type") or "")
    weights = listed.safetensors.parameters if listed.safetensors else {}
    size, bits = _size(weights), _bits(config, weights, listed.id)
    uses = _USES.get(listed.pipeline_tag or "", ())
    short = short_names.of_source(listed.id)
    need, fits, reason = _fit(listed.id, kind, size, bits, uses, memory)
    return HubModel(
        name=short.name if short else None,
        source=listed.id,
        uses=list(short.uses if short else uses),
        bits=bits,
        bytes=size,
        need_bytes=need,
        fits=fits,
        fit_reason=reason,
        installed=store.is_whole_in_hub(listed.id),
        downloads=min(max(0, listed.downloads or 0), 1 << 53),
        gated=bool(listed.gated),
    )


def _size(weights: Mapping[str, int]) -> int | None:
    if not weights or any(kind not in _BITS for kind in weights):
        return None
    size = sum(_BITS[kind] * max(0, count) for kind, count in weights.items()) // 8
    return size if 0 < size <= _MOST_BYTES else None


def _bits(config: Mapping[str, Any], weights: Mapping[str, int], source: str) -> int | None:
    """How many bits a weight has: as the configuration says, the name, or the commonest type."""
    settings = config.get("quantization_config") or config.get("quantization") or {}
    bits = settings.get("bits") if isinstance(settings, dict) else None
    if isinstance(bits, int) and bits in range(2, 65):
        return bits
    if named := _NAMED_BITS.search(source):
        return int(named[1])
    floats = {kind: count for kind, count in weights.items() if kind in _BITS and "F" in kind}
    return _BITS[max(floats, key=lambda kind: floats[kind])] if floats else None


def _fit(
    source: str,
    kind: str,
    size: int | None,
    bits: int | None,
    uses: tuple[str, ...],
    memory: int | None,
) -> tuple[int | None, bool, str]:
    if kind and is_supported_kind(kind) is False:
        return None, False, f"This server does not support its architecture, {kind[:60]}."
    if size is None or bits is None or not kind:
        return None, False, "Whether it fits is unknown: the hub does not say how large it is."
    model = ShortName(
        name=source,
        title=source,
        source=source,
        architecture=kind,
        bits=bits,
        bytes=size,
        uses=uses,
        quality=0,
        active_bytes=size,
    )
    fit = suggestions.fit(model, memory)
    return fit.need, fit.fits, fit.reason
