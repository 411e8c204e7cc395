"""The table of stop sequences on every pipeline, streamed and whole, and the rules beneath it.

The models are scripted, so that it is known to the letter what would have been said without a stop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import scripted
from api.endpoint import Endpoint, Said
from api.endpoints import (
    ALL,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    TALKS,
    turn,
)
from conftest import Server
from scripted import Rule, think

from millrace.text.tokenizer import Tokenizer

COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
LISTED = "".join(f"{n}\n" for n in range(1, 11))
RAW = "1\n2\n3\n4\n"
GREETING = "I say hello world to you."
ODD = "Zürich: ça va? ☃☃ 你好, 世界! 😀 naïve."
RULES = [
    Rule(RAW, LISTED),
    Rule("Count 1-10", COUNTED),
    Rule("world", GREETING),
    Rule("odd", ODD),
]
HARMONY = [
    Rule("aloud", think("So 4, 5, 6 it is.", COUNTED, "harmony")),
    Rule("Count 1-10", think("They want numbers.", COUNTED, "harmony")),
    Rule("world", think("A greeting: hello world.", GREETING, "harmony")),
    Rule("odd", think("☃☃ 你好", ODD, "harmony")),
]
FIVE, SIX = object(), object()
"""Stand for the model's own tokens of these digits."""


class Model(NamedTuple):
    client: httpx.Client
    digits: dict[object, int]


def _serve(folder: Path, tokenizer_of: Path, style: scripted.Style) -> Iterator[Model]:
    rules = HARMONY if style == "harmony" else RULES
    generated = scripted.make(folder, tokenizer_of, rules, style)
    server = Server(str(generated), "--trust-remote-code", "--store", "none").wait_ready()
    tokenizer = Tokenizer(generated)
    digits = {mark: tokenizer.encode(text)[0] for mark, text in ((FIVE, "5"), (SIX, "6"))}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield Model(client, digits)
    server.stop()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Model]:
    yield from _serve(tmp_path_factory.mktemp("stops") / "plain", default_model, "hermes")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Model]:
    yield from _serve(tmp_path_factory.mktemp("stops") / "harmony", default_model, "harmony")


def _ask(model: Model, endpoint: Endpoint, say: str, **wishes: Any) -> Said:
    """The answer, whole and streamed, which must be the same."""
    body = endpoint.body(say, **{"max_tokens": 200, "temperature": 0} | wishes)
    whole = endpoint.whole(model.client, body)
    streamed = endpoint.stream(model.client, body)
    assert streamed == whole
    assert "".join(streamed.pieces) == whole.text, "what was sent is not taken back"
    return whole


class Row(NamedTuple):
    number: str
    endpoint: Endpoint
    stop: list[str] | None = None
    ids: tuple[object, ...] = ()
    matched: Any = None


TABLE = [
    Row("1.1.1", CHAT, ["6"], matched="6"),
    Row("1.1.2", CHAT, ["hello world"], matched=None),
    Row("1.1.3", CHAT, ids=(FIVE, SIX), matched=FIVE),
    Row("1.1.4", CHAT, ["5"], (SIX,), matched="5"),
    Row("2.1.1", COMPLETIONS, ["6"], matched="6"),
    Row("2.1.2", COMPLETIONS, ["6\n7"], matched="6\n7"),
    Row("2.1.3", COMPLETIONS, ids=(FIVE, SIX), matched=FIVE),
    Row("2.1.4", COMPLETIONS, ["5"], (SIX,), matched="5"),
    Row("3.1.1", MESSAGES, ["6"], matched="6"),
    Row("3.1.2", MESSAGES, ["6, 7"], matched="6, 7"),
    Row("4.1.1", GENERATE, ["6"], matched="6"),
    Row("4.1.2", GENERATE, ["6\n7"], matched="6\n7"),
    Row("4.1.3", GENERATE, ids=(FIVE, SIX), matched=FIVE),
    Row("4.1.4", GENERATE, ["5"], (SIX,), matched="5"),
    Row("6.1.1", RESPONSES, ["6"], matched="6"),
    Row("6.1.3", RESPONSES, ids=(FIVE, SIX), matched=FIVE),
    Row("ollama", OLLAMA, ["6"], matched="6"),
    Row("ollama", OLLAMA, ["6, 7"], matched="6, 7"),
]


