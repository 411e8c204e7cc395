"""The one place that touches the model: it makes caches, runs chunks of prompts and steps of the batch,
and gives logits.

It knows mlx-lm's cache classes and how the batch lies in memory, and decides nothing: what runs, how
large the batch's memory is and when a prompt joins, it is told. Prompts go by the number of their job,
rows by their place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from millrace.cache.state import Layout
from millrace.engine.measure import cost_of
from millrace.engine.memory import NOTHING, Rectangle, StateCost
from millrace.engine.shapes import Shapes
from millrace.engine.slots import (
    HELD_TWICE,
    LayerShape,
    Move,
    Positions,
    SlotKVCache,
    move_rows,
    resize_all,
)
from millrace.engine.source import PromptState, RowState
from millrace.models.adapters.slots import slots_of
from millrace.models.rotations import Rotations, peek

_MOST_A_STEP = 3
"""Tokens that a row that guesses becomes longer by with a step."""
_PARTS = 32
"""Into so many parts, at most, the work is cut when a batch's memory becomes larger before it must be."""
_PART_BYTES, _PART_BYTES_ALONE = 16 << 20, 48 << 20
"""What a part has at least, where layers are small, beside a chunk and without: memory that is new takes a
system a millisecond for every one or two of its megabytes."""

_UNPLANNED = 8
"""Tokens that a device's memory for few is wider by. Where rows are equally long and memory is a multiple
of 256 wide, MLX has cuDNN attend on CUDA, which plans for every number of rows and every width: 40 to 650
ms in the midst of streams whenever memory becomes wider. MLX's own kernel needs no plan."""
_HELD_TWICE_BY_DEVICE = 64 << 20
"""Bytes of the batch that a device copies into other memory at a time: it is waited for after each, and to
wait for every layer costs a small model more than the copies."""

ForwardPass = Callable[[Any, mx.array, list[Any]], mx.array]
"""Runs a chunk of tokens through a model on top of caches; returns its logits."""


def whole(model: Any, chunk: mx.array, caches: list[Any]) -> mx.array:
    """A chunk as one run."""
    logits: mx.array = model(chunk, cache=caches)
    return logits


