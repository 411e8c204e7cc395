"""Writing LLVM code for vectors of sixteen floats, in few words.

A kernel is a Python function that is given an `Emitter` and the kernel's arguments (addresses and counts,
64-bit integers) and writes its instructions. LLVM cuts the vectors into what the processor has: one
register with AVX-512, two with AVX2, four with NEON. No sum is reordered: a kernel's result does not
depend on the processor's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

LANES = 16
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()


def vector(scalar: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(scalar, lanes)


FLOATS, INTS, SHORTS, BYTES, HALVES = (vector(t) for t in (FLOAT, INT, SHORT, BYTE, HALF))

_SMALLEST = -87.33
"""Below this, e to the x is no normal float."""
_ROUNDING = 1.5 * 2.0**23

Value = Any
"""A value of the code being written; llvmlite has no types of its own for mypy."""


def long(value: int) -> Value:
    return ir.Constant(LONG, value)


def same(value: float, of: Any = FLOATS) -> Value:
    """A vector of one constant, or that constant."""
    return ir.Constant(of, [value] * of.count if isinstance(of, ir.VectorType) else value)


class Loop:
    """Instructions that are run `count` times, at least once, with values carried from turn to turn."""

    def __init__(self, builder: Any, count: Value, carried: Sequence[Value]) -> None:
        self._builder, self._count = builder, count
        before = builder.block
        self._body = builder.append_basic_block("body")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(long(0), before)
        self.carried = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)

    def close(self, carried: Sequence[Value] = ()) -> list[Value]:
        """End the turn with new values of what is carried; they are those after the last turn."""
        builder = self._builder
        following = builder.add(self.index, long(1))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, builder.block)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, after)
        builder.position_at_end(after)
        return list(carried)


class Emitter:
    def __init__(self, builder: Any) -> None:
        self.builder = builder

    # Addresses and memory

    def at(self, address: Value, *more: Value | int) -> Value:
        """An address so many bytes further on."""
        for offset in more:
            if isinstance(offset, int):
                address = self.builder.add(address, long(offset)) if offset else address
            else:
                address = self.builder.add(address, offset)
        return address

    def times(self, value: Value, factor: Value | int) -> Value:
        return self.builder.mul(value, long(factor) if isinstance(factor, int) else factor)

    def load(self, address: Value, kind: Any = FLOATS, align: int = 1) -> Value:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), typ=kind)
        value.align = align
        return value

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        place = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, place).align = align

    def loop(self, count: Value | int, carried: Sequence[Value] = ()) -> Loop:
        return Loop(self.builder, long(count) if isinstance(count, int) else count, carried)

    # Vectors

    def spread(self, scalar: Value, lanes: int = LANES) -> Value:
        """A vector of one value."""
        kind = vector(scalar.type, lanes)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(vector(INT, lanes), [0] * lanes)
        )

    def spread_at(self, address: Value) -> Value:
        """A vector of the float at an address."""
        return self.spread(self.load(address, FLOAT))

    def lane(self, run: Value, index: int) -> Value:
        """A vector of one float of a shorter one."""
        places = ir.Constant(INTS, [INT(index)] * LANES)
        return self.builder.shuffle_vector(run, ir.Constant(run.type, ir.Undefined), places)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call("llvm.fma", a, b, c)

    def call(self, name: str, *arguments: Value, **more: Any) -> Value:
        """One of LLVM's own functions that take and give values of one type."""
        kind = arguments[0].type
        return self._external(f"{name}.{_suffix(kind)}", kind, arguments, **more)

    def total(self, value: Value) -> Value:
        """The sum of a vector's floats."""
        return self._joined(value, self.builder.fadd)

    def largest(self, value: Value) -> Value:
        """The largest of a vector's floats."""
        return self._joined(value, self.most)

    def _joined(self, value: Value, join: Callable[[Value, Value], Value]) -> Value:
        # Halves are joined until one is left: the same order whatever the processor.
        lanes = value.type.count
        while lanes > 1:
            lanes //= 2
            upper = self.shuffle(value, value, range(lanes, 2 * lanes))
            value = join(self.shuffle(value, value, range(lanes)), upper)
        return self.builder.extract_element(value, ir.Constant(INT, 0))

    def shuffle(self, a: Value, b: Value, places: Sequence[int]) -> Value:
        chosen = ir.Constant(vector(INT, len(places)), list(places))
        return self.builder.shuffle_vector(a, b, chosen)

    def looked_up(self, table: Sequence[float], index: Value) -> Value:
        """Floats of a table of 16 or 32 by the lowest bits of integers, where the processor can do so."""
        first, *more = (
            ir.Constant(FLOATS, list(table[at : at + LANES])) for at in range(0, len(table), LANES)
        )
        if not more:
            return self._external("llvm.x86.avx512.permvar.sf.512", FLOATS, [first, index])
        name = "llvm.x86.avx512.vpermi2var.ps.512"
        return self._external(name, FLOATS, [first, index, more[0]])

    def most(self, one: Value, two: Value) -> Value:
        """The larger of floats; the second where there is no number among them."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, two), one, two)

    def exp(self, x: Value) -> Value:
        """e to the x for floats, to about two units in the last place; 0 where that is below them."""
        return self.exp_below(self.call("llvm.minnum", x, same(88.0)))

    def exp_below(self, x: Value) -> Value:
        """The same for what is at most 88."""
        b = self.builder
        clamped = self.most(x, same(_SMALLEST))
        # Beside so large a number there is no room for anything but whole ones.
        rounded = self.fma(clamped, same(1.4426950408889634), same(_ROUNDING))
        whole = b.fsub(rounded, same(_ROUNDING))
        rest = self.fma(whole, same(-0.693359375), clamped)
        rest = self.fma(whole, same(2.12194440e-4), rest)
        value = same(1.9875691500e-4)
        for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            value = self.fma(value, rest, same(term))
        value = self.fma(value, b.fmul(rest, rest), b.fadd(rest, same(1.0)))
        # Its low bits are the whole number, which is added to the exponent.
        power = b.shl(b.bitcast(rounded, INTS), same(23, INTS))
        scaled = b.bitcast(b.add(b.bitcast(value, INTS), power), FLOATS)
        return b.select(b.fcmp_ordered("<", x, same(_SMALLEST)), same(0.0), scaled)

    def _external(self, name: str, gives: Any, arguments: Sequence[Value], **more: Any) -> Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(gives, [a.type for a in arguments])
            function = ir.Function(module, kind, name)
        return self.builder.call(function, list(arguments), **more)


def _suffix(kind: Any) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {FLOAT: "f32", INT: "i32", LONG: "i64", HALF: "f16"}[kind]
