"""The pictures of requests: which are wanted of the front, which the vision tower runs on next, whose
features are kept, and how far a prompt can run with those there are.

Pure. It knows digests, places and sizes, and no pixel. Features are shared by all requests and given up
when room is short, those that nobody is about to need first; what was given up is asked for again.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from millrace.cache.residency import Operations
from millrace.engine.sequences import Prefill
from millrace.engine.turn import DropPictures, EncodePicture, PictureResult
from millrace.protocol import PictureCounts, PicturesWanted, Span, Submit

AHEAD = 4
"""Pictures of one request whose pixels may be on their way or wait to be encoded."""
MOST_AHEAD = 8
"""The same for all requests together."""
_FADING = 0.97
"""Stages are not all alike: how much of the longest one's time is still expected of the next."""
_GROWTH = 2
"""Of one picture, at most so many times as many stages are run as the last time."""
_OUTSIDE = 1 << 62
"""Above every vocabulary."""


def misplaced(request: Submit) -> str | None:
    """Why a request's pictures cannot stand where they are said to."""
    done = 0
    for span in request.media:
        if span.start < done or span.length < 1:
            return "A request's pictures overlap, or are not in order."
        done = span.start + span.length
    if request.media and done > len(request.prompt) - 1:
        return "A picture reaches beyond what its prompt has before its last token."
    return None


def keys_of(request: Submit) -> list[int]:
    """The prompt as the prefix cache knows it: a picture's tokens are what it shows, not placeholders."""
    if not request.media:
        return request.prompt
    keys = list(request.prompt)
    for span in request.media:
        keys[span.start : span.start + span.length] = _keys(span)
    return keys


def _keys(span: Span) -> Iterator[int]:
    name = f"{span.digest}\0{span.length}\0{span.grid}"
    bits = hashlib.shake_256(name.encode()).digest(8 * span.length)
    return (_OUTSIDE | number >> 2 for number in struct.unpack(f"<{span.length}Q", bits))


class _State(enum.Enum):
    ASKED = enum.auto()
    HERE = enum.auto()
    """Its pixels are."""
    ENCODED = enum.auto()


@dataclass
class _Known:
    state: _State
    request: int
    """Through which it was asked for."""
    nbytes: int = 0
    used: int = 0


