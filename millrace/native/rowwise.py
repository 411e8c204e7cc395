"""What is done to a row by itself: norms, sums, rotations, activations, softmax.

Counts are of vectors of sixteen floats unless they say otherwise.
"""

from __future__ import annotations

import math

from llvmlite import ir

from millrace.native.emit import FLOAT, INT, INTS, LANES, Emitter, Value, same
from millrace.native.products import FLOAT_BYTES, VECTOR

Address = Value


def norm(e: Emitter, x: Address, weight: Address, out: Address, count: Value, eps: Value) -> None:
    """Divide by the root of the mean square, and scale."""
    b = e.builder
    squares = e.loop(count, [same(0.0)])
    value = e.load(e.at(x, e.times(squares.index, VECTOR)))
    (total,) = squares.close([e.fma(value, value, squares.carried[0])])
    size = b.uitofp(e.times(count, LANES), FLOAT)
    mean = b.fdiv(e.total(total), size)
    factor = b.fdiv(ir.Constant(FLOAT, 1.0), e.call("llvm.sqrt", b.fadd(mean, eps)))
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    scaled = b.fmul(e.load(e.at(x, at)), e.spread(factor))
    e.store(b.fmul(scaled, e.load(e.at(weight, at))), e.at(out, at))
    loop.close()


def sums(e: Emitter, x: Address, out: Address, count: Value) -> None:
    """The sums of every 32 floats; `count` is how many of them."""
    loop = e.loop(count)
    at = e.at(x, e.times(loop.index, 2 * VECTOR))
    both = e.builder.fadd(e.load(at), e.load(e.at(at, VECTOR)))
    e.store(e.total(both), e.at(out, e.times(loop.index, FLOAT_BYTES)))
    loop.close()


def copy(e: Emitter, x: Address, out: Address, count: Value, factor: Value) -> None:
    """Copy, times a factor."""
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    e.store(e.builder.fmul(e.load(e.at(x, at)), e.spread(factor)), e.at(out, at))
    loop.close()


def add(e: Emitter, x: Address, out: Address, count: Value) -> None:
    """Add to what is there."""
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    e.store(e.builder.fadd(e.load(e.at(out, at)), e.load(e.at(x, at))), e.at(out, at))
    loop.close()


def divide(e: Emitter, x: Address, by: Address, out: Address, count: Value) -> None:
    """Copy, divided by the float at an address."""
    factor = e.spread_at(by)
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    e.store(e.builder.fdiv(e.load(e.at(x, at)), factor), e.at(out, at))
    loop.close()


def rotate(e: Emitter, x: Address, cosines: Address, sines: Address, half: Value) -> None:
    """Turn pairs of a head's floats, each with the one half a head further on."""
    b = e.builder
    apart = e.times(half, VECTOR)
    loop = e.loop(half)
    at = e.times(loop.index, VECTOR)
    first, second = e.at(x, at), e.at(x, at, apart)
    one, two = e.load(first), e.load(second)
    cosine, sine = e.load(e.at(cosines, at)), e.load(e.at(sines, at))
    e.store(b.fsub(b.fmul(one, cosine), b.fmul(two, sine)), first)
    e.store(b.fadd(b.fmul(two, cosine), b.fmul(one, sine)), second)
    loop.close()


def silu(e: Emitter, gate: Address, up: Address, out: Address, count: Value) -> None:
    _gated(e, gate, up, out, count, _silu)


def gelu(e: Emitter, gate: Address, up: Address, out: Address, count: Value) -> None:
    """The approximation by a hyperbolic tangent."""
    _gated(e, gate, up, out, count, _gelu)


def softmax(e: Emitter, x: Address, count: Value, low: Value, high: Value, stats: Address) -> None:
    """Exponentials of the scores at places `low` … `high` - 1, over the largest; others are 0.

    The largest score and the sum go to `stats`. There is at least one such place.
    """
    b = e.builder
    bounds = [e.spread(b.trunc(bound, INT)) for bound in (low, high)]
    lanes = ir.Constant(INTS, list(range(LANES)))

    def visible(index: Value) -> Value:
        at = b.add(lanes, e.spread(b.trunc(e.times(index, LANES), INT)))
        return b.and_(b.icmp_signed(">=", at, bounds[0]), b.icmp_signed("<", at, bounds[1]))

    hidden = same(float("-inf"))
    first = e.loop(count, [hidden])
    score = e.load(e.at(x, e.times(first.index, VECTOR)))
    score = b.select(visible(first.index), score, hidden)
    (largest,) = first.close([e.most(score, first.carried[0])])
    top = e.largest(largest)
    loop = e.loop(count, [same(0.0)])
    at = e.at(x, e.times(loop.index, VECTOR))
    power = e.exp_below(b.fsub(e.load(at), e.spread(top)))
    power = b.select(visible(loop.index), power, same(0.0))
    e.store(power, at)
    (total,) = loop.close([b.fadd(loop.carried[0], power)])
    e.store(top, stats)
    e.store(e.total(total), e.at(stats, FLOAT_BYTES))


