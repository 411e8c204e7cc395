"""The real openai SDK against a real server: streamed equals whole, batched equals alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import Server

PROMPTS = [
    "What is the capital of France?",
    "Count from one to ten.",
    "Name three colours.",
    "What is 2 + 2?",
    "Translate 'good morning' to Spanish.",
    "Say hello in Japanese: こんにちは means what?",
    "Write one line of Python that prints hi.",
    "Name an emoji for joy 😀.",
]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _whole(client: openai.OpenAI, prompt: str) -> tuple[str, str, int]:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_completion_tokens=10,
        user="tester",
    )
    choice = answer.choices[0]
    assert answer.usage
    return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens


def _streamed(client: openai.OpenAI, prompt: str) -> tuple[str, str, int]:
    text, finishes, usages = "", [], []
    with client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            if chunk.usage:
                assert chunk.choices == []
                usages.append(chunk.usage.completion_tokens)
            for choice in chunk.choices:
                assert not finishes, "a chunk after the finish"
                text += choice.delta.content or ""
                finishes += [choice.finish_reason] if choice.finish_reason else []
    assert len(finishes) == len(usages) == 1
    return text, finishes[0], usages[0]


def test_streamed_equals_whole_alone_and_eight_at_once(client: openai.OpenAI) -> None:
    whole = [_whole(client, p) for p in PROMPTS]
    assert "Paris" in whole[0][0]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda p: _streamed(client, p), PROMPTS)) == whole
        assert list(pool.map(lambda p: _whole(client, p), PROMPTS)) == whole
    assert [_streamed(client, p) for p in PROMPTS] == whole


def test_a_seed_means_the_same_alone_and_in_company(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=12
        )
        return answer.choices[0].text

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(4))) == alone
    assert len(set(alone)) > 1


def test_completions_take_strings_lists_and_token_ids(client: openai.OpenAI) -> None:
    def complete(prompt: object, **more: object) -> list[str]:
        answer = client.completions.create(
            model="smollm2",
            prompt=prompt,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=6,
            **more,  # type: ignore[arg-type]
        )
        return [c.text for c in answer.choices]

    (one,) = complete("1 2 3 4")
    assert one.startswith(" 5"), "the leading space belongs to the text"
    assert complete(["1 2 3 4", "A B C"])[0] == one
    from millrace.models.resolve import resolve
    from millrace.text.tokenizer import Tokenizer

    ids = Tokenizer(resolve(None).path).encode("1 2 3 4", special=True)
    assert complete(ids) == [one]
    assert complete([ids, ids]) == [one, one]
    assert complete("1 2 3 4", n=2) == [one, one]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="smollm2", prompt=["1 2 3 4", "A B C"], temperature=0, max_tokens=6, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == complete(["1 2 3 4", "A B C"])


def test_models_are_listed_with_their_window(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [m.id for m in listed] == ["smollm2"]
    assert listed[0].context_window == 8192  # type: ignore[attr-defined]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="smollm2", prompt="x", max_tokens=-1)
