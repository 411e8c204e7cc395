"""Products of rows with packed weights.

Every output is one sum in one order, whatever the number of rows: for each group the codes times the
inputs, input after input; then scale times that, and bias times the sum of the group's inputs, are added to
what was there. So a row alone, in a batch and in a long prompt gives the same bits.

Few rows stream the weights through registers. For many, a block's codes are written out as floats once and
tiles of rows run over them.
"""

from __future__ import annotations

from millrace.native.compile import multiplies_by_lanes
from millrace.native.emit import FLOAT, LANES, Emitter, Value, long, same, vector
from millrace.native.formats import Format

SUMS = 32
"""Inputs of which the sum is given to products with biases."""
TOGETHER, MOST_TOGETHER = 32, 4
"""Inputs that a streamed kernel takes without a jump between them, and for how many rows it does so."""
FLOAT_BYTES = 4
VECTOR = LANES * FLOAT_BYTES

Address = Value


class Groups:
    """A walk over a block's groups: span after span, and group after group in each."""

    def __init__(self, form: Format, e: Emitter, groups: Value) -> None:
        self._form, self._e = form, e
        self._spans = e.loop(e.builder.udiv(groups, long(form.span)))
        self.span_at = e.times(self._spans.index, form.span_bytes)

    def enter(self) -> None:
        """Go from what a span's groups share to each of them."""
        form, e = self._form, self._e
        self._groups = e.loop(form.span)
        self.number = e.at(e.times(self._spans.index, form.span), self._groups.index)
        within = e.at(e.times(self._groups.index, form.group_bytes), form.span_head_bytes)
        self.group_at = e.at(self.span_at, within)
        self.codes_at = e.at(self.group_at, form.head_bytes)

    def close(self) -> None:
        self._groups.close()
        self._spans.close()


