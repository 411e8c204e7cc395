"""How packed weights lie in memory, and how a kernel reads them.

Sixteen outputs make a block. A block's groups follow one another, each with its scales and biases, if the
format has any, and then its codes: words of 32 bits, one per output, whose parts are the codes of as many
inputs in a row. So a kernel reads a block from its beginning to its end, and sixteen outputs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from millrace.native.emit import (
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    INT,
    INTS,
    LANES,
    SHORT,
    SHORTS,
    Emitter,
    Value,
    same,
)

Scales = Literal["f16", "bf16", "f32", "none"]
_SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "none": 0}
DENSE_GROUP = 32


@dataclass(frozen=True)
class Format:
    """What a matrix is packed as."""

    codes: Literal["u4", "u8", "s8", "f16", "bf16", "f32"]
    group: int = DENSE_GROUP
    scales: Scales = "none"
    biased: bool = False

    @property
    def name(self) -> str:
        parts = [self.codes, str(self.group), self.scales, "biased" if self.biased else ""]
        return "_".join(part for part in parts if part)

    @property
    def per_word(self) -> int:
        """Inputs whose codes are read at once."""
        return {"u4": 8, "u8": 4, "s8": 4}.get(self.codes, 1)

    @property
    def word_bytes(self) -> int:
        """Bytes of one word of each of a block's outputs."""
        return LANES * {"f16": 2, "bf16": 2}.get(self.codes, 4)

    @property
    def scale_bytes(self) -> int:
        return LANES * _SCALE_BYTES[self.scales]

    @property
    def head_bytes(self) -> int:
        """Bytes of a group before its codes."""
        return self.scale_bytes * (2 if self.biased else 1)

    @property
    def group_bytes(self) -> int:
        return self.head_bytes + self.group // self.per_word * self.word_bytes

    # Reading it in a kernel

    def read_scale(self, e: Emitter, address: Value) -> Value:
        match self.scales:
            case "f16":
                return e.builder.fpext(e.load(address, HALVES), FLOATS)
            case "bf16":
                return _widened(e, e.load(address, SHORTS))
            case _:
                return e.load(address)

    def read_word(self, e: Emitter, address: Value) -> Value:
        kinds = {"f16": HALVES, "bf16": SHORTS, "f32": FLOATS}
        return e.load(address, kinds.get(self.codes, INTS))

    def read_lane_scales(
        self, e: Emitter, group: Value, lane: Value
    ) -> tuple[Value | None, Value | None]:
        """One output's scale and bias of a group."""
        if self.scales == "none":
            return None, None
        at = e.at(group, e.times(lane, _SCALE_BYTES[self.scales]))
        read = [self._lane_scale(e, at)]
        if self.biased:
            read.append(self._lane_scale(e, e.at(at, self.scale_bytes)))
        return read[0], read[1] if self.biased else None

    def read_lane(self, e: Emitter, words: Value, lane: Value) -> Value:
        """One output's word."""
        kinds = {"f16": HALF, "bf16": SHORT, "f32": FLOAT}
        return e.load(
            e.at(words, e.times(lane, self.word_bytes // LANES)), kinds.get(self.codes, INT)
        )

    def _lane_scale(self, e: Emitter, address: Value) -> Value:
        match self.scales:
            case "f16":
                return e.builder.fpext(e.load(address, HALF), FLOAT)
            case "bf16":
                return _widened(e, e.load(address, SHORT))
            case _:
                return e.load(address, FLOAT)

    def code(self, e: Emitter, word: Value, place: int) -> Value:
        """The codes at one place of words, as floats; of one word as well."""
        b = e.builder
        ints, floats = (INTS, FLOATS) if isinstance(word.type, ir.VectorType) else (INT, FLOAT)
        match self.codes:
            case "u4" | "u8":
                bits = 32 // self.per_word
                if place:
                    word = b.lshr(word, same(bits * place, ints))
                if place < self.per_word - 1:
                    word = b.and_(word, same(2**bits - 1, ints))
                return b.uitofp(word, floats)
            case "s8":
                if place < 3:
                    word = b.shl(word, same(24 - 8 * place, ints))
                return b.sitofp(b.ashr(word, same(24, ints)), floats)
            case "f16":
                return b.fpext(word, floats)
            case "bf16":
                return _widened(e, word)
            case "f32":
                return word


def _widened(e: Emitter, shorts: Value) -> Value:
    b = e.builder
    ints, floats = (INTS, FLOATS) if isinstance(shorts.type, ir.VectorType) else (INT, FLOAT)
    return b.bitcast(b.shl(b.zext(shorts, ints), same(16, ints)), floats)
