"""The ways in which an answer may come to be, each beside the same question alone.

Alone is one request at a time, with a prefix cache that knows nothing of it, with no guesses, and told
whole. Every check also shows that what it is about did happen: a hit that was none proves nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from millrace.prove.compare import Comparison, compared
from millrace.prove.questions import ProvedAnswer, Question, next_turn, text_of
from millrace.prove.report import ReportLine, Verdict
from millrace.prove.served import Served

_FOLLOW_UP = 24
_KILL_AT = 2
"""Tokens that every stream has before the engine is killed."""
_DISK_PATIENCE = 20.0

Doing = Callable[[str], None]


class Reference(msgspec.Struct, frozen=True):
    """The questions and their answers alone."""

    questions: list[Question]
    answers: list[ProvedAnswer]
    allowed: float
    """How far apart two tokens' logprobs may be for a near-tie."""
    width: int

    def compare(self, at: Sequence[int], others: Sequence[ProvedAnswer]) -> Comparison:
        return compared(
            [self.questions[i] for i in at],
            [self.answers[i] for i in at],
            others,
            allowed=self.allowed,
            width=self.width,
        )

    def first(self, count: int) -> list[int]:
        """The places of so many greedy questions and as many drawn ones."""
        half = len(self.questions) // 2
        count = min(count, half)
        return [*range(count), *range(half, half + count)]


def alone(server: Served, questions: list[Question], allowed: float, doing: Doing) -> Reference:
    answers = []
    for i, question in enumerate(questions):
        doing(f"alone: answer {i + 1} of {len(questions)}")
        answers.append(server.ask(question, salt=f"alone {i}", scored=True))
    return Reference(questions, answers, allowed, server.width())