class Runner:
    def __init__(
        self,
        model: Any,
        used: list[Any] | None = None,
        *,
        forward: ForwardPass = whole,
        recurring: bool = False,
    ) -> None:
        """`used` are caches that a prompt has run on; without them, one token is run here."""
        self._model = model
        self._in_place: bool = getattr(model, "in_place", False)
        """The model writes into the caches' memory: what others hold as well is copied first."""
        self._rotations: Rotations | None = getattr(model, "rotations", None)
        """Through which mlx-lm's models are told positions; others take them as arguments."""
        self._products = getattr(model, "own_products", None)
        """What the model's layers share, where they are our own: they run when they are called."""
        self._forward = forward
        self._at_once = not recurring
        """Nothing is in flight on a device of its own: what moves in memory moves when it is told to,
        layer by layer, so that no two states of the whole batch are held."""
        self._launch = mx.async_eval if recurring else mx.eval
        """Has what moves in memory moved by itself, so that a step's launches are those of every step: a
        device that keeps the plans of whole launches would make new ones for all that follow."""
        self.adapters = slots_of(model)
        if used is None:
            used = make_prompt_cache(model)
            mx.eval(model(mx.array([[0]], mx.int32), cache=used))
        margin = _UNPLANNED if recurring else 0
        self.cost: StateCost = replace(cost_of(used), margin=margin)
        plain = {i: cache for i, cache in enumerate(used) if type(cache) is KVCache}
        self._shapes = {i: LayerShape.of(cache, margin) for i, cache in plain.items()}
        self.layout = Layout.of(model)
        self.trimmable = len(self._shapes) == len(used)
        """Whether every layer can take back tokens: guesses that turn out wrong, a padded end."""
        padding = self.trimmable and not self._in_place
        self.shapes = Shapes(recurring, padding, getattr(model, "grain", 1))
        self._prompts: dict[int, list[Any]] = {}
        self._positions = Positions(self.shapes)
        self._batch: list[Any] = []
        self._size = NOTHING
        self.unsettled = False
        """The batch's memory is not as large yet as it was told to be."""
        self.row_adapters: list[int] = []
        """The rows' adapters, by slot."""
        self._deltas: list[int] = []
        """What the rows' positions differ by from their places, since pictures stand before them or
        tokens were left out."""

    @property
    def model(self) -> Any:
        return self._model

    @property
    def immediate(self) -> bool:
        """Whether a chunk has been computed when its launch returns."""
        return self._in_place

    # Prompts

    def make_caches(self) -> list[Any]:
        """Empty caches of a single row."""
        caches: list[Any] = make_prompt_cache(self._model)
        return caches

    def begin(self, job: int, width: int) -> None:
        """Make room for so many tokens of a prompt."""
        caches = self.make_caches()
        for i, shape in self._shapes.items():
            caches[i] = shape.prompt(width)
        self._prompts[job] = caches

    def adopt(self, job: int, caches: list[Any], width: int) -> None:
        """Go on with a prompt from state that is there already, with room for so many tokens."""
        for i, shape in self._shapes.items():
            caches[i] = shape.widened(caches[i], width, own=self._in_place)
        self._prompts[job] = caches

    def prompt_state(self, job: int) -> PromptState:
        """A prompt's state, for the prefix cache to keep."""
        return PromptState(self.layout, self._prompts[job])

    def release(self, job: int) -> None:
        self._prompts.pop(job, None)

    def chunk(
        self,
        job: int,
        tokens: Sequence[int],
        length: int,
        *,
        beside: bool,
        scored: bool,
        adapter: int = 0,
        sight: Any = None,
        positions: Sequence[int] | None = None,
    ) -> mx.array | None:
        """Launch the next tokens of a prompt, padded to `length`; returns their logits if they are
        `scored`.

        `beside` says that rows are running: the chunk is launched without waiting for anything. With a
        `sight`, pictures stand in the prompt; with `positions`, each token stands where they say.
        """
        caches = self._prompts[job]
        self.adapters.use([adapter])
        padded = [*tokens, *[0] * (length - len(tokens))]
        inputs = mx.array([padded], mx.int32)
        if self._in_place:
            logits: mx.array | None
            logits = self._model.run(inputs, caches, logits=scored, positions=positions)
            return logits
        forward = whole if beside or positions is not None else self._forward
        with self._heads(wanted=scored), self._at(positions, length):
            if sight is not None:
                logits = self._model(inputs, cache=caches, sight=sight)
            else:
                logits = forward(self._model, inputs, caches)
        if length > len(tokens):
            for cache in caches:
                cache.trim(length - len(tokens))
        mx.async_eval([c.state for c in caches])
        return logits[:, : len(tokens)] if scored else None

    def together(
        self,
        runs: Mapping[int, Sequence[int]],
        length: int,
        *,
        beside: bool,
        adapters: Sequence[int] = (),
    ) -> None:
        """Launch the first tokens of several prompts as one run, each padded to `length`.

        What stands after the end of a shorter one is cut off: nothing before it looks there.
        """
        self.adapters.use(adapters)
        shared = self.make_caches()
        padded = [[*run, *[0] * (length - len(run))] for run in runs.values()]
        forward = whole if beside else self._forward
        with self._heads(wanted=False):
            forward(self._model, mx.array(padded, mx.int32), shared)
        for row, (job, run) in enumerate(runs.items()):
            self._prompts[job] = [_cut(cache, row, len(run)) for cache in shared]
        mx.async_eval([c.state for job in runs for c in self._prompts[job]])

    def peek(self, job: int, token: mx.array) -> tuple[mx.array, list[mx.array | None]]:
        """Run one token behind a prompt's state: its logits, and what it looks for, layer by layer."""
        self.adapters.use([0])
        look = self._model.peek if self._in_place else partial(peek, self._model)
        found: tuple[mx.array, list[mx.array | None]] = look(token, self._prompts[job])
        return found

    def keys(self, job: int, layer: int, count: int) -> mx.array:
        """The first keys of a prompt's state, shaped (heads, tokens, size)."""
        keys: mx.array = self._prompts[job][layer].keys[0, :, :count]
        return keys

    @contextmanager
    def _at(self, positions: Sequence[int] | None, length: int) -> Iterator[None]:
        """Have a chunk's tokens stand at these positions; what it is padded by, anywhere."""
        if positions is None:
            yield
            return
        if self._rotations is None:
            raise ValueError("The model takes no positions.")
        with self._rotations.at([*positions, *[0] * (length - len(positions))]):
            yield

    @contextmanager
    def _heads(self, *, wanted: bool) -> Iterator[None]:
        """Spare the products of the head; MLX's own are not made anyway where nobody looks at them."""
        if self._products is not None:
            self._products.logits = wanted
        try:
            yield
        finally:
            if self._products is not None:
                self._products.logits = True

    def wait(self, job: int) -> None:
        if job in self._prompts:
            mx.eval([c.state for c in self._prompts[job]])

    # The batch

    def __len__(self) -> int:
        return len(self._positions.lens)

    @property
    def _slots(self) -> list[SlotKVCache]:
        return [cache for cache in self._batch if isinstance(cache, SlotKVCache)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's state."""
        return self._positions.lens

    @property
    def nbytes(self) -> int:
        held: int = sum(c.nbytes for caches in self._prompts.values() for c in caches)
        return held + sum(int(c.nbytes) for c in self._batch if c is not None)

    def reserve(self, size: Rectangle) -> None:
        """The batch's memory becomes so large with the next use of it, or when that is to be `settled`."""
        if not self._batch:
            self._batch = self._empty_batch()
        self._positions.moved += 1
        self._size = size
        self.unsettled = True

    def settle(self, tokens: int = 0, *, part: bool = False, alone: bool = False) -> None:
        """Have as much memory as was told, for so many more tokens of each row at least.

        What those do not need yet may come some layers at a time, a `part` with each call, so that no step
        waits for the whole batch to be copied: a larger one where the step has nothing else beside it.
        """
        if not self.unsettled:
            return
        rows, width = len(self), max(self._positions.lens, default=0) + tokens
        late = [cache for cache in self._slots if cache.size != self._size]
        for_now = late
        waits = all(_may_wait(cache, self._size, rows, width) for cache in late)
        if late and rows and self._at_once and waits:
            if not part:
                return
            size = _PART_BYTES_ALONE if alone else _PART_BYTES
            at_once = size // max(1, max(c.bytes_of(self._size) for c in late))
            # All have come before a row needs them.
            room = min(c.size.width for c in late) - width
            steps = max(1, min(_PARTS, room // _MOST_A_STEP))
            for_now = late[: max(1, at_once, -(-len(late) // steps))]
        self._resize(for_now, rows)
        self.unsettled = len(for_now) < len(late)

    def give_back(self) -> None:
        """Let go at once of what the batch has beyond what it was told: somebody else gets it."""
        if not self.unsettled:
            return
        large = [cache for cache in self._slots if cache.size.area > self._size.area]
        self._resize(large, len(self))
        self.unsettled = any(cache.size != self._size for cache in self._slots)

    def join(self, job: int, copies: int, length: int, adapter: int = 0, delta: int = 0) -> None:
        """Add so many rows that go on from a prompt's state after `length` tokens, whose positions are
        `delta` beyond their places."""
        caches = self._prompts.pop(job, None) or self.make_caches()
        first = len(self)
        self._positions.moved += 1
        if not self._batch:
            self._batch = self._empty_batch()
        if self.unsettled and not self._at_once:
            small = [c for c in self._slots if not c.size.holds(first + copies, length)]
            self._resize(small, first)
        copying: list[SlotKVCache] = []
        held = 0
        for i, mine in enumerate(self._batch):
            # A layer's own state is let go of as soon as the batch has it, and not held until all have.
            theirs, caches[i] = caches[i], None
            if isinstance(mine, SlotKVCache):
                if self.unsettled and not mine.size.holds(first + copies, length):
                    mine.resize(self._size, first)
                mine.join(first, theirs, copies)
                copying.append(mine)
                held += int(theirs.nbytes)
                if self._at_once and held >= HELD_TWICE:
                    mx.eval([cache.state for cache in copying])
                    copying, held = [], 0
                continue
            merged = theirs.merge([theirs] * copies)
            if mine is None:
                self._batch[i] = merged
            else:
                mine.extend(merged)
        self._launch([cache.state for cache in copying])
        self.unsettled = any(cache.size != self._size for cache in self._slots)
        self._positions.lens += [length] * copies
        self.row_adapters += [adapter] * copies
        self._deltas += [delta] * copies

    def keep_rows(self, order: list[int]) -> None:
        """The batch becomes these of its rows, in this order."""
        lens = self._positions.lens
        if not order:
            self.empty()
            return
        self.settle()
        self._positions.moved += 1
        index = mx.array(order, mx.int32)
        moves = [Move(source, target, lens[source]) for target, source in enumerate(order)]
        moves = [move for move in moves if move.source != move.target and move.length]
        if moves:
            move_rows(self._slots, moves, at_once=self._at_once)
            self._launch([cache.state for cache in self._slots])
        for cache in self._batch:
            if not isinstance(cache, SlotKVCache):
                cache.filter(index)
        self._positions.lens = [lens[i] for i in order]
        self.row_adapters = [self.row_adapters[i] for i in order]
        self._deltas = [self._deltas[i] for i in order]

    def _resize(self, slots: Sequence[SlotKVCache], rows: int) -> None:
        """Give layers the memory that was told, with what the first rows hold."""
        resize_all(slots, self._size, rows, 0 if self._at_once else _HELD_TWICE_BY_DEVICE)
        self._positions.moved += 1

    def empty(self) -> None:
        """Let go of the batch and its memory."""
        self._batch, self._size, self.unsettled = [], NOTHING, False
        self._positions.lens, self.row_adapters, self._deltas = [], [], []
        self._positions.moved += 1

    def step(self, inputs: mx.array) -> mx.array:
        """Launch the model on one or several tokens of each row; returns logits of them all.

        Of one token each, the state advances with the launch; of several, `advance` says how far.
        """
        self.settle(inputs.shape[1])
        positions, rows = self._positions, inputs.shape[0]
        positions.begin(inputs.shape[1], self._size.slots if self.trimmable else None)
        if positions.rows > rows:
            inputs = mx.pad(inputs, ((0, positions.rows - rows), (0, 0)))
        self.adapters.use([*self.row_adapters, *[0] * (inputs.shape[0] - rows)])
        more = {}
        if any(self._deltas):
            beyond = [0] * (inputs.shape[0] - rows)
            more["deltas"] = mx.array([*self._deltas, *beyond], mx.int32)
        if self._rotations is not None:
            with self._rotations.shifted(more.pop("deltas", None)):
                logits: mx.array = self._model(inputs, cache=self._batch)
        else:
            logits = self._model(inputs, cache=self._batch, **more)
        if inputs.shape[1] == 1:
            self.advance([1] * rows)
        return logits[:rows]

    def advance(self, tokens: Sequence[int]) -> None:
        self._positions.end(tokens)

    def row_state(self, row: int) -> RowState:
        """A row's state, for the prefix cache to keep."""
        self.settle()
        length = self._positions.lens[row]
        slots = [c.view(row, length) if isinstance(c, SlotKVCache) else None for c in self._batch]
        return RowState(self.layout, slots, self._batch, row)

    def _empty_batch(self) -> list[Any]:
        """Where the layers' batched state goes; None is filled by the first row's own `merge`."""
        count = len(self.make_caches())
        return [
            SlotKVCache(self._positions, self._shapes[i]) if i in self._shapes else None
            for i in range(count)
        ]


def _may_wait(layer: SlotKVCache, told: Rectangle, rows: int, width: int) -> bool:
    """Whether a layer's memory is enough for so many rows of this width, and becomes larger for others."""
    return layer.size.holds(rows, width) and told.holds(layer.size.slots, layer.size.width)


def _cut(shared: KVCache, row: int, length: int) -> KVCache:
    cache = KVCache()
    cache.keys = mx.contiguous(shared.keys[row : row + 1, :, :length])
    cache.values = mx.contiguous(shared.values[row : row + 1, :, :length])
    cache.offset = length
    return cache
