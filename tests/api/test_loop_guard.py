"""The loop guard on every protocol: asked for, by default, streamed and whole, and after a resume.

The model is scripted, so that the token at which its loop is complete is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from api.endpoint import Endpoint, Said, frames
from api.endpoints import ALL, CHAT, COMPLETIONS, GENERATE, OLLAMA, turn
from conftest import Server
from scripted import Rule

from millrace.text.loops import AnswerLoop, LoopDetector
from millrace.text.tokenizer import Tokenizer

SONG = "Here it is: " + "over the hills and far away, " * 90 + "home."
LIST = "".join(f"{n} hills and {n * n} valleys. " for n in range(1, 70)) + "Done."
CALLING = '<tool_call>\n{"name": "note", "arguments": {"text": "' + "so it goes, " * 200
RULES = [Rule("sing", SONG), Rule("list", LIST), Rule("write", CALLING)]
HUNG = Rule("fall asleep", SONG + " Good night.", fault="hang", after=200)
MOST = 1200
every = pytest.mark.parametrize("endpoint", ALL, ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return scripted.make(tmp_path_factory.mktemp("loops") / "model", default_model, [HUNG, *RULES])


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Two models: one with the server's default, which is the guard, and one that says otherwise."""
    file = folder.parent / "millrace.toml"
    file.write_text(
        f'[models.plain]\nmodel = "{folder}"\nloop-guard = false\npreload = true\n'
        f'[models.guarded]\nmodel = "{folder}"\npreload = true\n'
    )
    options = ("--config", str(file), "--store", "none", "--trust-remote-code", "--loop-guard")
    running = Server(*options).wait_ready()
    yield running
    running.stop()


def _loop_in(folder: Path, text: str) -> tuple[int, AnswerLoop]:
    """How many tokens the answer has when its loop is complete, and that loop."""
    detector = LoopDetector()
    for count, token in enumerate(Tokenizer(folder).encode(text), 1):
        if (loop := detector.accept(token)) is not None:
            return count, loop
    raise AssertionError("the text has no loop")


def _body(endpoint: Endpoint, say: str, model: str = "plain", **more: Any) -> dict[str, Any]:
    return endpoint.body(turn(endpoint, say), max_tokens=MOST, temperature=0, model=model) | more


def _details(said: Said) -> Any:
    """What the protocol reports of a loop, from a whole answer."""
    raw = said.raw
    if "choices" in raw:
        return raw["choices"][0].get("finish_details")
    if "meta_info" in raw:
        return raw["meta_info"]["finish_reason"].get("finish_details")
    return raw.get("finish_details")


def _streamed_details(server: Server, endpoint: Endpoint, body: dict[str, Any]) -> Any:
    """The same from the last lines of a stream."""
    with endpoint.open(server.http, body) as response:
        found = [_find(f.data, "finish_details") for f in frames(response.iter_lines())]
    return next(f for f in found if f is not None)