def _check(model: Model, row: Row) -> Said:
    wishes: dict[str, Any] = {"stop": row.stop} if row.stop else {}
    if row.ids:
        wishes["stop_token_ids"] = [model.digits[mark] for mark in row.ids]
    said = _ask(model, row.endpoint, RAW if row.endpoint.is_raw else "Count 1-10", **wishes)
    all_of_it = LISTED.removeprefix(RAW) if row.endpoint.is_raw else COUNTED
    digit = {FIVE: "5", SIX: "6"}.get(row.matched, row.matched)
    assert said.text == (all_of_it if digit is None else all_of_it[: all_of_it.index(digit)])
    if row.endpoint is not OLLAMA:
        assert said.matched == model.digits.get(row.matched, row.matched)
    assert said.finish == "stop"
    return said


@pytest.mark.parametrize("row", TABLE, ids=[f"{r.number}-{r.endpoint}" for r in TABLE])
def test_the_table(plain: Model, row: Row) -> None:
    _check(plain, row)


@pytest.mark.parametrize(
    "row",
    [
        Row("5.1.1", CHAT, ["6"], matched="6"),
        Row("5.1.2", CHAT, ["6, 7"], matched="6, 7"),
        Row("5.1.3", CHAT, ids=(FIVE, SIX), matched=FIVE),
        Row("5.1.4", CHAT, ["5"], (SIX,), matched="5"),
        Row("6.1.1", RESPONSES, ["6"], matched="6"),
        Row("6.1.2", RESPONSES, ["6, 7"], matched="6, 7"),
        Row("6.1.3", RESPONSES, ids=(FIVE, SIX), matched=FIVE),
        Row("messages", MESSAGES, ["6"], matched="6"),
        Row("ollama", OLLAMA, ["6"], matched="6"),
    ],
    ids=lambda row: f"{row.number}-{row.endpoint}",
)
def test_the_table_of_a_harmony_model(harmony: Model, row: Row) -> None:
    assert _check(harmony, row).thought == "They want numbers."


def test_each_protocols_own_words(plain: Model, harmony: Model) -> None:
    """Rows 3 to 6 name fields that only their protocol has."""
    wishes: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "stop": ["6"]}
    body = MESSAGES.body("Count 1-10", **wishes)
    whole = MESSAGES.whole(plain.client, body).raw
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "6")
    delta = MESSAGES.stream(plain.client, body).raw[-2]
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "6"}

    body = GENERATE.body(RAW, **wishes)
    last = GENERATE.stream(plain.client, body).raw[-1]
    for meta in (GENERATE.whole(plain.client, body).raw["meta_info"], last["meta_info"]):
        assert meta["matched_stop"] == "6"
        assert meta["finish_reason"] == {"type": "stop", "matched": "6"}

    body = CHAT.body("Count 1-10", **wishes)
    assert CHAT.stream(harmony.client, body).raw[-1]["matched_stop"] == "6"

    body = RESPONSES.body("Count 1-10", **wishes)
    assert RESPONSES.whole(harmony.client, body).raw["status"] == "completed"
    assert RESPONSES.stream(harmony.client, body).raw[-1]["type"] == "response.completed"


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_a_stop_of_several_tokens_comes_back_as_it_was_given(
    plain: Model, endpoint: Endpoint
) -> None:
    for say, stop, before in (
        ("world", "hello world", "I say "),
        ("world", "lo wor", "I say hel"),
        ("odd", "☃ 你", ODD.partition("☃ 你")[0]),
        ("odd", "世界! 😀 na", ODD.partition("世界")[0]),
    ):
        said = _ask(plain, endpoint, turn(endpoint, say), stop=["never, ever", stop])
        assert (said.text, said.finish) == (before, "stop"), stop
        assert endpoint is OLLAMA or said.matched == stop


