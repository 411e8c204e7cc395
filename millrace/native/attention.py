"""Attention: queries of some tokens against a sequence's keys and values, block of keys by block.

Where a sequence's blocks lie is read from a table, so that they may be pages anywhere in memory.

A block's scores, their exponentials over the block's largest and what these give of the values are made by
themselves and then merged, block after block. Blocks have fixed places. So a token's result is the same
whether it comes alone, as one of a long prompt, or with its blocks spread over threads.
"""

from __future__ import annotations

from llvmlite import ir

from millrace.native import products, rowwise
from millrace.native.emit import FLOAT, LANES, Emitter, Value, long, same
from millrace.native.products import FLOAT_BYTES, VECTOR
from millrace.native.stages import WORD, Record, entry

BLOCK = 128
"""Keys of a block."""
MOST_QUERIES = 192
"""Queries of an item; a token has one for each head that shares a key."""
MOST_SPLIT = 12
"""Queries of an item of which the blocks are spread over threads."""
_PADDED = MOST_QUERIES + 12
_SCORES = BLOCK * FLOAT_BYTES
_STATS = 2 * FLOAT_BYTES

ITEM = ("blocks", "head", "token", "count", "place", "first", "last", "slot")
"""What a unit is: where the sequence's blocks begin in the table of blocks and the head of its keys, the
first token and how many, where that stands, blocks of keys from … to, and where the result waits to be
merged (below 0: nowhere, it is whole)."""

ATTEND = (
    "items", "x", "x_row", "keys", "values", "stride", "blocks", "size", "group", "window", "out",
    "out_row", "sums", "sums_row", "scratch", "scratch_bytes", "parts", "part_stats",
)  # fmt: skip


def scratch_bytes(head_size: int) -> int:
    """What a thread needs for itself."""
    rows = 2 * _PADDED + 12 + LANES
    return (
        rows * head_size * FLOAT_BYTES
        + 12 * _SCORES
        + head_size * _SCORES
        + (_PADDED + 12) * _STATS
    )


def part_bytes(head_size: int) -> int:
    """What an item that waits to be merged needs."""
    return MOST_SPLIT * head_size * FLOAT_BYTES


class _Scratch:
    """Where a thread's own things lie."""

    def __init__(self, e: Emitter, start: Value, head_bytes: Value) -> None:
        self.queries = start
        self.out = e.at(start, e.times(head_bytes, _PADDED))
        self.part = e.at(self.out, e.times(head_bytes, _PADDED))
        self.rest = e.at(self.part, e.times(head_bytes, 12))
        self.scores = e.at(self.rest, e.times(head_bytes, LANES))
        self.stats = e.at(self.scores, 12 * _SCORES)
        self.part_stats = e.at(self.stats, _PADDED * _STATS)
        self.keys = e.at(self.part_stats, 12 * _STATS)
        self._e = e

    def of_row(self, index: Value) -> tuple[Value, Value]:
        """Where the scores of a tile's row lie, and what is told of them."""
        e = self._e
        return e.at(self.scores, e.times(index, _SCORES)), e.at(
            self.part_stats, e.times(index, _STATS)
        )


class _Item:
    def __init__(self, e: Emitter, table: Value, unit: Value) -> None:
        at = e.at(table, e.times(unit, WORD * len(ITEM)))
        fields = [entry(e, at, long(place)) for place in range(len(ITEM))]
        self.blocks, self.head, self.token, self.count = fields[:4]
        self.place, self.first, self.last, self.slot = fields[4:]


