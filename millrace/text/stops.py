"""Finding texts in a stream of chunks: stop strings, and the marker search of the output formats.

Owns the matcher and the rules of `stop`: text that may still become a match is held back, the
leftmost match wins, the longest at the same place. Knows nothing of tokens, models or requests.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from millrace.errors import BadRequest

MAX_STOPS = 64
LONG = 256
"""Characters of a stop beyond which it is searched for by itself, and not in one pass with the others."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text[start:end]` is a pattern; offsets count from the scan's first character."""

    start: int
    end: int


class Patterns:
    """An Aho-Corasick automaton over a set of texts; immutable, shared by any number of scans."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(dict.fromkeys(patterns))
        if "" in self.patterns:
            raise ValueError("an empty pattern matches everywhere")
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.longest = [0]
        for pattern in self.patterns:
            self._add(pattern)
        self._link()
        first = "".join(re.escape(c) for c in sorted(self.next[0]))
        self.first = re.compile(f"[{first}]") if first else re.compile(r"(?!)")

    def _add(self, pattern: str) -> None:
        state = 0
        for char in pattern:
            following = self.next[state].get(char)
            if following is None:
                following = len(self.next)
                self.next[state][char] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.longest.append(0)
            state = following
        self.longest[state] = len(pattern)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                queue.append(child)
                self.fail[child] = self.step(self.fail[state], char)
            if not self.longest[state]:
                self.longest[state] = self.longest[self.fail[state]]

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class Scan:
    """One pass over a stream, fed piece by piece until the leftmost-longest match is certain."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._state = 0
        self._at = 0
        self._best: StopMatch | None = None

    @property
    def live(self) -> int:
        """From this offset on, all that was fed is the beginning of a pattern."""
        return self._at - self._patterns.depth[self._state]

    @property
    def safe(self) -> int:
        """Everything before this offset belongs to no match, now or later."""
        return self.live if self._best is None else min(self.live, self._best.start)

    def feed(self, text: str) -> StopMatch | None:
        """The match once it is certain. What follows it has not been searched for another."""
        patterns = self._patterns
        depth, longest = patterns.depth, patterns.longest
        state, base = self._state, self._at
        index, size = 0, len(text)
        while index < size:
            if state == 0 and self._best is None:
                found = patterns.first.search(text, index)
                if found is None:
                    index = size
                    break
                index = found.start()
            state = patterns.step(state, text[index])
            index += 1
            end = base + index
            best = self._best
            if best is not None and end - depth[state] > best.start:
                self._state, self._at = state, end
                return best
            if longest[state]:
                start = end - longest[state]
                if best is None or start <= best.start:
                    self._best = StopMatch(start, end)
            complete = not patterns.next[state] and depth[state] == longest[state]
            if complete and self._best is not None:
                self._state, self._at = state, end
                return self._best
        self._state, self._at = state, base + index
        return None

    def finish(self) -> StopMatch | None:
        """The match that only waited for a longer one, now that no more text comes."""
        return self._best


class LongScan:
    """One pass over a stream for a single text of any length.

    How far back a mismatch leads is worked out only as far as the text has been matched, so that one of
    megabytes costs no more than what a model writes.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._back = [0, 0]
        """By the length of a prefix: that of the longest that it ends with, itself aside."""
        self._matched = 0
        self._at = 0

    @property
    def safe(self) -> int:
        return self._at - self._matched

    def feed(self, text: str) -> StopMatch | None:
        pattern = self._pattern
        for index, char in enumerate(text, 1):
            while self._matched and pattern[self._matched] != char:
                self._matched = self._shorter(self._matched)
            if pattern[self._matched] == char:
                self._matched += 1
            if self._matched == len(pattern):
                end = self._at + index
                return StopMatch(end - len(pattern), end)
        self._at += len(text)
        return None

    def finish(self) -> StopMatch | None:
        return None

    def _shorter(self, length: int) -> int:
        pattern, back = self._pattern, self._back
        while len(back) <= length:
            last, shorter = pattern[len(back) - 1], back[-1]
            while shorter and pattern[shorter] != last:
                shorter = back[shorter]
            back.append(shorter + (pattern[shorter] == last))
        return back[length]


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text to release, and the stop that ended the answer, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Cuts a stream at the first stop string; with `include` the stop itself is released too."""

    def __init__(self, stops: list[str], include: bool = False) -> None:
        self._include = include
        short = tuple(stop for stop in stops if len(stop) <= LONG)
        self._scans: list[Scan | LongScan] = [LongScan(stop) for stop in stops if len(stop) > LONG]
        if short:
            self._scans.append(Scan(_patterns(short)))
        self._best: StopMatch | None = None
        """The first match so far, while another may still turn out to begin before it."""
        self._held = ""
        self._released = 0
        self._done = not stops
        self.matched: str | None = None

    def feed(self, text: str) -> StopResult:
        if self._done:
            return StopResult("" if self.matched is not None else text)
        self._held += text
        searching = []
        for scan in self._scans:
            if match := scan.feed(text):
                self._found(match)
            else:
                searching.append(scan)
        best = self._best
        if best is not None:
            searching = [scan for scan in searching if scan.safe <= best.start]
            if not searching:
                return self._cut(best)
        self._scans = searching
        safe = min(scan.safe for scan in searching)
        out, self._held = self._held[: safe - self._released], self._held[safe - self._released :]
        self._released = safe
        return StopResult(out)

    def finish(self) -> StopResult:
        """What was held back, cut where a stop was complete but might have become a longer one."""
        if self._done:
            return StopResult("")
        for scan in self._scans:
            if match := scan.finish():
                self._found(match)
        if self._best is not None:
            return self._cut(self._best)
        self._done = True
        out, self._held = self._held, ""
        return StopResult(out)

    def _found(self, match: StopMatch) -> None:
        """The leftmost counts, and the longest at the same place."""
        best = self._best
        if best is None or (match.start, -match.end) < (best.start, -best.end):
            self._best = match

    def _cut(self, match: StopMatch) -> StopResult:
        start, end = match.start - self._released, match.end - self._released
        self._done = True
        self.matched = self._held[start:end]
        out = self._held[: end if self._include else start]
        self._held = ""
        return StopResult(out, self.matched)


@lru_cache(maxsize=64)
def _patterns(stops: tuple[str, ...]) -> Patterns:
    """The same for all choices of a request, and for all requests of an agent."""
    return Patterns(stops)


def parse_stops(value: object, param: str = "stop") -> list[str]:
    """A request's `stop` as a list without repeats; None means there are none."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise BadRequest(
            f"'{param}' has {len(stops)} entries; at most {MAX_STOPS} are allowed.", param=param
        )
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest(f"'{param}' must be a string or a list of strings.", param=param)
    if "" in stops:
        raise BadRequest(
            f"'{param}' has an empty string, which would stop at once. Remove it.", param=param
        )
    return list(dict.fromkeys(stops))
