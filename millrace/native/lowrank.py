"""The stages that add an adapter's part to a product: x times A, a few numbers a token, then those times B.

Each output is one sum in one order, whatever else is run: a token gives the same bits alone and in any
company. Which factors are a token's own stands in tables, by its slot; a token without any is not visited.
"""

from __future__ import annotations

from millrace.native.emit import FLOAT, LONG, Emitter, Value, long, same
from millrace.native.products import FLOAT_BYTES, VECTOR
from millrace.native.stages import WORD, Record, entry

FACTORS = ("a", "b", "steps")
"""What a table has of each slot: where its factors lie, and how many steps of ranks they have; none where
an adapter leaves the module alone."""
STEP = 8
"""Ranks that are summed side by side; others are padded with zeros."""
WIDE = 4
"""Vectors of outputs that are summed side by side; outputs are padded to that."""

MEMBERS = ("factors", "low", "out", "wide")
"""What a table has of each product of the same inputs: its factors by slot; how far on its few numbers and
its outputs lie; and how many times four vectors of outputs it has."""

LOWERED = ("x", "x_row", "chosen", "slots", "members", "size", "low", "low_row", "count")


def lowered(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """A chosen token's inputs times its first factors, whose columns lie one after the other."""
    b = e.builder
    r = Record(e, record, LOWERED)
    token = entry(e, r.chosen, unit)
    slot, count = entry(e, r.slots, token), r.count
    x = e.at(r.x, e.times(token, r.x_row))
    rows = e.at(r.low, e.times(token, r.low_row))
    members, column = r.members, e.times(count, VECTOR)
    each = e.loop(r.size)
    factors, place, _, _ = _entries(e, members, each.index, len(MEMBERS))
    a, _, steps = _entries(e, factors, slot, len(FACTORS))
    low = e.at(rows, place)
    with b.if_then(b.icmp_signed(">", steps, long(0))):
        step = e.loop(steps)
        first = e.at(a, e.times(step.index, e.times(column, STEP)))
        loop = e.loop(count, [same(0.0)] * STEP)
        at = e.times(loop.index, VECTOR)
        value = e.load(e.at(x, at))
        totals = loop.close(
            [
                e.fma(e.load(e.at(first, at, e.times(column, k))), value, loop.carried[k])
                for k in range(STEP)
            ]
        )
        out = e.at(low, e.times(step.index, STEP * FLOAT_BYTES))
        for k, total in enumerate(totals):
            e.store(e.total(total), e.at(out, k * FLOAT_BYTES))
        step.close()
    each.close()


RAISED = (
    "out", "out_row", "chosen", "slots", "members", "size", "low", "low_row", "parts", "part",
)  # fmt: skip


def raised(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """Some outputs of a chosen token, and what its second factors make of its few numbers."""
    b = e.builder
    r = Record(e, record, RAISED)
    parts, part = r.parts, r.part
    token = entry(e, r.chosen, b.sdiv(unit, parts))
    slot = entry(e, r.slots, token)
    first = e.times(b.srem(unit, parts), part)
    rows = e.at(r.low, e.times(token, r.low_row))
    outs = e.at(r.out, e.times(token, r.out_row), e.times(first, WIDE * VECTOR))
    members = r.members
    each = e.loop(r.size)
    factors, place, column, wide = _entries(e, members, each.index, len(MEMBERS))
    _, factor, steps = _entries(e, factors, slot, len(FACTORS))
    low, out = e.at(rows, place), e.at(outs, column)
    left = b.sub(wide, first)
    count = b.select(b.icmp_signed("<", left, part), left, part)
    count = b.select(b.icmp_signed(">", steps, long(0)), count, long(0))
    factor = e.at(factor, e.times(first, WIDE * VECTOR))
    row = e.times(wide, WIDE * VECTOR)
    with b.if_then(b.icmp_signed(">", count, long(0))):
        some = e.loop(count)
        column = e.at(factor, e.times(some.index, WIDE * VECTOR))
        loop = e.loop(e.times(steps, STEP), [same(0.0)] * WIDE)
        value = e.spread(e.load(e.at(low, e.times(loop.index, FLOAT_BYTES)), FLOAT))
        at = e.at(column, e.times(loop.index, row))
        totals = loop.close(
            [e.fma(e.load(e.at(at, k * VECTOR)), value, loop.carried[k]) for k in range(WIDE)]
        )
        target = e.at(out, e.times(some.index, WIDE * VECTOR))
        for k, total in enumerate(totals):
            place = e.at(target, k * VECTOR)
            e.store(b.fadd(e.load(place), total), place)
        some.close()
    each.close()


def _entries(e: Emitter, table: Value, index: Value, count: int) -> list[Value]:
    """A row of a table."""
    at = e.at(table, e.times(index, WORD * count))
    return [e.load(e.at(at, WORD * k), LONG, WORD) for k in range(count)]