class Pictures:
    def __init__(self, room: int, *, whole: bool = False) -> None:
        """`room` is how many bytes all features may take that nobody is about to need; `whole` says that
        no chunk may have a part of a picture."""
        self._room = room
        self._whole = whole
        self._known: dict[str, _Known] = {}
        self._turn = 0
        self._under_way: str | None = None
        self._part_seconds: float | None = None
        """What a stage of the vision tower takes; lately, the longest ones."""
        self._parts = 0
        """How many were run the last time, of the picture under way."""
        self._forget = False
        self._counts = PictureCounts()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._known.values())

    @property
    def waits(self) -> bool:
        """Whether a picture has come that the vision tower has not run on."""
        return any(each.state is _State.HERE for each in self._known.values())

    def counts(self) -> PictureCounts | None:
        """What has happened since the last call; None if nothing has."""
        told, self._counts = self._counts, PictureCounts()
        if told == PictureCounts():
            return None
        told.nbytes = self.nbytes
        return told

    # What is heard

    def arrived(self, digest: str, out: Operations) -> None:
        known = self._known.get(digest)
        if known is not None and known.state is _State.ASKED:
            known.state = _State.HERE
        elif known is None:
            out.append(DropPictures([digest]))

    def forget(self) -> None:
        """Give up all features that nobody needs now."""
        self._forget = True

    def ran(self, result: PictureResult) -> None:
        """Learn what came of the vision tower's run on a picture."""
        known = self._known.get(result.digest)
        if result.done:
            self._parts = 0
        elif result.parts:
            self._parts = result.parts
            lately = _FADING * (self._part_seconds or 0.0)
            self._part_seconds = max(result.seconds / result.parts, lately)
        if result.problem is not None:
            self._known.pop(result.digest, None)
            self._under_way, self._parts = None, 0
        elif result.done and known is not None:
            known.state, known.nbytes = _State.ENCODED, result.nbytes
            self._under_way = None
            self._counts.encoded += 1

    def begun(self, prefill: Prefill) -> None:
        """A prompt has begun: what is known of its beginning need not be seen."""
        if not prefill.demoted and not prefill.quiet:
            self._counts.skipped += sum(_end(s) <= prefill.done for s in prefill.request.media)
        self.look(prefill)

    # What follows

    def look(self, prefill: Prefill) -> None:
        """See how far a prompt can run."""
        prefill.visible = len(prefill.tokens)
        for span in needed(prefill):
            known = self._known.get(span.digest)
            if known is None or known.state is not _State.ENCODED:
                prefill.visible = span.start
                prefill.missed.add(span.digest)
                break
            known.used = self._turn
            if span.digest not in prefill.missed:
                self._counts.found += 1
                prefill.missed.add(span.digest)
        first = next(iter(needed(prefill)), None)
        if prefill.begun:
            prefill.blind = prefill.visible <= prefill.done
        else:
            # It takes no memory before it can use it.
            prefill.blind = first is not None and prefill.visible <= first.start

    def plan(self, prefills: Sequence[Prefill], out: Operations) -> list[PicturesWanted]:
        """What to ask the front for, so that these prompts, in their order, can run; nothing that was
        asked for is kept when nobody needs it any more."""
        if not prefills and not self._known:
            return []
        self._turn += 1
        for prefill in prefills:
            self.look(prefill)
        wanted = [(prefill.request.id, s.digest) for prefill in prefills for s in needed(prefill)]
        self._tidy({digest for _, digest in wanted}, {id for id, _ in wanted}, out)
        self._evict(prefills, out)
        asked: dict[int, list[str]] = {}
        ahead = Counter(k.request for k in self._known.values() if k.state is not _State.ENCODED)
        for id, digest in self._next(prefills):
            if ahead.total() >= MOST_AHEAD:
                break
            if digest not in self._known and ahead[id] < AHEAD:
                self._known[digest] = _Known(_State.ASKED, id, used=self._turn)
                asked.setdefault(id, []).append(digest)
                ahead[id] += 1
        return [PicturesWanted(id, digests) for id, digests in asked.items()]

    def uncut(self, prefill: Prefill, count: int) -> int:
        """How many tokens of a prompt to run in place of `count`."""
        end = prefill.done + count
        for span in prefill.request.media if self._whole else ():
            if span.start < end < _end(span):
                end = span.start if span.start > prefill.done else _end(span)
        return end - prefill.done

    def encode(self, prefills: Sequence[Prefill], spare: float) -> EncodePicture | None:
        """The picture that comes next, and how much of the vision tower to run on it: as many stages as
        fit into `spare` seconds."""
        parts = int(spare / self._part_seconds) if self._part_seconds else 1
        parts = max(1, min(parts, _GROWTH * self._parts))
        for prefill in prefills:
            for span in needed(prefill):
                known = self._known.get(span.digest)
                if known is None or known.state is not _State.HERE:
                    continue
                if self._under_way not in (None, span.digest):
                    continue
                if self.nbytes > self._room and not prefill.blind:
                    continue  # it has more before it than it may keep
                self._under_way = span.digest
                tokens = prefill.request.prompt[span.start : _end(span)]
                users = [
                    j.request.id
                    for j in prefills
                    if any(s.digest == span.digest for s in needed(j))
                ]
                return EncodePicture(span.digest, tokens, sorted(set(users)), parts)
        return None

    def _next(self, prefills: Sequence[Prefill]) -> Iterator[tuple[int, str]]:
        """Pictures to ask for, most urgent first: each prompt's first that is missing, as far as there
        is room for what is waited for, then the following ones of the first prompt."""
        held = 0
        for n, prefill in enumerate(prefills):
            missing = [s.digest for s in needed(prefill) if not self._encoded(s.digest)]
            held += sum(
                self._known[s.digest].nbytes for s in needed(prefill) if self._encoded(s.digest)
            )
            if n and held > self._room:
                return
            yield from ((prefill.request.id, d) for d in (missing if not n else missing[:1]))

    def _encoded(self, digest: str) -> bool:
        known = self._known.get(digest)
        return known is not None and known.state is _State.ENCODED

    def _tidy(self, wanted: set[str], requests: set[int], out: Operations) -> None:
        """Forget what was asked for and is not needed, and ask again through those that are there."""
        gone = [
            digest
            for digest, known in self._known.items()
            if known.state is not _State.ENCODED
            and (
                digest not in wanted
                or (known.state is _State.ASKED and known.request not in requests)
            )
        ]
        for digest in gone:
            del self._known[digest]
            if self._under_way == digest:
                self._under_way, self._parts = None, 0
        if gone:
            out.append(DropPictures(gone))

    def _evict(self, prefills: Iterable[Prefill], out: Operations) -> None:
        over = self.nbytes - (0 if self._forget else self._room)
        self._forget = False
        if over <= 0:
            return
        kept = {
            s.digest for prefill in prefills for s in needed(prefill) if s.start < prefill.visible
        }
        gone: list[str] = []
        for digest, known in sorted(self._known.items(), key=lambda item: item[1].used):
            if over <= 0:
                break
            if known.state is _State.ENCODED and digest not in kept:
                over -= known.nbytes
                gone.append(digest)
        for digest in gone:
            del self._known[digest]
        if gone:
            out.append(DropPictures(gone))


def needed(prefill: Prefill) -> Iterator[Span]:
    """The pictures that a prompt has not been run beyond, as far as is known."""
    place = prefill.done or prefill.known
    return (s for s in prefill.request.media if _end(s) > place)


def _end(span: Span) -> int:
    return span.start + span.length
