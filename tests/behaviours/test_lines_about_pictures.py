"""A vision model behind every protocol: pictures in, answers out, and hostile ones refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import vision_models
from api import tiny_folder
from api.endpoint import Endpoint
from api.endpoints import ALL, turn
from api.scrape import total
from conftest import Server, until
from pictures import broken_files, data_uri, picture_site, png
from vision_templates import QWEN2_VL

from behaviours.showing import (
    OTHER,
    PNG,
    SHORT,
    WEBP,
    b64,
    chat,
    encodings,
    part,
    resident,
    said,
    text,
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that requests may name, beside a picture that they may not."""
    folder = tmp_path_factory.mktemp("media") / "shown"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (folder.parent / "hidden.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path, shown: Path
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vision")
    sees = vision_models.write("qwen2_vl", folder / "sees")
    (sees / "chat_template.jinja").write_text(QWEN2_VL)
    reads = tiny_folder.make(folder / "reads", default_model)
    made = Server(f"sees={sees}", f"reads={reads}", "--allow-local-media", str(shown))
    yield made.wait_ready()
    made.stop()


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_text_alone_is_answered_by_every_endpoint_streamed_and_whole(
    server: Server, endpoint: Endpoint
) -> None:
    body = endpoint.body(turn(endpoint, "Hello there"), model="sees", **SHORT)
    assert endpoint.whole(server.http, body) == endpoint.stream(server.http, body)


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_text_that_spells_a_placeholder_is_text(server: Server, endpoint: Endpoint) -> None:
    body = endpoint.body("What is <|image_pad|>, please?", model="sees", **SHORT)
    if not endpoint.is_raw:
        assert endpoint.whole(server.http, body).prompt > 10
        return
    # A raw prompt speaks in tokens: this one stands for a picture that is not there.
    refused = server.post(endpoint.path, body)
    assert refused.status_code == 400
    assert "stands for pictures" in endpoint.error(refused)


def test_one_picture_gives_one_answer_in_every_form_and_is_encoded_once(
    server: Server, shown: Path
) -> None:
    before = encodings(server)
    sources = [data_uri(PNG), data_uri(WEBP, "image/webp"), f"file://{shown}/a.png"]
    answers = [
        chat(server, said(part(s), "What is it?"), logprobs=True, cache_salt=str(n))
        for n, s in enumerate(sources)
    ]
    assert len({json.dumps(a["choices"][0]["logprobs"]) for a in answers}) == 1
    assert len({a["usage"]["prompt_tokens"] for a in answers}) == 1
    assert encodings(server) - before <= 1


def test_20_another_picture_is_another_answer(server: Server) -> None:
    one, other, again = (
        chat(server, said(part(data_uri(data)), "What is it?"), logprobs=True)
        for data in (PNG, OTHER, PNG)
    )
    assert one["choices"][0]["logprobs"] == again["choices"][0]["logprobs"]
    assert one["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def test_ten_turns_about_one_picture_encode_it_once_and_run_only_what_is_new(
    server: Server,
) -> None:
    before = encodings(server)
    picture = data_uri(png(120, 80, seed=77))
    messages = [said(part(picture), "What is it?")]
    known = 0
    for number in range(10):
        answer = chat(server, *messages)
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= known
        known = usage["prompt_tokens"] - 4
        messages += [answer["choices"][0]["message"], said(f"And what else, {number}?")]
    assert encodings(server) - before == 1


def test_the_count_of_tokens_is_that_of_the_answer(server: Server) -> None:
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": b64(PNG)},
    }
    body = {"model": "sees", "messages": [{"role": "user", "content": [block, text("Well?")]}]}
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    answer = server.post("/v1/messages", body | {"max_tokens": 3}).json()
    usage = answer["usage"]
    spent = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == spent + usage["cache_creation_input_tokens"]
    asked = {"model": "sees", "messages": [said(part(data_uri(PNG)), "Well?")]}
    tokens = server.post("/tokenize", asked).json()["tokens"]
    assert tokens.count(vision_models.IMAGE) == 12
    assert len(tokens) == chat(server, *asked["messages"])["usage"]["prompt_tokens"]


def test_less_detail_is_fewer_tokens(server: Server) -> None:
    large = data_uri(png(1200, 40))
    low, high = (
        chat(server, said(part(large, detail=d), "?"))["usage"]["prompt_tokens"]
        for d in ("low", "high")
    )
    assert low < high


