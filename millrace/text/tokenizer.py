"""The tokenizer of a model folder, and the facts about its vocabulary that the front needs.

Reads tokenizer.json with the `tokenizers` library alone: transformers costs a second to import and
is used only for folders that carry no tokenizer.json.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Fast

from millrace.errors import ModelError
from millrace.models.ends import end_ids, special_text
from millrace.models.files import MOST_TOKENIZER, read_bytes, read_json, read_text, reads_folder
from millrace.text.bounds import FewestTokens
from millrace.text.vocabulary import Vocabulary


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fast = _load(folder)
        # Some files ask for texts to be cut or filled up, which is for training.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.settings = read_json(folder / "tokenizer_config.json", optional=True)
        self.vocabulary = Vocabulary(self._fast)
        self.eos_ids = self._end_ids()
        self._cutting = threading.Lock()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; `special` adds what the tokenizer puts around a raw text (a BOS, say)."""
        # Only the calls for batches give up the interpreter's lock while they work.
        return list(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_placed(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids as `encode` gives them, and the character at which each of them ends."""
        encoded = self._fast.encode_batch([text], add_special_tokens=False)[0]
        return list(encoded.ids), [end for _, end in encoded.offsets]

    def encodings(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, special: bool
    ) -> list[Any]:
        """Texts, or pairs of them, with all that the library knows of their tokens."""
        return list(self._fast.encode_batch(list(texts), add_special_tokens=special))

    def cut(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        length: int,
        *,
        special: bool,
        left: bool = False,
    ) -> list[Any]:
        """The same with at most `length` tokens each; of a pair, the longer loses first."""
        with self._cutting:
            fast = self._cutter
            fast.enable_truncation(length, direction="left" if left else "right")
            return list(fast.encode_batch(list(texts), add_special_tokens=special))

    def special_count(self, *, pair: bool = False) -> int:
        """Tokens that are put around a text, or a pair."""
        return int(self._fast.num_special_tokens_to_add(pair))

    @functools.cached_property
    def _cutter(self) -> _Fast:
        """One of its own: how long texts may be is a setting of the whole tokenizer."""
        copy: _Fast = _Fast.from_str(self._fast.to_str())
        return copy

    @functools.cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self.folder / "tokenizer.json", self._fast.get_vocab())

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text cannot have fewer of, found without tokenising it."""
        return self._fewest.of(text)

    def fewest_of_ascii(self, characters: int) -> int:
        """The same for that many characters of ASCII that are not blank, whichever they are."""
        return self._fewest.of_ascii(characters)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special))

    def as_json(self) -> str:
        """What a tokenizer.json holds, also of a folder that has none."""
        return str(self._fast.to_str())

    def token_text(self, name: str) -> str:
        """The text of a named special token (`bos_token`, `eos_token`), or an empty string."""
        return special_text(self.folder, name, self.settings)

    def _end_ids(self) -> frozenset[int]:
        found, text = end_ids(self.folder), self.token_text("eos_token")
        # In folders without a tokenizer.json, only the tokenizer knows its number.
        token = self._fast.token_to_id(text) if text else None
        return found if token is None else found | {token}

    @functools.cached_property
    def template_source(self) -> str | None:
        """The chat template, from wherever this model keeps it; of several, the one for tools."""
        named = self._templates
        return named.get("tool_use") or named.get("default") or next(iter(named.values()), None)

    @property
    def plain_source(self) -> str | None:
        """The template for conversations without tools, where a model has one of its own."""
        return self._templates.get("default") if "tool_use" in self._templates else None

    @functools.cached_property
    def _templates(self) -> dict[str, str]:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            found: dict[str, str] = {"default": read_text(file)}
            further = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))
            return found | {f.stem: read_text(f) for f in further}
        source = self.settings.get("chat_template")
        if source is None:
            source = read_json(self.folder / "chat_template.json", optional=True).get(
                "chat_template"
            )
        if isinstance(source, list):
            return _named_templates(source, self.folder)
        return {"default": source} if isinstance(source, str) else {}


def _named_templates(listed: list[Any], folder: Path) -> dict[str, str]:
    found = {}
    for one in listed:
        name, template = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f"The chat templates in {folder} cannot be read: not all have a name.")
        found[name] = template
    return found


def added_tokens(folder: Path) -> dict[int, str]:
    """The tokens that were added to the plain vocabulary, by their numbers."""
    added = _load(folder).get_added_tokens_decoder()
    return {int(id): str(token.content) for id, token in added.items()}


@reads_folder
def _load(folder: Path) -> _Fast:
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return _Fast.from_buffer(read_bytes(file, MOST_TOKENIZER))
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(folder))
        fast: _Fast = slow.backend_tokenizer
        return fast
    except ModelError:
        raise
    except Exception as error:  # the libraries raise bare Exceptions for malformed files
        why = "there is not enough memory" if isinstance(error, MemoryError) else error
        raise ModelError(f"The tokenizer in {folder} cannot be read: {why}") from error