@pytest.mark.parametrize("endpoint", TALKS, ids=str)
def test_the_same_of_a_harmony_model(harmony: Model, endpoint: Endpoint) -> None:
    for say, stop in (("world", "hello world"), ("odd", "☃ 你"), ("Count 1-10", "6, 7")):
        all_of_it = {"world": GREETING, "odd": ODD}.get(say, COUNTED)
        said = _ask(harmony, endpoint, say, stop=[stop])
        assert said.text == all_of_it.partition(stop)[0]
        assert said.thought and "<|" not in said.thought
        assert endpoint is OLLAMA or said.matched == stop


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_any_part_of_an_answer_is_a_stop(plain: Model, endpoint: Endpoint) -> None:
    """Wherever it begins and ends, and whatever tokens and chunks it crosses."""
    dice = random.Random(endpoint.name)
    cuts = [(at, at + dice.randrange(1, 9)) for at in dice.sample(range(len(ODD) - 1), 6)]

    def check(cut: tuple[int, int]) -> None:
        stop = ODD[slice(*cut)]
        said = _ask(plain, endpoint, turn(endpoint, "odd"), stop=[stop])
        assert said.text == ODD[: ODD.index(stop)], stop
        assert endpoint is OLLAMA or said.matched == stop

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(check, cuts))


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_the_earliest_wins_and_the_longest_on_a_tie(plain: Model, endpoint: Endpoint) -> None:
    say = turn(endpoint, "Count 1-10")
    said = _ask(plain, endpoint, say, stop=["7", "6, 7", "6, 7, 8", "8, 9"])
    assert said.text == "1, 2, 3, 4, 5, "
    assert endpoint is OLLAMA or said.matched == "6, 7, 8"
    # What only looked like a stop was held back, and is not lost.
    said = _ask(plain, endpoint, say, stop=["6, 7, 9", "10, "])
    assert (said.text, said.matched) == (COUNTED, None)


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_a_stop_is_left_in_on_demand(plain: Model, endpoint: Endpoint) -> None:
    say = turn(endpoint, "Count 1-10")
    said = _ask(plain, endpoint, say, stop=["6, 7"], include_stop=True)
    assert said.text == "1, 2, 3, 4, 5, 6, 7"
    assert endpoint is OLLAMA or said.matched == "6, 7"


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_the_text_of_a_stop_token_is_left_in_on_demand(plain: Model, endpoint: Endpoint) -> None:
    say, six = turn(endpoint, "Count 1-10"), plain.digits[SIX]
    said = _ask(plain, endpoint, say, stop_token_ids=[six])
    assert (said.text, said.finish) == ("1, 2, 3, 4, 5, ", "stop")
    left = _ask(plain, endpoint, say, stop_token_ids=[six], include_stop=True)
    assert (left.text, left.generated) == (said.text + "6", said.generated)
    assert endpoint in (OLLAMA, MESSAGES) or left.matched == six


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_the_end_of_an_answer_is_no_stop(plain: Model, endpoint: Endpoint) -> None:
    say = turn(endpoint, "Count 1-10")
    said = _ask(plain, endpoint, say, stop=[f"never {n}" for n in range(64)])
    assert (said.text, said.finish, said.matched) == (COUNTED, "stop", None)
    cut = _ask(plain, endpoint, say, stop=["9"], max_tokens=3)
    assert (cut.finish, cut.matched, cut.generated) == ("length", None, 3)


@pytest.mark.parametrize("endpoint", [e for e in ALL if e is not MESSAGES], ids=str)
def test_one_stop_needs_no_list(plain: Model, endpoint: Endpoint) -> None:
    said = _ask(plain, endpoint, turn(endpoint, "Count 1-10"), stop="6, 7")
    assert said.text == "1, 2, 3, 4, 5, "


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_what_is_no_stop(plain: Model, endpoint: Endpoint) -> None:
    for stop in ([""], ["6", ""], [f"x{n}" for n in range(65)], [6]):
        for stream in (False, True):
            body = endpoint.body("Count 1-10", stop=stop) | {"stream": stream}
            response = plain.client.post(endpoint.path, json=body)
            assert response.status_code == 400, (stop, response.text)
            assert "stop" in endpoint.error(response)


@pytest.mark.parametrize("endpoint", TALKS, ids=str)
def test_stops_do_not_fire_inside_thoughts(harmony: Model, endpoint: Endpoint) -> None:
    said = _ask(harmony, endpoint, "Count aloud", stop=["6"])
    assert said.thought == "So 4, 5, 6 it is."
    assert said.text == "1, 2, 3, 4, 5, "
    if "stop_in_reasoning" in endpoint.where:
        said = _ask(harmony, endpoint, "Count aloud", stop=["6"], stop_in_reasoning=True)
        assert (said.thought, said.text, said.matched) == ("So 4, 5, ", "", "6")


@pytest.mark.parametrize("endpoint", TALKS, ids=str)
def test_stop_tokens_do_not_fire_inside_thoughts(harmony: Model, endpoint: Endpoint) -> None:
    six = harmony.digits[SIX]
    said = _ask(harmony, endpoint, "Count aloud", stop_token_ids=[six])
    assert said.thought == "So 4, 5, 6 it is."
    assert said.text == "1, 2, 3, 4, 5, "
    if "min_tokens" in endpoint.where:
        late = _ask(harmony, endpoint, "Count aloud", stop_token_ids=[six], min_tokens=60)
        assert late.text == COUNTED, "nothing stops before as many tokens as were wished"
    if "stop_in_reasoning" in endpoint.where:
        inside = {"stop_token_ids": [six], "stop_in_reasoning": True}
        said = _ask(harmony, endpoint, "Count aloud", **inside)
        assert (said.thought, said.text, said.finish) == ("So 4, 5, ", "", "stop")
        said = _ask(harmony, endpoint, "Count aloud", **inside, include_stop=True)
        assert (said.thought, said.text) == ("So 4, 5, 6", "")
