"""How packed weights lie in memory, and how a kernel reads them.

Sixteen outputs make a block. A block's groups follow one another, each with its scales and biases, if the
format has any, and then its codes: words of 32 bits, one per output, that hold the codes of inputs in a row
as one stream of bits, lowest first. Where scales are small integers, groups of 256 inputs share the factors
that those are multiplied with, which lie before them. So a kernel reads a block from its beginning to its
end, and sixteen outputs at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from millrace.native.compact import SPAN
from millrace.native.compile import has_tables
from millrace.native.emit import BYTE, FLOAT, HALF, INT, LANES, SHORT, Emitter, Value, same, vector

Codes = Literal["u2", "u3", "u4", "u5", "u6", "u8", "f16", "bf16", "f32"]
Scales = Literal["f16", "bf16", "f32", "s8", "none"]
_KINDS: dict[str, tuple[Any, int]] = {
    "f16": (HALF, 2),
    "bf16": (SHORT, 2),
    "f32": (FLOAT, 4),
    "s8": (BYTE, 1),
    "none": (None, 0),
}
_WORD_BITS = 32
_WHOLE = 0x4B000000
"""The bits of 2**23, from which on floats are whole numbers: a code in its low bits is added to it."""
_TABLED = (4, 5)
"""Bits of codes that are looked up in a table, where that is one instruction, bits above them aside."""
DENSE_GROUP = 32


@dataclass(frozen=True)
class Format:
    """What a matrix is packed as: weights are scale * (code - zero) + bias."""

    codes: Codes
    group: int = DENSE_GROUP
    scales: Scales = "none"
    biased: bool = False
    zero: int = 0

    @property
    def name(self) -> str:
        zero = f"from{self.zero}" if self.zero else ""
        parts = [self.codes, zero, str(self.group), self.scales, "biased" if self.biased else ""]
        return "_".join(part for part in parts if part)

    @property
    def bits(self) -> int:
        """Of a code; 0 where weights are floats."""
        return int(self.codes[1:]) if self.codes[0] == "u" else 0

    @property
    def run(self) -> int:
        """Inputs whose codes fill whole words, and are read at once."""
        return math.lcm(_WORD_BITS, self.bits) // self.bits if self.bits else 1

    @property
    def run_words(self) -> int:
        return self.run * self.bits // _WORD_BITS if self.bits else 1

    @property
    def word_bytes(self) -> int:
        """Bytes of one word of each of a block's outputs."""
        return LANES * (4 if self.bits else _KINDS[self.codes][1])

    @property
    def run_bytes(self) -> int:
        return self.run_words * self.word_bytes

    @property
    def scale_bytes(self) -> int:
        return LANES * _KINDS[self.scales][1]

    @property
    def head_bytes(self) -> int:
        """Bytes of a group before its codes."""
        return self.scale_bytes * (2 if self.biased else 1)

    @property
    def group_bytes(self) -> int:
        return self.head_bytes + self.group // self.run * self.run_bytes

    @property
    def span(self) -> int:
        """Groups that share factors; 1 where there are none."""
        return SPAN // self.group if self.scales == "s8" else 1

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of one kind, of scales or of biases, before a span's groups."""
        return LANES * _KINDS["f16"][1] if self.scales == "s8" else 0

    @property
    def span_head_bytes(self) -> int:
        return self.factor_bytes * (2 if self.biased else 1)

    @property
    def span_bytes(self) -> int:
        return self.span_head_bytes + self.span * self.group_bytes

    # Reading it in a kernel: all outputs of a block, or the one of a lane

    def read_factors(self, e: Emitter, span: Value, lane: Value | None = None) -> list[Value]:
        """What a span's scales, and its biases, are multiples of."""
        if self.scales != "s8":
            return []
        count = 2 if self.biased else 1
        return [_float(e, "f16", e.at(span, n * self.factor_bytes), lane) for n in range(count)]

    def read_scales(
        self, e: Emitter, group: Value, factors: list[Value], lane: Value | None = None
    ) -> tuple[Value | None, Value | None]:
        """A group's scale and bias, if it has them."""
        if self.scales == "none":
            return None, None
        found: list[Value | None] = []
        for n in range(2 if self.biased else 1):
            value = _float(e, self.scales, e.at(group, n * self.scale_bytes), lane)
            found.append(e.builder.fmul(factors[n], value) if factors else value)
        return found[0], found[1] if self.biased else None

    def read_run(self, e: Emitter, address: Value, lane: Value | None = None) -> list[Value]:
        """The words of a run."""
        kind, size = (INT, 4) if self.bits else _KINDS[self.codes]
        return [
            _load(e, kind, size, e.at(address, n * self.word_bytes), lane)
            for n in range(self.run_words)
        ]

    def code(self, e: Emitter, words: list[Value], place: int) -> Value:
        """The codes at one place of a run, less their zero, as floats."""
        if not self.bits:
            return _widened(e, self.codes, words[0])
        b = e.builder
        number, shift = divmod(place * self.bits, _WORD_BITS)
        code = words[number]
        ints, floats = code.type, _like(code.type, FLOAT)
        end = shift + self.bits
        if shift:
            code = b.lshr(code, same(shift, ints))
        if end > _WORD_BITS:
            code = b.or_(code, b.shl(words[number + 1], same(_WORD_BITS - shift, ints)))
        if self.bits in _TABLED and isinstance(ints, ir.VectorType) and has_tables():
            return e.looked_up([float(n - self.zero) for n in range(2**self.bits)], code)
        if end != _WORD_BITS:
            code = b.and_(code, same(2**self.bits - 1, ints))
        if not self.zero:
            return b.uitofp(code, floats)
        whole = b.bitcast(b.or_(code, same(_WHOLE, ints)), floats)
        return b.fsub(whole, same(2.0**23 + self.zero, floats))


def _load(e: Emitter, kind: Any, size: int, address: Value, lane: Value | None) -> Value:
    if lane is None:
        return e.load(address, vector(kind))
    return e.load(e.at(address, e.times(lane, size)), kind)


def _float(e: Emitter, kind: str, address: Value, lane: Value | None) -> Value:
    return _widened(e, kind, _load(e, *_KINDS[kind], address, lane))


def _widened(e: Emitter, kind: str, value: Value) -> Value:
    """What is in memory, as floats."""
    b = e.builder
    ints, floats = _like(value.type, INT), _like(value.type, FLOAT)
    match kind:
        case "f16":
            return b.fpext(value, floats)
        case "bf16":
            return b.bitcast(b.shl(b.zext(value, ints), same(16, ints)), floats)
        case "s8":
            return b.sitofp(b.sext(value, ints), floats)
        case _:
            return value


def _like(kind: Any, scalar: Any) -> Any:
    return vector(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar
