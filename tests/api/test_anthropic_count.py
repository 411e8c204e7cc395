"""count_tokens is exact, template and tools included: behaviour 31; and sampling on /v1/messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest
from api import tiny_folder
from api.anthropic_help import HELLO, client_of, prompt_tokens
from conftest import Server
from schemas import schema

WORDS = "the sea, Zürich 雪 and 😀 <b> {json} \n\n * list `code` <tool_call> user: 42"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("anthropic-count") / "tiny", default_model)
    running = Server(str(folder), "--name", "tiny").wait_ready()
    yield running
    running.stop()


def conversation(seed: int) -> dict[str, Any]:
    """A random request: system prompts, blocks, calls, results, thoughts, late system messages."""
    dice = random.Random(seed)

    def words(most: int = 12) -> str:
        return " ".join(dice.choices(WORDS.split(" "), k=dice.randrange(1, most)))

    def text() -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": words()}
        if dice.random() < 0.3:
            block["cache_control"] = {"type": "ephemeral"}
        return block

    names = [f"tool_{n}" for n in range(dice.randrange(4))]
    messages: list[dict[str, Any]] = []
    for turn in range(dice.randrange(1, 5)):
        said: Any = words() if dice.random() < 0.5 else [text(), text()]
        messages.append({"role": "user", "content": said})
        if dice.random() < 0.2:
            messages.append({"role": "system", "content": words()})
        answer: list[dict[str, Any]] = [text()]
        if dice.random() < 0.3:
            answer.insert(0, {"type": "thinking", "thinking": words(), "signature": "s"})
        messages.append({"role": "assistant", "content": answer})
        if names and dice.random() < 0.7:
            uses = [
                {
                    "type": "tool_use",
                    "id": f"toolu_{turn}_{n}",
                    "name": dice.choice(names),
                    "input": {"a": words(), "b": [dice.random(), None, {"c": True}]},
                }
                for n in range(dice.randrange(1, 3))
            ]
            answer += uses
            results: list[dict[str, Any]] = [
                {
                    "type": "tool_result",
                    "tool_use_id": use["id"],
                    "content": dice.choice([words(), [text()], []]),
                    "is_error": dice.random() < 0.2,
                }
                for use in uses
            ]
            messages.append({"role": "user", "content": results})
    if dice.random() < 0.6:
        messages.append({"role": "user", "content": words()})
    elif messages[-1]["role"] == "assistant" and dice.random() < 0.5:
        messages.pop()
    body: dict[str, Any] = {"messages": messages}
    if dice.random() < 0.6:
        body["system"] = words(40) if dice.random() < 0.5 else [text(), text()]
    if names:
        body["tools"] = [
            {"name": name, "description": words(), "input_schema": schema(dice.randrange(99))}
            for name in names
        ]
        kind = dice.choice(["auto", "none", "auto"])
        body["tool_choice"] = {"type": kind}
    return body


def test_count_tokens_is_the_prompt_of_a_hundred_conversations(tiny: Server) -> None:
    client = client_of(tiny)

    def check(seed: int) -> int:
        body = conversation(seed)
        counted = client.messages.count_tokens(model="tiny", **body).input_tokens
        answer = client.messages.create(model="tiny", max_tokens=1, **body)
        assert prompt_tokens(answer.usage) == counted, seed
        assert answer.usage.output_tokens == 1
        return counted

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(check, range(100)))
    assert len(set(counts)) > 50


def test_count_tokens_is_what_the_template_renders(tiny: Server, default_model: Path) -> None:
    from millrace.text.tokenizer import Tokenizer

    body = {"messages": HELLO, "system": "Be brief."}
    reported = tiny.post("/v1/messages/count_tokens", body)
    rendered = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in (("system", "Be brief."), ("user", "hello"))
    )
    ids = Tokenizer(default_model).encode(rendered + "<|im_start|>assistant\n")
    assert reported.json() == {"input_tokens": len(ids)}
    assert reported.headers["request-id"]


def _said(client: anthropic.Anthropic, **fields: Any) -> str:
    answer = client.messages.create(
        model="tiny",
        max_tokens=12,
        messages=HELLO,
        extra_body={"ignore_eos": True} | fields,  # type: ignore[arg-type]
    )
    return "".join(b.text for b in answer.content if b.type == "text")


def test_sampling_fields_are_honoured(tiny: Server) -> None:
    client = client_of(tiny)
    greedy = _said(client, temperature=0)
    assert _said(client, temperature=1.0, top_k=1) == greedy
    assert _said(client, temperature=1.0, top_p=1e-9) == greedy
    drawn = [_said(client, temperature=1.0, seed=n) for n in range(3)]
    assert len({*drawn, greedy}) == 4
    with ThreadPoolExecutor(4) as pool:
        again = pool.map(lambda n: _said(client, temperature=1.0, seed=n), range(3))
        assert list(again) == drawn
    assert _said(client, temperature=0, logit_bias={"42": 100}) != greedy


def test_the_async_client(tiny: Server) -> None:
    import asyncio

    async def ask() -> tuple[str, int]:
        client = anthropic.AsyncAnthropic(base_url=tiny.url, api_key="x", max_retries=0)
        asked: Any = {"model": "tiny", "max_tokens": 6, "messages": HELLO}
        extra = {"temperature": 0, "ignore_eos": True}
        async with client, client.messages.stream(**asked, extra_body=extra) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
        return text, message.usage.output_tokens

    text, generated = asyncio.run(ask())
    assert generated == 6
    assert text == _said(client_of(tiny), temperature=0)[: len(text)]


def test_the_sdk_lists_the_models(tiny: Server) -> None:
    (listed,) = client_of(tiny).models.list()
    assert (listed.type, listed.id, listed.display_name) == ("model", "tiny", "tiny")
    assert client_of(tiny).models.retrieve("tiny") == listed