def whole_softmax(e: Emitter, x: Address, count: int, stats: Address) -> None:
    """The same, bit for bit, where every place is to be seen."""
    b = e.builder
    scores = [e.load(e.at(x, n * VECTOR)) for n in range(count)]
    largest = scores
    while len(largest) > 1:
        pairs = zip(largest[::2], largest[1::2], strict=True)
        largest = [e.most(one, two) for one, two in pairs]
    top = e.largest(largest[0])
    each = e.spread(top)
    total = same(0.0)
    for n, score in enumerate(scores):
        power = e.exp_below(b.fsub(score, each))
        e.store(power, e.at(x, n * VECTOR))
        total = b.fadd(total, power)
    e.store(top, stats)
    e.store(e.total(total), e.at(stats, FLOAT_BYTES))


def merge(
    e: Emitter, out: Address, stats: Address, part: Address, with_: Address, count: Value
) -> None:
    """Add a block's part of a softmax to what the blocks before it gave."""
    b = e.builder
    old, new = e.load(stats, FLOAT), e.load(with_, FLOAT)
    # Over the larger of the two, the other is less and this one is itself.
    later = b.fcmp_ordered(">", new, old)
    apart = b.fsub(old, new)
    less = e.exp(e.spread(b.select(later, apart, b.fneg(apart))))
    top = b.select(later, new, old)
    factors = b.select(later, less, same(1.0)), b.select(later, same(1.0), less)
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    before = b.fmul(e.load(e.at(out, at)), factors[0])
    e.store(e.fma(e.load(e.at(part, at)), factors[1], before), e.at(out, at))
    loop.close()
    old_sum, new_sum = (e.spread_at(e.at(each, FLOAT_BYTES)) for each in (stats, with_))
    total = e.fma(new_sum, factors[1], b.fmul(old_sum, factors[0]))
    e.store(top, stats)
    e.store(b.extract_element(total, ir.Constant(INT, 0)), e.at(stats, FLOAT_BYTES))


def transpose(
    e: Emitter, x: Address, x_row: Value, out: Address, out_row: Value, count: Value
) -> None:
    """Sixteen rows of `count` vectors become columns."""
    loop = e.loop(count)
    source = e.at(x, e.times(loop.index, VECTOR))
    target = e.at(out, e.times(e.times(loop.index, LANES), out_row))
    rows = [e.load(e.at(source, e.times(x_row, i))) for i in range(LANES)]
    for size in (8, 4, 2, 1):
        upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & size:
                one, two = rows[i], rows[i + size]
                rows[i], rows[i + size] = e.shuffle(one, two, upper), e.shuffle(one, two, lower)
    for i, row in enumerate(rows):
        e.store(row, e.at(target, e.times(out_row, i)))
    loop.close()


def _gated(
    e: Emitter, gate: Address, up: Address, out: Address, count: Value, activation: object
) -> None:
    assert callable(activation)
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    active = activation(e, e.load(e.at(gate, at)))
    e.store(e.builder.fmul(active, e.load(e.at(up, at))), e.at(out, at))
    loop.close()


def _silu(e: Emitter, x: Value) -> Value:
    b = e.builder
    return b.fdiv(x, b.fadd(same(1.0), e.exp(b.fsub(same(-0.0), x))))


def _gelu(e: Emitter, x: Value) -> Value:
    b = e.builder
    cubed = b.fmul(b.fmul(x, x), x)
    inner = b.fmul(same(math.sqrt(2 / math.pi)), e.fma(same(0.044715), cubed, x))
    grown = e.exp(b.fmul(same(2.0), inner))
    # 1 + tanh y is 2 - 2 / (1 + e^2y).
    both = b.fsub(same(2.0), b.fdiv(same(2.0), b.fadd(same(1.0), grown)))
    return b.fmul(b.fmul(same(0.5), x), both)
