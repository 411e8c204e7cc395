"""The stages of a forward pass. A stage is one thing done to all that there is, in units that any thread
may take; what it needs lies in a record of integers, mostly addresses.

A stage's function is given its record, the number of a unit and the number of the thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from millrace.native import products, rowwise
from millrace.native.emit import FLOAT, INT, LANES, LONG, Emitter, Value, long, same
from millrace.native.formats import Format
from millrace.native.products import FLOAT_BYTES, VECTOR

WORD = 8
"""Bytes of a field of a record."""
HEAD = ("function", "units", "taken", "done", "waits")
"""The fields every record begins with: what to call and how often; the run and how many units were taken in
it; how many are done; and how many stages, from this one backwards, must be done before the next begins."""
RUN_BITS = 32
"""Above these bits of `taken` stands the number of the run."""


class Record:
    """Named fields of a stage's record."""

    def __init__(self, e: Emitter, address: Value, names: Sequence[str]) -> None:
        self._e, self._address = e, address
        self._places = {name: place for place, name in enumerate((*HEAD, *names))}

    def __getattr__(self, name: str) -> Value:
        return self._e.load(self._e.at(self._address, WORD * self._places[name]), LONG, WORD)

    def number(self, name: str) -> Value:
        """A field that holds the bits of a float."""
        b = self._e.builder
        return b.bitcast(b.trunc(getattr(self, name), INT), FLOAT)


def entry(e: Emitter, table: Value, index: Value) -> Value:
    """An integer of a table."""
    return e.load(e.at(table, e.times(index, WORD)), LONG, WORD)


NORM = ("x", "x_row", "chosen", "weight", "out", "out_row", "count", "eps", "sums", "sums_row")


