"""What the engine's prompts and rows find in the prefix cache, and what they leave there. Pure."""

from __future__ import annotations

from millrace.cache.index import PrefixIndex
from millrace.cache.observations import AnyObservation
from millrace.cache.operations import Source
from millrace.cache.residency import Operations
from millrace.engine.sequences import Prefill, Sequence


class CacheUse:
    def __init__(self, index: PrefixIndex, every: int, *, uncut: bool) -> None:
        self.index = index
        self._every = every
        """Tokens between checkpoints where nothing else asks for one."""
        self._uncut = uncut
        """Some of the model's state is kept at places only."""

    def expect(self, prefill: Prefill, out: Operations) -> None:
        """A prompt has come: see what is known of it, and begin to read what is on disk."""
        self._pause(prefill)
        if not prefill.wants_logprobs:
            prefill.known = self.index.known(prefill.salt, _reusable(prefill))
            prefill.ticket = self.index.fetch(out, prefill.salt, _reusable(prefill))
            prefill.blocked = self.index.waits(prefill.ticket)

    def narrowed(self, prefill: Prefill) -> None:
        """Some of the prompt is left out, of which nothing had been known."""
        self._pause(prefill)
        prefill.known = min(prefill.known, prefill.exact)

    def _pause(self, prefill: Prefill) -> None:
        if self._uncut:
            last = min(len(prefill.tokens) - 1, prefill.exact)
            steps = range(self._every, last, self._every)
            boundaries = [b for b in prefill.request.boundaries if b < last]
            prefill.pauses = sorted({*steps, *boundaries, last})

    def observe(
        self, events: list[AnyObservation], prefills: list[Prefill], out: Operations, now: float
    ) -> None:
        """Learn what the disk has brought, for those that wait for it too."""
        for event in events:
            self.index.observe(out, event, now)
        for prefill in prefills:
            prefill.blocked = prefill.blocked and self.index.waits(prefill.ticket)

    def begin(self, prefill: Prefill, out: Operations, now: float) -> None:
        """A prompt is about to run: what is known need not be."""
        found = self.index.restore(
            out, prefill.number, prefill.salt, _reusable(prefill), prefill.ticket, now
        )
        prefill.ticket = None
        if found is not None:
            prefill.done = found.at
            if not prefill.demoted:
                prefill.hit, prefill.cached = found.hit, found.at

    def ran(self, prefill: Prefill, out: Operations, now: float) -> None:
        """A chunk of a prompt has been launched."""
        end = prefill.done == len(prefill.tokens) - 1
        boundary = end or prefill.done in prefill.request.boundaries
        pause = boundary or prefill.done in prefill.pauses
        if prefill.done > prefill.exact:
            boundary = pause = False
        prefill.written += self._keep(prefill, out, now, state=pause, boundary=boundary)

    def dropped(self, prefill: Prefill, out: Operations, now: float) -> None:
        """A prompt is given up half-way: whoever asks again goes on from here."""
        if self._uncut and 0 < prefill.done <= prefill.exact:
            self._keep(prefill, out, now, state=True, boundary=False)

    def unwanted(self, prefill: Prefill) -> None:
        """A prompt is given up before it began."""
        self.index.abandon(prefill.ticket)
        prefill.ticket, prefill.blocked = None, False

    def _keep(
        self, prefill: Prefill, out: Operations, now: float, *, state: bool, boundary: bool
    ) -> int:
        return self.index.keep(
            out,
            Source("prefill", prefill.number),
            prefill.salt,
            prefill.tokens[: min(prefill.done, prefill.exact)],
            state=state,
            boundary=boundary,
            now=now,
            owner=prefill.request.id,
        )

    def row(self, sequence: Sequence, out: Operations, now: float) -> None:
        """A row leaves the batch."""
        if sequence.kept is not None:
            return  # what of it is exact was kept when its prompt ran
        tokens = [*sequence.keys, *sequence.tokens]
        # A token that was drawn and never read may have been run: what follows it is unknown.
        known = sequence.held <= len(tokens)
        self.index.keep(
            out,
            Source("row", sequence.number),
            sequence.request.cache_salt,
            tokens[: sequence.held],
            state=known,
            boundary=True,
            now=now,
            owner=sequence.request.id,
        )


def _reusable(prefill: Prefill) -> list[int]:
    """The tokens whose state may be another's: none after one that is left out. Of those that are looked
    for, one is always left to run."""
    return prefill.tokens if prefill.kept is None else prefill.tokens[: prefill.exact + 1]