def stream(
    form: Format,
    rows: int,
    blocks: int,
    e: Emitter,
    weights: Address,
    block_bytes: Value,
    groups: Value,
    x: Address,
    x_row: Value,
    sums: Address,
    sums_row: Value,
    out: Address,
    out_row: Value,
) -> None:
    """Add to `blocks` blocks of outputs of `rows` rows what their inputs give."""
    starts = [e.at(weights, e.times(block_bytes, n)) for n in range(blocks)]
    inputs = [e.at(x, e.times(x_row, m)) for m in range(rows)]
    totals = [e.at(sums, e.times(sums_row, m)) for m in range(rows)]
    outputs = [e.at(out, e.times(out_row, m)) for m in range(rows)]
    walk = Groups(form, e, groups)
    factors = [form.read_factors(e, e.at(start, walk.span_at)) for start in starts]
    walk.enter()
    first = e.times(walk.number, form.group * FLOAT_BYTES)
    together = max(1, min(form.group, TOGETHER) // form.run) if rows <= MOST_TOGETHER else 1
    runs = e.loop(form.group // form.run // together, [same(0.0)] * (rows * blocks))
    parts = list(runs.carried)
    at = e.at(walk.codes_at, e.times(runs.index, together * form.run_bytes))
    k = e.at(first, e.times(runs.index, together * form.run * FLOAT_BYTES))
    for run in range(together):
        loaded = [form.read_run(e, e.at(start, at, run * form.run_bytes)) for start in starts]
        for place in range(form.run):
            offset = (run * form.run + place) * FLOAT_BYTES
            each = [e.spread_at(e.at(row, k, offset)) for row in inputs]
            for n, words in enumerate(loaded):
                code = form.code(e, words, place)
                for m in range(rows):
                    parts[m * blocks + n] = e.fma(code, each[m], parts[m * blocks + n])
    parts = runs.close(parts)
    scales = [
        form.read_scales(e, e.at(start, walk.group_at), own)
        for start, own in zip(starts, factors, strict=True)
    ]
    for m in range(rows):
        total = _total(e, form, inputs[m], totals[m], walk.number)
        for n in range(blocks):
            _add(e, parts[m * blocks + n], *scales[n], total, e.at(outputs[m], n * VECTOR))
    walk.close()


def unpack(
    form: Format,
    blocks: int,
    e: Emitter,
    weights: Address,
    block_bytes: Value,
    groups: Value,
    codes: Address,
    scales: Address,
) -> None:
    """Write blocks out as floats, block beside block: their codes, and scales and biases by group."""
    starts = [e.at(weights, e.times(block_bytes, n)) for n in range(blocks)]
    walk = Groups(form, e, groups)
    factors = [form.read_factors(e, e.at(start, walk.span_at)) for start in starts]
    walk.enter()
    target = e.at(codes, e.times(walk.number, form.group * blocks * VECTOR))
    runs = e.loop(form.group // form.run)
    at = e.at(walk.codes_at, e.times(runs.index, form.run_bytes))
    place_at = e.at(target, e.times(runs.index, form.run * blocks * VECTOR))
    for n, start in enumerate(starts):
        words = form.read_run(e, e.at(start, at))
        for place in range(form.run):
            e.store(
                form.code(e, words, place), e.at(place_at, (place * blocks + n) * VECTOR), VECTOR
            )
    runs.close()
    if form.scales != "none":
        kept = e.at(scales, e.times(walk.number, 2 * blocks * VECTOR))
        for n, start in enumerate(starts):
            scale, bias = form.read_scales(e, e.at(start, walk.group_at), factors[n])
            e.store(scale, e.at(kept, n * VECTOR), VECTOR)
            if bias is not None:
                e.store(bias, e.at(kept, (blocks + n) * VECTOR), VECTOR)
    walk.close()


def tile(
    form: Format,
    rows: int,
    blocks: int,
    e: Emitter,
    codes: Address,
    scales: Address,
    groups: Value,
    x: Address,
    x_row: Value,
    sums: Address,
    sums_row: Value,
    out: Address,
    out_row: Value,
) -> None:
    """The same as `stream`, from codes that have been unpacked."""
    unrolled = 4
    inputs = [e.at(x, e.times(x_row, m)) for m in range(rows)]
    totals = [e.at(sums, e.times(sums_row, m)) for m in range(rows)]
    outputs = [e.at(out, e.times(out_row, m)) for m in range(rows)]
    group = e.loop(groups)
    source = e.at(codes, e.times(group.index, form.group * blocks * VECTOR))
    first = e.times(group.index, form.group * FLOAT_BYTES)
    inner = e.loop(form.group // unrolled, [same(0.0)] * (rows * blocks))
    parts = list(inner.carried)
    at = e.at(source, e.times(inner.index, unrolled * blocks * VECTOR))
    k = e.at(first, e.times(inner.index, unrolled * FLOAT_BYTES))
    runs: list[Value] = []
    if multiplies_by_lanes():
        runs = [e.load(e.at(row, k), vector(FLOAT, unrolled)) for row in inputs]
    for step in range(unrolled):
        loaded = [
            e.load(e.at(at, (step * blocks + n) * VECTOR), align=VECTOR) for n in range(blocks)
        ]
        for m in range(rows):
            if runs:
                each = e.lane(runs[m], step)
            else:
                each = e.spread_at(e.at(inputs[m], k, step * FLOAT_BYTES))
            for n in range(blocks):
                parts[m * blocks + n] = e.fma(loaded[n], each, parts[m * blocks + n])
    parts = inner.close(parts)
    kept = e.at(scales, e.times(group.index, 2 * blocks * VECTOR))
    read: list[tuple[Value | None, Value | None]] = []
    for n in range(blocks):
        scale = e.load(e.at(kept, n * VECTOR)) if form.scales != "none" else None
        bias = e.load(e.at(kept, (blocks + n) * VECTOR)) if form.biased else None
        read.append((scale, bias))
    for m in range(rows):
        total = _total(e, form, inputs[m], totals[m], group.index)
        for n in range(blocks):
            _add(e, parts[m * blocks + n], *read[n], total, e.at(outputs[m], n * VECTOR))
    group.close()


def plain(
    rows: int,
    blocks: int,
    e: Emitter,
    columns: Address,
    columns_row: Value,
    count: Value,
    x: Address,
    x_row: Value,
    out: Address,
    out_row: Value,
) -> None:
    """Set `blocks` vectors of `rows` rows to their inputs times a matrix of floats, input after input."""
    inputs = [e.at(x, e.times(x_row, m)) for m in range(rows)]
    loop = e.loop(count, [same(0.0)] * (rows * blocks))
    parts = list(loop.carried)
    at = e.at(columns, e.times(loop.index, columns_row))
    k = e.times(loop.index, FLOAT_BYTES)
    loaded = [e.load(e.at(at, n * VECTOR)) for n in range(blocks)]
    for m in range(rows):
        each = e.spread_at(e.at(inputs[m], k))
        for n in range(blocks):
            parts[m * blocks + n] = e.fma(loaded[n], each, parts[m * blocks + n])
    parts = loop.close(parts)
    for m in range(rows):
        for n in range(blocks):
            e.store(parts[m * blocks + n], e.at(out, e.times(out_row, m), n * VECTOR))


def _total(e: Emitter, form: Format, x: Address, sums: Address, group: Value) -> Value | None:
    """The sum of a group's inputs, where there is a bias to multiply it with."""
    if not form.biased:
        return None
    if form.group == LANES:
        return e.spread(e.total(e.load(e.at(x, e.times(group, VECTOR)))))
    count = form.group // SUMS
    first = e.at(sums, e.times(group, count * FLOAT_BYTES))
    total = e.load(first, FLOAT)
    for more in range(1, count):
        total = e.builder.fadd(total, e.load(e.at(first, more * FLOAT_BYTES), FLOAT))
    return e.spread(total)


def _add(
    e: Emitter,
    part: Value,
    scale: Value | None,
    bias: Value | None,
    total: Value | None,
    out: Address,
) -> None:
    there = e.load(out)
    added = e.builder.fadd(there, part) if scale is None else e.fma(scale, part, there)
    if bias is not None:
        added = e.fma(bias, total, added)
    e.store(added, out)