def norm(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """Norm a row, chosen by a table, and sum its groups."""
    r = Record(e, record, NORM)
    x = e.at(r.x, e.times(entry(e, r.chosen, unit), r.x_row))
    out = e.at(r.out, e.times(unit, r.out_row))
    rowwise.norm(e, x, r.weight, out, r.count, r.number("eps"))
    rowwise.sums(e, out, e.at(r.sums, e.times(unit, r.sums_row)), _halved(e, r.count))


COPIED = ("x", "x_row", "out", "out_row", "count", "sums", "sums_row")


def copied(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """Copy a row, and sum its groups."""
    r = Record(e, record, COPIED)
    out = e.at(r.out, e.times(unit, r.out_row))
    one = ir.Constant(FLOAT, 1.0)
    rowwise.copy(e, e.at(r.x, e.times(unit, r.x_row)), out, r.count, one)
    rowwise.sums(e, out, e.at(r.sums, e.times(unit, r.sums_row)), _halved(e, r.count))


ADDED = ("x", "x_row", "weight", "out", "out_row", "count", "eps")


def added(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """Norm a row, and add it to another."""
    r = Record(e, record, ADDED)
    x = e.at(r.x, e.times(unit, r.x_row))
    rowwise.norm(e, x, r.weight, x, r.count, r.number("eps"))
    rowwise.add(e, x, e.at(r.out, e.times(unit, r.out_row)), r.count)


GATE = ("gate", "up", "row", "out", "out_row", "count", "sums", "sums_row")


def silu(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    _gate(e, record, unit, rowwise.silu)


def gelu(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    _gate(e, record, unit, rowwise.gelu)


PRODUCT = (
    "weights", "block_bytes", "groups", "x", "x_row", "sums", "sums_row", "out", "out_row",
    "rows", "start", "bias", "scratch", "scratch_bytes",
)  # fmt: skip
ZERO, KEEP, BIAS, KEEP_BIAS = range(4)
"""What outputs start with: nothing, what is there, the bias, or what is there and the bias."""


def streamed(
    form: Format, rows: int, blocks: int, e: Emitter, record: Value, unit: Value, thread: Value
) -> None:
    """Some blocks of a product with few rows."""
    r = Record(e, record, PRODUCT)
    first = e.times(unit, blocks)
    weights = e.at(r.weights, e.times(first, r.block_bytes))
    out = e.at(r.out, e.times(first, VECTOR))
    _begin(e, r, first, out, blocks, long(rows))
    products.stream(
        form, rows, blocks, e, weights, r.block_bytes, r.groups,
        r.x, r.x_row, r.sums, r.sums_row, out, r.out_row,
    )  # fmt: skip


def tiled(
    form: Format, rows: int, blocks: int, e: Emitter, record: Value, unit: Value, thread: Value
) -> None:
    """Some blocks of a product with many rows."""
    r = Record(e, record, PRODUCT)
    first = e.times(unit, blocks)
    weights = e.at(r.weights, e.times(first, r.block_bytes))
    out = e.at(r.out, e.times(first, VECTOR))
    _begin(e, r, first, out, blocks, r.rows)
    codes = e.at(r.scratch, e.times(thread, r.scratch_bytes))
    scales = e.at(codes, e.times(r.groups, form.group * blocks * VECTOR))
    groups = r.groups
    products.unpack(form, blocks, e, weights, r.block_bytes, groups, codes, scales)
    x, x_row, sums, sums_row, out_row = r.x, r.x_row, r.sums, r.sums_row, r.out_row
    loop = e.loop(e.builder.sdiv(r.rows, long(rows)))
    at = e.times(loop.index, rows)
    products.tile(
        form, rows, blocks, e, codes, scales, groups,
        e.at(x, e.times(at, x_row)), x_row, e.at(sums, e.times(at, sums_row)), sums_row,
        e.at(out, e.times(at, out_row)), out_row,
    )  # fmt: skip
    loop.close()


EMBED = ("tokens", "weights", "block_bytes", "groups", "out", "out_row", "factor")


def embedded(form: Format, e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """A token's row of a packed matrix."""
    b = e.builder
    r = Record(e, record, EMBED)
    token = entry(e, r.tokens, unit)
    lane = b.and_(token, long(LANES - 1))
    block = e.at(r.weights, e.times(b.lshr(token, long(4)), r.block_bytes))
    out = e.at(r.out, e.times(unit, r.out_row))
    factor = r.number("factor")
    walk = products.Groups(form, e, r.groups)
    factors = form.read_factors(e, e.at(block, walk.span_at), lane)
    walk.enter()
    scale, bias = form.read_scales(e, e.at(block, walk.group_at), factors, lane)
    runs = e.loop(form.group // form.run)
    words = form.read_run(e, e.at(block, walk.codes_at, e.times(runs.index, form.run_bytes)), lane)
    at = e.at(out, e.times(walk.number, form.group * FLOAT_BYTES))
    at = e.at(at, e.times(runs.index, form.run * FLOAT_BYTES))
    for place in range(form.run):
        value = form.code(e, words, place)
        if scale is not None:
            value = b.fmul(value, scale) if bias is None else e.fma(value, scale, bias)
        e.store(b.fmul(value, factor), e.at(at, place * FLOAT_BYTES))
    runs.close()
    walk.close()


HEADS = (
    "x", "x_row", "queries", "heads", "size", "half", "query_norm", "key_norm", "eps", "factor",
    "cosines", "sines", "angle_row", "turns", "targets", "keys", "values", "stride",
)  # fmt: skip


def headed(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """A token's queries, keys and values: normed, rotated as far as its position says, and written.

    `targets` has each token's offset into the layer's memory, `stride` the bytes from head to head.
    """
    b = e.builder
    r = Record(e, record, HEADS)
    size, heads, queries = r.size, r.heads, r.queries
    head_bytes = e.times(size, VECTOR)
    x = e.at(r.x, e.times(unit, r.x_row))
    keys_at = e.at(x, e.times(queries, head_bytes))
    values_at = e.at(keys_at, e.times(heads, head_bytes))
    written = entry(e, r.targets, unit)
    turn = e.times(entry(e, r.turns, unit), r.angle_row)
    cosines, sines = e.at(r.cosines, turn), e.at(r.sines, turn)
    eps, factor, half = r.number("eps"), r.number("factor"), r.half
    for norm_at, first, count in ((r.query_norm, x, queries), (r.key_norm, keys_at, heads)):
        loop = e.loop(count)
        head = e.at(first, e.times(loop.index, head_bytes))
        with b.if_then(b.icmp_signed("!=", norm_at, long(0))):
            rowwise.norm(e, head, norm_at, head, size, eps)
        rowwise.rotate(e, head, cosines, sines, half)
        if first is x:
            rowwise.copy(e, head, head, size, factor)
        loop.close()
    stride = entry(e, r.stride, long(0))
    one = ir.Constant(FLOAT, 1.0)
    for source, memory in ((keys_at, r.keys), (values_at, r.values)):
        target = e.at(entry(e, memory, long(0)), written)
        loop = e.loop(heads)
        at = e.at(source, e.times(loop.index, head_bytes))
        rowwise.copy(e, at, e.at(target, e.times(loop.index, stride)), size, one)
        loop.close()


def driver(
    e: Emitter,
    program: Value,
    stages: Value,
    record_bytes: Value,
    run: Value,
    thread: Value,
    give_way: Value,
) -> None:
    """Take units of a program's stages, beside other threads that do the same, until all are done.

    Nobody waits for a thread that holds no unit: one that the system has put aside comes back to stages
    that are done, or to another run, of which it takes nothing. `give_way` is the address of the system's
    own function by which a thread lets others run.
    """
    b = e.builder
    each = e.loop(stages)
    record = e.at(program, e.times(each.index, record_bytes))
    r = Record(e, record, ())
    taken, done = (
        b.inttoptr(e.at(record, WORD * HEAD.index(name)), LONG.as_pointer())
        for name in ("taken", "done")
    )
    function = b.inttoptr(r.function, ir.FunctionType(ir.VoidType(), [LONG] * 3).as_pointer())
    units, waits = r.units, r.waits
    look, try_it, take, work, leave, over = (
        b.append_basic_block(name) for name in ("look", "try", "take", "work", "leave", "over")
    )
    b.branch(look)
    b.position_at_end(look)
    seen = b.load_atomic(taken, "acquire", WORD, typ=LONG)
    b.cbranch(b.icmp_signed("==", b.lshr(seen, long(RUN_BITS)), run), try_it, leave)
    b.position_at_end(try_it)
    unit = b.and_(seen, long(2**RUN_BITS - 1))
    b.cbranch(b.icmp_signed("<", unit, units), take, over)
    b.position_at_end(take)
    swapped = b.cmpxchg(taken, seen, b.add(seen, long(1)), "acq_rel", "acquire")
    b.cbranch(b.extract_value(swapped, 1), work, look)
    b.position_at_end(work)
    b.call(function, [record, unit, thread])
    b.atomic_rmw("add", done, long(1), "acq_rel")
    b.branch(look)
    b.position_at_end(leave)
    b.ret_void()
    b.position_at_end(over)
    with b.if_then(b.icmp_signed(">", waits, long(0))):
        before = e.loop(waits)
        stage = b.sub(record, e.times(before.index, record_bytes))
        _wait(e, stage, run, leave, give_way)
        before.close()
    each.close()


def fence(e: Emitter) -> None:
    """What is written before it is seen by other threads before what is written after it."""
    e.builder.fence("seq_cst")


def _wait(e: Emitter, record: Value, run: Value, leave: Value, give_way: Value) -> None:
    """Until a stage's units are done, or are another run's: that may have fewer."""
    b = e.builder
    units = Record(e, record, ()).units
    taken, done = (
        b.inttoptr(e.at(record, WORD * HEAD.index(name)), LONG.as_pointer())
        for name in ("taken", "done")
    )
    look, still, tired, rest = (
        b.append_basic_block(name) for name in ("look", "still", "tired", "rest")
    )
    before = b.block
    b.branch(look)
    b.position_at_end(look)
    looks = b.phi(LONG)
    looks.add_incoming(long(0), before)
    now = b.load_atomic(done, "acquire", WORD, typ=LONG)
    b.cbranch(b.icmp_signed("<", now, units), still, rest)
    b.position_at_end(still)
    whose = b.lshr(b.load_atomic(taken, "acquire", WORD, typ=LONG), long(RUN_BITS))
    b.cbranch(b.icmp_signed("==", whose, run), tired, leave)
    b.position_at_end(tired)
    more = b.add(looks, long(1))
    # A thread that waits long may be on the core that another one needs.
    with b.if_then(b.icmp_signed(">", more, long(_LOOKS))):
        b.call(b.inttoptr(give_way, ir.FunctionType(INT, []).as_pointer()), [])
    looks.add_incoming(more, b.block)
    b.branch(look)
    b.position_at_end(rest)


_LOOKS = 2000


def _begin(e: Emitter, r: Record, first: Value, out: Value, blocks: int, rows: Value) -> None:
    """Give outputs what they start with."""
    b = e.builder
    start, bias, out_row = r.start, e.at(r.bias, e.times(first, VECTOR)), r.out_row
    for wanted in (ZERO, BIAS, KEEP_BIAS):
        with b.if_then(b.icmp_signed("==", start, long(wanted))):
            begin = [
                same(0.0) if wanted == ZERO else e.load(e.at(bias, n * VECTOR))
                for n in range(blocks)
            ]
            loop = e.loop(rows)
            row = e.at(out, e.times(loop.index, out_row))
            for n, value in enumerate(begin):
                at = e.at(row, n * VECTOR)
                e.store(b.fadd(e.load(at), value) if wanted == KEEP_BIAS else value, at)
            loop.close()


def _gate(e: Emitter, record: Value, unit: Value, activation: object) -> None:
    assert callable(activation)
    r = Record(e, record, GATE)
    at = e.times(unit, r.row)
    out = e.at(r.out, e.times(unit, r.out_row))
    activation(e, e.at(r.gate, at), e.at(r.up, at), out, r.count)
    rowwise.sums(e, out, e.at(r.sums, e.times(unit, r.sums_row)), _halved(e, r.count))


def _halved(e: Emitter, count: Value) -> Value:
    return e.builder.lshr(count, long(1))
