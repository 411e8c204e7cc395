"""The tokens that end a model's answer: the union of what its files say.

They disagree, and a missed one runs on for ever. Reads files alone and loads no tokenizer, so that
the front and the engine come to the same set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ModelError
from millrace.models.files import MOST_TOKENIZER, read_bytes, read_json, reads_folder


class _Added(msgspec.Struct):
    id: int
    content: str


class _VocabularyPart(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerFile(msgspec.Struct):
    """The few parts that are wanted; the rest is passed over, which takes a tenth of the time."""

    added_tokens: list[_Added] = []
    model: _VocabularyPart = _VocabularyPart()


@reads_folder
def end_ids(folder: Path) -> frozenset[int]:
    config = read_json(folder / "config.json", optional=True)
    found: set[int] = set()
    nested = [n for k in ("text_config", "llm_config") if isinstance(n := config.get(k), dict)]
    generation = read_json(folder / "generation_config.json", optional=True)
    for source in (config, *nested, generation):
        ids = source.get("eos_token_id")
        given = ids if isinstance(ids, list) else [ids]
        found |= {i for i in given if type(i) is int and 0 <= i < 1 << 31}
    if text := special_text(folder, "eos_token"):
        token = _id_of(folder / "tokenizer.json", text)
        found |= set() if token is None else {token}
    return frozenset(found)


def special_text(folder: Path, name: str, settings: dict[str, Any] | None = None) -> str:
    """The text of a named special token (`bos_token`, `eos_token`), or an empty string."""
    if settings is None:
        settings = read_json(folder / "tokenizer_config.json", optional=True)
    value = settings.get(name)
    if value is None:
        value = read_json(folder / "special_tokens_map.json", optional=True).get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _id_of(file: Path, text: str) -> int | None:
    if not file.is_file():
        return None
    try:
        known = msgspec.json.decode(read_bytes(file, MOST_TOKENIZER), type=_TokenizerFile)
        for token in known.added_tokens:
            if token.content == text:
                return token.id
        vocabulary = msgspec.json.decode(known.model.vocab)
    except (ModelError, ValueError, RecursionError):
        return None  # whoever needs the tokenizer itself says what is wrong with it
    if isinstance(vocabulary, dict):
        found = vocabulary.get(text)
        return found if isinstance(found, int) else None
    if not isinstance(vocabulary, list):
        return None
    pieces = (entry[0] if isinstance(entry, list) and entry else entry for entry in vocabulary)
    return next((number for number, piece in enumerate(pieces) if piece == text), None)