class _Tile:
    """Queries of an item that are looked at together, before a block of keys."""

    def __init__(
        self, e: Emitter, item: _Item, first: Value, count: Value, group: Value, base: Value
    ) -> None:
        self._e, self._item, self._group, self._base = e, item, group, base
        self.first, self.count = first, count
        last = e.builder.sub(count, long(1))
        self.reach = self.high(last)
        """How far into the block the last of them sees."""

    def high(self, index: Value) -> Value:
        """How far into the block one of them sees; beyond its end, or nothing."""
        b, item = self._e.builder, self._item
        token = b.sdiv(b.add(self.first, index), self._group)
        return b.sub(b.add(b.add(item.place, token), long(1)), self._base)

    def sees_all(self, window: Value) -> Value:
        """Whether the whole block is seen by all of them."""
        b = self._e.builder
        begins = b.icmp_signed("<=", b.sub(self.reach, window), long(0))
        begins = b.or_(begins, b.icmp_signed("==", window, long(0)))
        return b.and_(begins, b.icmp_signed(">=", self.high(long(0)), long(BLOCK)))

    def bounds(self, index: Value, window: Value) -> tuple[Value, Value, Value]:
        """From where to where one of them looks in the block, and whether it does."""
        e, b = self._e, self._e.builder
        high = self.high(index)
        low = b.select(b.icmp_signed(">", window, long(0)), b.sub(high, window), long(0))
        low = _most(e, low, long(0))
        high = _least(e, high, _least(e, self.reach, long(BLOCK)))
        return low, high, b.icmp_signed("<", low, high)