def test_the_openai_client_shows_a_picture(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    messages: Any = [said("First: ", part(data_uri(PNG)), " and what is it?")]
    answer = client.chat.completions.create(model="sees", messages=messages, **SHORT)
    pieces = client.chat.completions.create(model="sees", messages=messages, stream=True, **SHORT)
    assert answer.choices[0].message.content == "".join(
        c.choices[0].delta.content or "" for c in pieces if c.choices
    )
    shown: Any = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": data_uri(PNG), "detail": "auto"},
    ]
    first = client.responses.create(
        model="sees", input=[{"role": "user", "content": shown}], max_output_tokens=6, temperature=0
    )
    second = client.responses.create(
        model="sees",
        input="And now?",
        previous_response_id=first.id,
        max_output_tokens=6,
        temperature=0,
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 12


def test_31_messages_take_pictures_also_as_a_tools_result(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="x")
    block: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": b64(PNG)},
    }
    messages: Any = [{"role": "user", "content": [block, text("What is it?")]}]
    answer = client.messages.create(
        model="sees", messages=messages, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert answer.content and answer.usage.input_tokens > 0
    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    results: Any = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block]}],
        },
    ]
    with_picture = client.messages.count_tokens(model="sees", messages=results, tools=[tool])
    answer = client.messages.create(model="sees", messages=results, tools=[tool], max_tokens=6)
    usage = answer.usage
    spent = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert with_picture.input_tokens == spent + (usage.cache_creation_input_tokens or 0)


def test_the_ollama_client_shows_a_picture(server: Server) -> None:
    client = ollama.Client(server.url)
    options = {"num_predict": 6, "temperature": 0}
    message = {"role": "user", "content": "What is it?", "images": [PNG]}
    answer = client.chat("sees", [message], options=options)
    pieces = client.chat("sees", [message], options=options, stream=True)
    assert answer.message.content == "".join(p.message.content or "" for p in pieces)
    alone = client.generate("sees", "What is it?", images=[PNG], options=options)
    assert alone.prompt_eval_count == answer.prompt_eval_count
    assert "vision" in (client.show("sees").capabilities or [])
    assert "vision" not in (client.show("reads").capabilities or [])


def test_a_stream_about_a_picture_survives_the_death_of_its_engine(server: Server) -> None:
    messages = [said(part(data_uri(png(200, 160, seed=11))), "Tell me.")]
    wishes = {"max_tokens": 150, "ignore_eos": True, "cache_salt": "killed"}
    undisturbed = chat(server, *messages, **wishes)["choices"][0]["message"]["content"]
    body = {"model": "sees", "messages": messages, **SHORT, **wishes, "stream": True}
    pieces: list[str] = []
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            if len(pieces) == 5:
                models = server.http.get("/v1/status").json()["models"]
                os.kill(
                    next(m["engine_pid"] for m in models if m["name"] == "sees"), signal.SIGKILL
                )
    assert "".join(pieces) == undisturbed
    assert until(lambda: total(server, "millrace_engine_restarts_total", model="sees") >= 1)