def _find(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return next((f for v in value if (f := _find(v, name)) is not None), None)
    if not isinstance(value, dict):
        return None
    return value.get(name) or _find(list(value.values()), name)


@every
def test_an_answer_that_repeats_itself_ends(
    server: Server, folder: Path, endpoint: Endpoint
) -> None:
    count, loop = _loop_in(folder, SONG)
    body = _body(endpoint, "sing", loop_guard=True)
    whole = endpoint.whole(server.http, body)
    assert (whole.finish, whole.matched, whole.generated) == ("stop", None, count)
    assert SONG.startswith(whole.text) and len(whole.text) < len(SONG) / 2
    assert _details(whole) == {"type": "loop", "period": loop.period, "tokens": 257}
    streamed = endpoint.stream(server.http, body)
    assert streamed == whole
    assert "".join(streamed.pieces) == whole.text
    assert _streamed_details(server, endpoint, body) == _details(whole)


@every
def test_it_is_off_unless_asked_for(server: Server, endpoint: Endpoint) -> None:
    for more in ({}, {"loop_guard": False}, {"loop_guard": None}):
        said = endpoint.whole(server.http, _body(endpoint, "sing", **more))
        assert (said.finish, said.text) == ("stop", SONG)
        assert _details(said) is None


@every
def test_an_answer_without_a_loop_is_left_alone(server: Server, endpoint: Endpoint) -> None:
    said = endpoint.whole(server.http, _body(endpoint, "list", loop_guard=True))
    assert (said.finish, said.text, _details(said)) == ("stop", LIST, None)


@every
def test_the_servers_default_holds_where_a_request_says_nothing(
    server: Server, folder: Path, endpoint: Endpoint
) -> None:
    count, _ = _loop_in(folder, SONG)
    assert endpoint.whole(server.http, _body(endpoint, "sing", "guarded")).generated == count
    free = endpoint.whole(server.http, _body(endpoint, "sing", "guarded", loop_guard=False))
    assert free.text == SONG


def test_a_request_for_all_tokens_is_not_cut_by_the_default(server: Server) -> None:
    body = _body(CHAT, "sing", "guarded", ignore_eos=True, max_tokens=700)
    said = CHAT.whole(server.http, body)
    assert (said.finish, said.generated) == ("length", 700)
    assert CHAT.whole(server.http, body | {"loop_guard": True}).finish == "stop"


@pytest.mark.parametrize(
    ("endpoint", "place"), [(GENERATE, "sampling_params"), (OLLAMA, "options")], ids=str
)
def test_it_may_be_among_the_sampling_fields(
    server: Server, folder: Path, endpoint: Endpoint, place: str
) -> None:
    body = _body(endpoint, "sing")
    body[place] = {**body[place], "loop_guard": True}
    assert endpoint.whole(server.http, body).generated == _loop_in(folder, SONG)[0]
    body["loop_guard"] = False
    assert endpoint.whole(server.http, body).text == SONG, "the body itself wins"


@every
@pytest.mark.parametrize("value", ["yes", 1, [], {"period": 3}], ids=str)
def test_a_value_that_is_no_truth_value_is_refused(
    server: Server, endpoint: Endpoint, value: Any
) -> None:
    response = server.post(endpoint.path, _body(endpoint, "sing", loop_guard=value))
    assert response.status_code == 400, response.text
    assert "loop_guard" in endpoint.error(response)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_choice_is_guarded(server: Server, folder: Path, stream: bool) -> None:
    count, _ = _loop_in(folder, SONG)
    body = _body(COMPLETIONS, "sing", loop_guard=True, n=3, stream=stream)
    if not stream:
        answer = server.post(COMPLETIONS.path, body).json()
        ends = [c["finish_details"]["type"] for c in answer["choices"]]
        assert (ends, answer["usage"]["completion_tokens"]) == (["loop"] * 3, 3 * count)
        return
    with COMPLETIONS.open(server.http, body) as response:
        lines = [line for line in response.iter_lines() if '"finish_details"' in line]
    assert len(lines) == 3


def test_a_call_that_repeats_itself_is_cut_and_says_so(server: Server) -> None:
    tool = {"name": "note", "parameters": {"type": "object", "properties": {"text": {}}}}
    body = CHAT.body("write", tools=[tool], max_tokens=MOST, temperature=0, model="plain")
    said = CHAT.whole(server.http, body | {"loop_guard": True})
    assert (said.finish, _details(said)["type"]) == ("stop", "loop")
    assert CHAT.stream(server.http, body | {"loop_guard": True}) == said


def test_a_resumed_answer_ends_at_the_same_token(server: Server, folder: Path) -> None:
    """The engine hangs at token 200 and is killed; the answer goes on in the next one."""
    whole = CHAT.whole(server.http, _body(CHAT, "sing", loop_guard=True))
    killed = False
    body = _body(CHAT, "fall asleep", loop_guard=True)
    pieces = ""
    details = None
    with CHAT.open(server.http, body) as response:
        for line in response.iter_lines():
            for frame in frames(iter([line])):
                pieces += _find(frame.data, "content") or ""
                details = details or _find(frame.data, "finish_details")
            if not killed and (folder / "hung").exists() and len(pieces) > 500:
                killed = True
                server.kill_engine()
    assert killed
    assert (pieces, details) == (whole.text, _details(whole))
