"""The tokenizer that a gateway builds its own from: a zip of the model folder's files, in chunks.

The same files give the same bytes, so that workers of one model have one fingerprint.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import ModelError
from millrace.text.tokenizer import Tokenizer

CHUNK = 1 << 20
"""Bytes of one message."""
MOST_BYTES = 200 << 20
MOST_ENTRIES = 50
"""What gateways take of a bundle."""
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
)
_EPOCH = (1980, 1, 1, 0, 0, 0)


def bundle(tokenizer: Tokenizer) -> bytes:
    """The zip. Reads and packs: not for the event loop."""
    folder = tokenizer.folder
    files = [folder / name for name in _NAMES if (folder / name).is_file()]
    files += sorted(folder.glob("*.tiktoken"))
    files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files[: MOST_ENTRIES - 1]:
            _add(archive, str(file.relative_to(folder)), file.read_bytes())
        if not (folder / "tokenizer.json").is_file():
            _add(archive, "tokenizer.json", tokenizer.as_json().encode())
    data = packed.getvalue()
    if len(data) > MOST_BYTES:
        raise ModelError(f"The tokenizer's files are {len(data)} bytes, more than gateways take.")
    return data


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(Path(name).as_posix(), _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def chunks(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Pieces of the zip, the last of them with the fingerprint of it all."""
    starts = range(0, max(1, len(data)), CHUNK)
    for start in starts:
        last = start == starts[-1]
        yield data[start : start + CHUNK], hashlib.sha256(data).hexdigest() if last else ""
