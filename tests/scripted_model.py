"""The scripted model itself: copied into a model folder and loaded from there as its `model_file`.

It knows nothing of language. Its one layer keeps the token ids as keys, so that the whole context
can be read back from whatever cache the engine passes, for every row; the script beside this file
then says which token comes next.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

CERTAIN, FILLER = 1000.0, 10.0
"""The logits of the scripted token, and of what is said when that one is masked out."""

GUESSES = 16


class ModelArgs:
    """Not a dataclass: those look their module up, and a `model_file` is in no list of modules."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        return cls(config["vocab_size"])


class Anchor(nn.Module):
    """A weight, since loading and placement expect some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones((1,))


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layers = [Anchor()]
        self._width = args.vocab_size
        self._script = Script(Path(__file__).parent)

    def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> mx.array:
        rows, count = inputs.shape
        ids = inputs.astype(mx.float32)[:, None, :, None]  # exact below 2**24
        before: Any = 0
        if cache is not None:
            before = cache[0].offset
            ids, _values = cache[0].update_and_fetch(ids, ids)
        # KVCache counts in an int, a batch of unequal rows in an array.
        lengths = np.broadcast_to(np.array(before), (rows,)) + count
        context = np.array(ids[:, 0, :, 0]).astype(np.int64)
        # Of a prompt, nobody asks but for the end; a step with guesses asks for every place.
        asked = count if count <= GUESSES else 1
        logits = np.zeros((rows, asked, self._width), np.float32)
        for row in range(rows):
            for place in range(asked):
                seen = lengths[row] - (asked - 1 - place)
                logits[row, place, self._script.filler] = FILLER
                logits[row, place, self._script.next(context[row, :seen])] = CERTAIN
        return mx.broadcast_to(mx.array(logits), (rows, count, self._width))


class Script:
    """Which token follows a context."""

    def __init__(self, folder: Path) -> None:
        script = json.loads((folder / "script.json").read_text(encoding="utf-8"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._rules: list[tuple[str, str]] = [(r["when"], r["say"]) for r in script["rules"]]
        self._faults = {
            r["say"]: (r["fault"], r["after"]) for r in script["rules"] if r.get("fault")
        }
        self._hung = folder / "hung"
        self._harmony = script["style"] == "harmony"
        self._start = self._id("<|start|>" if self._harmony else "<|im_start|>")
        self._end = self._id("<|return|>" if self._harmony else "<|im_end|>")
        self._header = self._encode("assistant" if self._harmony else "assistant\n")
        self._known: dict[bytes, tuple[str, list[int]]] = {}
        self.filler = self._encode(" and")[0]

    def next(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> int:
        found = self._split([int(i) for i in np.flatnonzero(ids == self._start)], ids)
        if found is None:
            return self._end
        turn, said = found
        key = turn.tobytes()
        if key not in self._known:
            say = self._say(self._decode(turn))
            self._known[key] = say, self._encode(say)
        say, tokens = self._known[key]
        if say in self._faults:
            self._strike(*self._faults[say], len(said))
        rest = self._rest(say, tokens, said.tolist())
        return rest[0] if rest else self._end

    def _strike(self, fault: str, after: int, said: int) -> None:
        if said < after:
            return
        if fault == "raise":
            raise RuntimeError("the script has a fault here")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang" and not self._hung.exists():
            self._hung.touch()  # once: the engine that comes after goes on
            time.sleep(3600)

    def _split(self, starts: list[int], ids: Any) -> tuple[Any, Any] | None:
        """The turn to answer, and what was said of the answer; None where no answer is open."""
        if not starts:  # a raw prompt, without a template
            return ids, ids
        ends = [*starts[1:], len(ids)]
        turns = [ids[a:b] for a, b in zip(starts, ends, strict=True)]
        answer = len(turns) - 1
        while self._harmony and answer > 0 and self._role(turns[answer - 1]) == "assistant":
            answer -= 1  # one answer is several messages there
        header = 1 + len(self._header)
        if turns[answer][1:header].tolist() != self._header:
            return None
        for turn in reversed(turns[:answer]):
            if self._role(turn) not in ("assistant", "system", "developer"):
                return turn, ids[starts[answer] + header :]
        return None

    def _role(self, turn: Any) -> str:
        words = self._decode(turn[1:5]).replace("<", " ").split()
        return words[0] if words else ""

    def _say(self, turn: str) -> str:
        fitting = (say for when, say in self._rules if when in turn)
        say = next(fitting, "The script has no rule for this turn.")
        if self._harmony and "<|message|>" not in say:
            say = f"<|channel|>final<|message|>{say}"
        return say

    def _rest(self, say: str, tokens: list[int], said: list[int]) -> list[int]:
        """What is still to be said, however the beginning came to be."""
        if said == tokens[: len(said)]:
            return tokens[len(said) :]
        # Tokens at the end that are no whole character yet come again from where it begins.
        whole = len(said)
        while whole and self._decode(said[:whole]).endswith("\ufffd"):
            whole -= 1
        text = self._decode(said[:whole])
        if "</think>" in text:
            # The prompt or a budget may have closed the thought before the script would.
            text, say = (s.rpartition("</think>")[2].lstrip("\n") for s in (text, say))
        overlaps = (k for k in range(len(say), 0, -1) if text.endswith(say[:k]))
        return self._encode(say[next(overlaps, 0) :])[len(said) - whole :]

    def _id(self, token: str) -> int:
        return int(self._tokenizer.token_to_id(token))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
