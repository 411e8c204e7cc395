"""A model that speaks in channels, with the vocabulary that the gateway writes and reads them in.

The gateway looks for the vocabulary's file in a folder or on the internet, and carries a copy of it in
its own library for other uses: that copy becomes the file. Run as a program
(`harmony.py FOLDER VOCABULARY`) by the server's own interpreter, it writes the model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

from scripted import Rule, call, make, think

THOUGHT = "They greet me."
GREETING = "Grüezi, 世界! 😀"
RULES = [
    Rule("weather", think("I look.", call("get_weather", "harmony", city="Paris"), "harmony")),
    Rule("", think(THOUGHT, GREETING, "harmony")),
]
_FINGERPRINT = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_SPECIAL = (
    "startoftext", "endoftext", "reserved_200000", "reserved_200001", "return", "constrain",
    "reserved_200004", "channel", "start", "end", "message", "reserved_200009", "reserved_200010",
    "reserved_200011", "call",
)  # fmt: skip
"""What follows the words, without a gap: a tokenizer counts on by itself."""


def vocabulary(package: Path) -> bytes | None:
    """The file as the gateway's package carries it; None where it does not."""
    for library in package.glob("*.so"):
        data = library.read_bytes()
        for begin in re.finditer(rb"IQ== 0\nIg== 1\n", data):
            found = re.compile(rb"(?:[A-Za-z0-9+/=]+ \d+\n)+").match(data, begin.start())
            if found and hashlib.sha256(found[0]).hexdigest() == _FINGERPRINT:
                return found[0]
    return None


def _tokenizer(lines: bytes) -> dict[str, object]:
    """Words that are a token are that token, and others are bytes: merges would take long to find."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}
    hidden = (b for b in range(256) if b not in letters)
    letters |= {b: chr(256 + n) for n, b in enumerate(hidden)}
    vocab = {}
    for line in lines.splitlines():
        word, id = line.split()
        vocab["".join(letters[b] for b in base64.b64decode(word))] = int(id)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": len(vocab) + n, "content": f"<|{name}|>", "special": True, **plain}
            for n, name in enumerate(_SPECIAL)
        ],
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
    }


def write(folder: Path, lines: bytes) -> None:
    source = folder / "tokenizer"
    source.mkdir(parents=True)
    (source / "tokenizer.json").write_text(json.dumps(_tokenizer(lines)), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    make(folder / "gpt-oss", source, RULES, "harmony")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes())
