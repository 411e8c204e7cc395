"""State as the prefix cache keeps it: of a prompt that runs by itself, or of a row of the batch."""

from __future__ import annotations

from typing import Any

from millrace.cache.state import KVSegment, Layout, StateCheckpoint, checkpoint_of, from_caches


class PromptState:
    """The state of a prompt that runs by itself."""

    def __init__(self, layout: Layout, caches: list[Any]) -> None:
        self._layout = layout
        self._caches = caches

    def segment(self, start: int, end: int, pack: bool) -> KVSegment:
        return from_caches(self._layout, self._caches, start, end, pack)

    def checkpoint(self) -> StateCheckpoint:
        return checkpoint_of(self._layout, self._caches)


class RowState(PromptState):
    """The state of a row of the batch."""

    def __init__(self, layout: Layout, slots: list[Any], batch: list[Any], row: int) -> None:
        super().__init__(layout, slots)
        self._batch = batch
        self._row = row

    def checkpoint(self) -> StateCheckpoint:
        alone = {i: self._batch[i].extract(self._row) for i in self._layout.rest}
        return checkpoint_of(self._layout, alone)