def attended(rows: int, blocks: int, e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """The queries of one item; they run in tiles of so many rows, and vectors side by side."""
    b = e.builder
    r = Record(e, record, ATTEND)
    item = _Item(e, r.items, unit)
    size, group, window = r.size, r.group, r.window
    head_bytes = e.times(size, VECTOR)
    own = _Scratch(e, e.at(r.scratch, e.times(thread, r.scratch_bytes)), head_bytes)
    _gather(e, r, item, own, size, head_bytes)
    apart = e.times(item.head, entry(e, r.stride, long(0)))
    keys = e.at(entry(e, r.keys, long(0)), apart)
    values = e.at(entry(e, r.values, long(0)), apart)
    table = e.at(r.blocks, e.times(item.blocks, WORD))
    queries = b.mul(item.count, group)
    end = b.add(item.place, item.count)
    # Blocks that lie before the window of the first token are seen by none.
    seen = b.sub(b.add(item.place, long(1)), window)
    seen = b.select(b.icmp_signed(">", window, long(0)), _most(e, seen, long(0)), long(0))
    start = _most(e, b.sdiv(seen, long(BLOCK)), item.first)
    with b.if_then(b.icmp_signed("<", start, item.last)):
        each = e.loop(b.sub(item.last, start))
        block = b.add(each.index, start)
        base = e.times(block, BLOCK)
        count = _least(e, b.sub(end, base), long(BLOCK))
        offset = entry(e, table, block)
        _turn_keys(e, e.at(keys, offset), own, count, size, head_bytes)
        here = e.at(values, offset)
        tiles = e.loop(b.sdiv(b.add(queries, long(rows - 1)), long(rows)))
        first = e.times(tiles.index, rows)
        tile = _Tile(e, item, first, _least(e, b.sub(queries, first), long(rows)), group, base)
        with b.if_then(b.icmp_signed(">", tile.reach, long(0))):
            # Keys behind the one that the last query stands at are seen by none.
            seen = _least(e, tile.reach, count)
            _score(e, rows, blocks, own, first, seen, size, head_bytes)
            all_seen = tile.sees_all(window)
            _soften(e, own, tile, seen, window, all_seen)
            strips = e.loop(b.sdiv(size, long(blocks)))
            at = e.times(strips.index, blocks * VECTOR)
            products.plain(
                rows, blocks, e, e.at(here, at), head_bytes, seen,
                own.scores, long(_SCORES), e.at(own.part, at), head_bytes,
            )  # fmt: skip
            strips.close()
            _merge_tile(e, own, tile, window, all_seen, size, head_bytes)
        tiles.close()
        each.close()
    with b.if_else(b.icmp_signed("<", item.slot, long(0))) as (whole, part_of_it):
        with whole:
            _finish(e, r, item, own.out, own.stats, size, head_bytes)
        with part_of_it:
            _set_aside(e, r, item, own, queries, size, head_bytes)


def _score(
    e: Emitter,
    rows: int,
    blocks: int,
    own: _Scratch,
    first: Value,
    count: Value,
    size: Value,
    head_bytes: Value,
) -> None:
    """The scores of a tile's queries at so many keys."""
    b = e.builder
    strips = e.loop(b.sdiv(b.add(count, long(LANES * blocks - 1)), long(LANES * blocks)))
    at = e.times(strips.index, blocks * VECTOR)
    queries = e.at(own.queries, e.times(first, head_bytes))
    products.plain(
        rows, blocks, e, e.at(own.keys, at), long(_SCORES), e.times(size, LANES),
        queries, head_bytes, e.at(own.scores, at), long(_SCORES),
    )  # fmt: skip
    strips.close()


def _soften(
    e: Emitter, own: _Scratch, tile: _Tile, count: Value, window: Value, all_seen: Value
) -> None:
    """From a tile's scores to their exponentials."""
    b = e.builder
    with b.if_else(all_seen) as (whole, masked):
        with whole:
            row = e.loop(tile.count)
            scores, stats = own.of_row(row.index)
            rowwise.whole_softmax(e, scores, BLOCK // LANES, stats)
            row.close()
        with masked:
            vectors = b.sdiv(b.add(count, long(LANES - 1)), long(LANES))
            row = e.loop(tile.count)
            low, high, looks = tile.bounds(row.index, window)
            with b.if_then(looks):
                scores, stats = own.of_row(row.index)
                rowwise.softmax(e, scores, vectors, low, high, stats)
            row.close()


def _merge_tile(
    e: Emitter,
    own: _Scratch,
    tile: _Tile,
    window: Value,
    all_seen: Value,
    size: Value,
    head_bytes: Value,
) -> None:
    """Add what a block gave to a tile's queries to what those before it did."""
    b = e.builder

    def merge(index: Value) -> None:
        query = b.add(tile.first, index)
        out, stats = e.times(query, head_bytes), e.times(query, _STATS)
        part, part_stats = e.times(index, head_bytes), e.times(index, _STATS)
        rowwise.merge(
            e, e.at(own.out, out), e.at(own.stats, stats),
            e.at(own.part, part), e.at(own.part_stats, part_stats), size,
        )  # fmt: skip

    with b.if_else(all_seen) as (whole, masked):
        with whole:
            row = e.loop(tile.count)
            merge(row.index)
            row.close()
        with masked:
            row = e.loop(tile.count)
            with b.if_then(tile.bounds(row.index, window)[2]):
                merge(row.index)
            row.close()


MERGE = ("items", "size", "group", "out", "out_row", "sums", "sums_row", "scratch", "scratch_bytes",
         "parts", "part_stats")  # fmt: skip


def merged(e: Emitter, record: Value, unit: Value, thread: Value) -> None:
    """The parts of an item, whose `first` … `last` are the places where they wait."""
    b = e.builder
    r = Record(e, record, MERGE)
    item = _Item(e, r.items, unit)
    size, group = r.size, r.group
    head_bytes = e.times(size, VECTOR)
    own = _Scratch(e, e.at(r.scratch, e.times(thread, r.scratch_bytes)), head_bytes)
    queries = b.mul(item.count, group)
    parts, part_stats = r.parts, r.part_stats
    loop = e.loop(queries)
    out = e.at(own.out, e.times(loop.index, head_bytes))
    stats = e.at(own.stats, e.times(loop.index, _STATS))
    _clear(e, out, stats, size)
    each = e.loop(b.sub(item.last, item.first))
    slot = e.at(e.times(b.add(item.first, each.index), MOST_SPLIT), loop.index)
    with_ = e.at(part_stats, e.times(slot, _STATS))
    # A block that the window hides has no largest score.
    seen = b.fcmp_ordered(">", e.load(with_, FLOAT), ir.Constant(FLOAT, float("-inf")))
    with b.if_then(seen):
        rowwise.merge(e, out, stats, e.at(parts, e.times(slot, head_bytes)), with_, size)
    each.close()
    loop.close()
    _finish(e, r, item, own.out, own.stats, size, head_bytes)


def _most(e: Emitter, one: Value, two: Value) -> Value:
    return e.builder.select(e.builder.icmp_signed(">", one, two), one, two)


def _least(e: Emitter, one: Value, two: Value) -> Value:
    return e.builder.select(e.builder.icmp_signed("<", one, two), one, two)


def _gather(
    e: Emitter, r: Record, item: _Item, own: _Scratch, size: Value, head_bytes: Value
) -> None:
    """Lay an item's queries side by side, token by token, and begin their results."""
    group = r.group
    x = e.at(r.x, e.times(e.times(item.head, group), head_bytes))
    x_row = r.x_row
    one = ir.Constant(FLOAT, 1.0)
    tokens = e.loop(item.count)
    token = e.at(x, e.times(e.at(item.token, tokens.index), x_row))
    heads = e.loop(group)
    at = e.at(e.times(tokens.index, group), heads.index)
    source = e.at(token, e.times(heads.index, head_bytes))
    rowwise.copy(e, source, e.at(own.queries, e.times(at, head_bytes)), size, one)
    out = e.at(own.out, e.times(at, head_bytes))
    _clear(e, out, e.at(own.stats, e.times(at, _STATS)), size)
    heads.close()
    tokens.close()


def _clear(e: Emitter, out: Value, stats: Value, size: Value) -> None:
    loop = e.loop(size)
    e.store(same(0.0), e.at(out, e.times(loop.index, VECTOR)))
    loop.close()
    e.store(ir.Constant(FLOAT, float("-inf")), stats)
    e.store(ir.Constant(FLOAT, 0.0), e.at(stats, FLOAT_BYTES))


def _turn_keys(
    e: Emitter, keys: Value, own: _Scratch, count: Value, size: Value, head_bytes: Value
) -> None:
    """A block's keys as columns. What lies behind the last key is never read from its place."""
    b = e.builder
    strips = b.lshr(count, long(4))
    rest = b.and_(count, long(LANES - 1))
    with b.if_then(b.icmp_signed(">", strips, long(0))):
        loop = e.loop(strips)
        source = e.at(keys, e.times(e.times(loop.index, LANES), head_bytes))
        target = e.at(own.keys, e.times(loop.index, VECTOR))
        rowwise.transpose(e, source, head_bytes, target, long(_SCORES), size)
        loop.close()
    with b.if_then(b.icmp_signed(">", rest, long(0))):
        source = e.at(keys, e.times(e.times(strips, LANES), head_bytes))
        rowwise.copy(e, source, own.rest, b.mul(rest, size), ir.Constant(FLOAT, 1.0))
        target = e.at(own.keys, e.times(strips, VECTOR))
        rowwise.transpose(e, own.rest, head_bytes, target, long(_SCORES), size)


def _finish(
    e: Emitter, r: Record, item: _Item, source: Value, stats: Value, size: Value, head_bytes: Value
) -> None:
    """Write results to where the next product reads them, with the sums of their groups."""
    b = e.builder
    group, out_row, sums_row = r.group, r.out_row, r.sums_row
    halved = b.lshr(size, long(1))
    out = e.at(r.out, e.times(e.times(item.head, group), head_bytes))
    sums = e.at(r.sums, e.times(e.times(e.times(item.head, group), halved), FLOAT_BYTES))
    tokens = e.loop(item.count)
    token = e.at(item.token, tokens.index)
    heads = e.loop(group)
    at = e.at(e.times(tokens.index, group), heads.index)
    target = e.at(out, e.times(token, out_row), e.times(heads.index, head_bytes))
    by = e.at(stats, e.times(at, _STATS), FLOAT_BYTES)
    rowwise.divide(e, e.at(source, e.times(at, head_bytes)), by, target, size)
    of_head = e.times(e.times(heads.index, halved), FLOAT_BYTES)
    rowwise.sums(e, target, e.at(sums, e.times(token, sums_row), of_head), halved)
    heads.close()
    tokens.close()


def _set_aside(
    e: Emitter,
    r: Record,
    item: _Item,
    own: _Scratch,
    queries: Value,
    size: Value,
    head_bytes: Value,
) -> None:
    slot = e.times(item.slot, MOST_SPLIT)
    target = e.at(r.parts, e.times(slot, head_bytes))
    one = ir.Constant(FLOAT, 1.0)
    rowwise.copy(e, own.out, target, e.builder.mul(queries, size), one)
    stats = e.at(r.part_stats, e.times(slot, _STATS))
    loop = e.loop(queries)
    at = e.times(loop.index, _STATS)
    for field in (0, FLOAT_BYTES):
        e.store(e.load(e.at(own.stats, at, field), FLOAT), e.at(stats, at, field))
    loop.close()