def repeated(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """Alone once more, or nothing could be compared with it."""
    doing("alone, again")
    at = reference.first(1)
    answers = [server.ask(reference.questions[i], salt=f"again {i}", scored=True) for i in at]
    return lines_of("alone again", reference, at, answers)


def lines_of(
    check: str,
    reference: Reference,
    at: Sequence[int],
    others: Sequence[ProvedAnswer],
    besides: str = "",
) -> list[ReportLine]:
    """One line at temperature 0 and one by seed, so that each says what it proves."""
    lines = []
    for kind, seeded in (("temperature 0", False), ("by seed", True)):
        chosen = [
            (i, other)
            for i, other in zip(at, others, strict=True)
            if (reference.questions[i].seed is not None) == seeded
        ]
        found = reference.compare([i for i, _ in chosen], [other for _, other in chosen])
        lines.append(_line(f"{check}, {kind}", found, besides))
    return lines


def _line(check: str, found: Comparison, besides: str = "") -> ReportLine:
    return ReportLine(
        check=check,
        verdict=found.verdict,
        detail="; ".join(filter(None, (found.told(), besides))),
        figures={
            "answers": found.answers,
            "same": found.answers - len(found.differences),
            "tokens": found.tokens,
            "logprob_noise": found.noise,
            "first_difference": found.differences[0].told() if found.differences else None,
        },
    )


def batched(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """All at once, greedy and drawn ones side by side; every other one tells its logprobs."""
    questions = reference.questions
    doing(f"batched: {len(questions)} answers at once")

    def one(i: int) -> Callable[[threading.Barrier], ProvedAnswer]:
        def ask(barrier: threading.Barrier) -> ProvedAnswer:
            barrier.wait()
            return server.ask(questions[i], salt="shared", scored=i % 2 == 1)

        return ask

    answers = server.together([one(i) for i in range(len(questions))])
    besides = f"{len(questions)} at once"
    return lines_of("batched", reference, range(len(questions)), answers, besides)


def cached(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """The same prompts again, of which all but the last token must be found."""
    at = reference.first(4)
    answers = []
    for n, i in enumerate(at):
        doing(f"cached: answer {n + 1} of {len(at)}")
        answers.append(server.ask(reference.questions[i], salt="shared"))
    run = sum(len(reference.questions[i].ids) - a.cached for i, a in zip(at, answers, strict=True))
    found = sum(a.cached for a in answers)
    if not all(a.cached for a in answers):
        missed = sum(not a.cached for a in answers)
        return [_unmet("cached", f"{missed} of {len(at)} prompts were not found in the cache")]
    besides = f"{found:,} prompt tokens found, {run:,} run"
    return lines_of("cached", reference, at, answers, besides)


def continued(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """The next turn: prompt and answer are found, what is new is run."""
    at = reference.first(2)
    more = text_of("proof/more", _FOLLOW_UP, server.tokenize)
    window = server.state().context_window or 0
    asked = [next_turn(reference.questions[i], reference.answers[i], more) for i in at]
    if any(len(q.ids) + q.tokens > window for q in asked):
        return [_unmet("next turn", "the context window is too small")]
    doing("next turn: alone")
    plain = [server.ask(q, salt=f"turn {n}", scored=True) for n, q in enumerate(asked)]
    doing("next turn: cached")
    answers = [server.ask(q, salt="shared") for q in asked]
    least = min(
        a.cached / len(reference.questions[i].ids) for i, a in zip(at, answers, strict=True)
    )
    if least <= 0:
        return [_unmet("next turn", "nothing was found in the cache")]
    own = Reference(asked, plain, reference.allowed, reference.width)
    found = sum(a.cached for a in answers)
    besides = f"{found:,} of {sum(len(q.ids) for q in asked):,} prompt tokens found"
    return lines_of("next turn", own, range(len(asked)), answers, besides)


def streamed(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """As tokens, and as OpenAI's stream of text."""
    at = reference.first(4)
    answers, texts, differing = [], 0, 0
    for n, i in enumerate(at):
        doing(f"streamed: answer {n + 1} of {len(at)}")
        question, whole = reference.questions[i], reference.answers[i]
        answer = server.stream(question, salt=f"streamed {i}", seen=lambda *_: None)
        answers.append(answer)
        if answer.tokens == whole.tokens:
            text = server.stream_text(question, salt=f"text {i}")
            texts += 1
            differing += not text == answer.text == whole.text
    lines = lines_of("streamed", reference, at, answers)
    if not texts:
        return [*lines, _unmet("streamed, as text", "no tokens were the same")]
    told = f"{texts - differing} of {texts} texts of OpenAI's stream the same"
    verdict: Verdict = "fail" if differing else "pass"
    return [*lines, ReportLine(check="streamed, as text", verdict=verdict, detail=told)]


def from_disk(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """After a restart: what the engine that was killed had cached is found on disk."""
    at = [i for i in reference.first(4) if i not in reference.first(2)] or reference.first(1)
    doing("from disk")
    before = _disk_hits(server)
    answers = [server.ask(reference.questions[i], salt="shared") for i in at]
    if _disk_hits(server) == before:
        return [_unmet("from disk", "the new engine found nothing on disk")]
    besides = f"{sum(a.cached for a in answers):,} prompt tokens found"
    return lines_of("from disk", reference, at, answers, besides)


def _disk_hits(server: Served) -> int:
    told = msgspec.json.decode(server.get("/v1/cache"))["models"][0]
    return int(told["hits"]["disk"])


def _wait_written(server: Served) -> None:
    """Until what the cache holds is on disk, too; what is not by then is not asked for."""
    deadline = time.monotonic() + _DISK_PATIENCE
    while time.monotonic() < deadline:
        told = msgspec.json.decode(server.get("/v1/cache"))["models"][0]
        if told["disk"] is None or told["disk"]["tokens"] >= told["memory"]["tokens"]:
            return
        time.sleep(0.1)


def resumed(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """The engine is killed while it answers; the streams go on with another."""
    at = reference.first(2)
    _wait_written(server)
    doing("resumed: killing the engine in the middle of answers")
    counts = [0] * len(at)
    after: list[float | None] = [None] * len(at)
    killed: list[float] = []
    ready = threading.Event()

    def one(n: int) -> Callable[[threading.Barrier], ProvedAnswer]:
        def seen(tokens: int, now: float) -> None:
            counts[n] = tokens
            if all(c >= _KILL_AT for c in counts):
                ready.set()
            if killed and now > killed[0] and after[n] is None:
                after[n] = now - killed[0]

        def ask(barrier: threading.Barrier) -> ProvedAnswer:
            barrier.wait()
            return server.stream(reference.questions[at[n]], salt=f"resumed {n}", seen=seen)

        return ask

    old = server.state()
    if (pid := old.engine_pid) is None:
        return [_unmet("resumed", "the engine has no process to end")]
    back: list[float] = []

    def kill() -> None:
        if not ready.wait(120):
            return
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)
        while time.perf_counter() < killed[0] + 300:
            now = server.state()
            if now.restarts > old.restarts and now.state == "ready":
                back.append(time.perf_counter() - killed[0])
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    answers = server.together([one(n) for n in range(len(at))])
    killer.join()
    ended = msgspec.json.decode(server.get("/v1/requests?limit=32"))["ended"]
    over = sum(bool(request.get("resumes")) for request in ended)
    if not killed or not back or not over:
        why = "the answers were whole before the engine was killed"
        return [_unmet("resumed", why if killed else "the answers did not begin")]
    lines = lines_of("resumed", reference, at, answers, f"{over} streams over the engine's death")
    gap = max((a for a in after if a is not None), default=0.0)
    figures: dict[str, float | int | str | None] = {"ready_s": back[0], "streams_go_on_s": gap}
    told = f"{gap:.2f} s from the kill to the streams' next tokens, {back[0]:.2f} s to ready"
    return [*lines, ReportLine(check="restart", verdict="told", detail=told, figures=figures)]


def guessed(server: Served, reference: Reference, doing: Doing) -> list[ReportLine]:
    """With guesses on, one at a time: fewer steps than tokens, and the same tokens."""
    at = reference.first(4)
    before, answers = server.steps(), []
    for n, i in enumerate(at):
        doing(f"guessed: answer {n + 1} of {len(at)}")
        answers.append(server.ask(reference.questions[i], salt=f"guessed {i}"))
    tokens = sum(len(a.tokens) for a in answers)
    # Each answer's first token comes with its prompt.
    saved = tokens - len(at) - (server.steps() - before)
    lines = lines_of("guessed", reference, at, answers, f"{max(saved, 0)} guesses held")
    if saved <= 0 and all(line.verdict == "pass" for line in lines):
        return [_unmet("guessed", "the engine thought no guess worth a try")]
    return lines


def _unmet(check: str, why: str) -> ReportLine:
    return ReportLine(check=check, verdict="not run", detail=why)