def test_generate_takes_pictures_where_the_prompt_has_places(server: Server) -> None:
    prompt = "<|vision_start|><|image_pad|><|vision_end|> is"
    wishes = {"model": "sees", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    one = server.post("/generate", {"text": prompt, "image_data": data_uri(PNG)} | wishes).json()
    tokens = server.post("/tokenize", {"model": "sees", "prompt": prompt}).json()["tokens"]
    again = server.post("/generate", {"input_ids": tokens, "image_data": [b64(WEBP)]} | wishes)
    assert again.json()["output_ids"] == one["output_ids"]
    assert one["meta_info"]["prompt_tokens"] == len(tokens) + 11
    two = {"text": [prompt, prompt], "image_data": [[data_uri(PNG)], [data_uri(OTHER)]]}
    first, second = server.post("/generate", two | wishes).json()
    assert first["output_ids"] == one["output_ids"]
    assert second["meta_info"]["prompt_tokens"] == one["meta_info"]["prompt_tokens"]
    for body in (
        {"text": "no place", "image_data": data_uri(PNG)},
        {"text": prompt},
        {"text": [prompt, prompt], "image_data": data_uri(PNG)},
    ):
        assert server.post("/generate", body | wishes).status_code == 400


def test_the_cache_is_warmed_with_pictures(server: Server) -> None:
    messages = [said(part(data_uri(png(120, 80, seed=5))), "Warm?")]
    body = {"model": "sees", "conversations": [{"messages": messages}]}
    assert server.post("/v1/cache/warm", body).status_code == 200
    usage = chat(server, *messages)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_models_say_what_they_take_in(server: Server) -> None:
    cards = {c["id"]: c["input_modalities"] for c in server.http.get("/v1/models").json()["data"]}
    assert cards == {"sees": ["text", "image", "video"], "reads": ["text"]}
    info = server.http.get("/get_model_info", params={"model": "sees"}).json()
    assert info["has_image_understanding"] is True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [said(part(data_uri(PNG)), "?")]}),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": data_uri(PNG)}],
                    }
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 3,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "data": b64(PNG)}}
                        ],
                    }
                ],
            },
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "?", "images": [b64(PNG)]}]}),
        ("/api/generate", {"prompt": "?", "images": [b64(PNG)]}),
        ("/generate", {"text": "?", "image_data": data_uri(PNG)}),
        ("/tokenize", {"messages": [said(part(data_uri(PNG)))]}),
        ("/v1/cache/warm", {"conversations": [{"messages": [said(part(data_uri(PNG)))]}]}),
    ],
)
def test_a_text_model_refuses_pictures_by_its_name(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    refused = server.post(path, body | {"model": "reads"})
    assert refused.status_code == 400
    assert "the model 'reads' takes text only" in refused.text


def hostile(site_url: Callable[..., str]) -> dict[str, Any]:
    """Sources that must be refused, by what they are."""
    found: dict[str, Any] = {f"a file: {k}": data_uri(v) for k, v in broken_files().items()}
    found |= {
        "this machine": site_url("/a.png"),
        "this machine by name": site_url("/a.png", "localhost"),
        "this machine in hexadecimal": site_url("/a.png", "0x7f000001"),
        "this machine as one number": site_url("/a.png", "2130706433"),
        "this machine in short": site_url("/a.png", "127.1"),
        "this machine, mapped": site_url("/a.png", "[::ffff:127.0.0.1]"),
        "this machine, newer": site_url("/a.png", "[::1]"),
        "nowhere": site_url("/a.png", "0.0.0.0"),
        "a cloud's secrets": "http://169.254.169.254/latest/meta-data/",
        "a private network": "http://10.0.0.1/a.png",
        "this machine through NAT64": site_url("/a.png", "[64:ff9b::7f00:1]"),
        "a network of carriers": "http://100.64.0.1/a.png",
        "a port of mail": "http://example.com:25/a.png",
        "a user's name": "http://me:secret@example.com/a.png",
        "another scheme": "ftp://example.com/a.png",
        "a script": "javascript:alert(1)",
        "a local file": "file:///etc/passwd",
        "a local file of nobody's": "file:///proc/self/environ",
        "no base64": "data:image/png;base64,@@@@",
        "no comma": "data:image/png;base64",
        "another type": "data:text/html;base64,AAAA",
        "nothing": "data:image/png;base64,",
        "spaces": "   ",
        "too many bytes": data_uri(bytes(21 << 20)),
        "a ribbon": data_uri(png(6000, 8)),
    }
    return found


def test_hostile_pictures_are_refused_and_the_server_is_as_it_was(server: Server) -> None:
    chat(server, said(part(data_uri(PNG)), "?"))
    with picture_site() as site:
        sources = hostile(site.url)
        assert len(sources) >= 58
        held = resident(server)
        for name, source in sources.items():
            body = {"model": "sees", "messages": [said(part(source), "?")], **SHORT}
            refused = server.post("/v1/chat/completions", body)
            assert 400 <= refused.status_code < 500, (name, refused.text)
            error = refused.json()["error"]
            assert error["param"].startswith("messages"), (name, error)
            assert len(error["message"]) < 500, (name, error)
        assert site.asked == []
    many = {"model": "sees", "messages": [said(*[part(data_uri(PNG))] * 10_000)]}
    assert "10000 pictures" in server.post("/v1/chat/completions", many).json()["error"]["message"]
    flood = {
        "model": "sees",
        "messages": [said(part("data:image/png;base64," + "A" * (200 << 20)))],
    }
    assert server.post("/v1/chat/completions", flood).status_code == 413
    del flood
    assert server.http.get("/health").status_code == 200
    chat(server, said(part(data_uri(png(60, 60, seed=9))), "Still here?"))
    assert resident(server) - held < 200 << 20


def test_35_nothing_is_fetched_from_a_private_network(server: Server) -> None:
    with picture_site() as site:
        site.pages["/a.png"] = (200, {}, PNG)
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"):
            shown = said(part(site.url("/a.png", host)), "?")
            refused = server.post("/v1/chat/completions", {"model": "sees", "messages": [shown]})
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_image"
        assert site.asked == []


def test_files_outside_the_open_folder_are_not_told_from_none(server: Server, shown: Path) -> None:
    outside = shown.parent / "hidden.png"
    told = {
        server.post(
            "/v1/chat/completions",
            {"model": "sees", "messages": [said(part(f"file://{path}"), "?")], **SHORT},
        ).json()["error"]["message"]
        for path in (outside, outside.with_name("nothing.png"), "/etc/passwd")
    }
    assert len(told) == 1
