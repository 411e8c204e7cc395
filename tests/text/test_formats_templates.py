"""Round trips: real templates render a conversation with calls, and our machine reads it back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_formats_support import HOSTILE, MATERIAL, TAME, TOOLS, cut, fold, read, special_tokens

from millrace.errors import BadRequest
from millrace.text.formats import detect, thinking_controls
from millrace.text.formats.style import Style, probe
from millrace.text.messages import prepare
from millrace.text.template import ChatTemplate

FOLDER = MATERIAL / "templates"
PATHS = sorted(FOLDER.glob("*.jinja"))

AMBIGUOUS = {"tool_chat_template_llama4_pythonic"}
"""Templates that write values without any escaping: only tame ones can be told apart."""
ALWAYS_PROMPTS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "<|SYSTEM_TOKEN|>",
    "fireworks-ai-llama-3-firefunction-v2": "<|start_header_id|>",
}
"""Templates that append a generation prompt unasked, and where their answers end."""
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""Templates that render no calls: their history is written by us, in the family's markup."""
FAMILY = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder",
    "StepFun3.5-Flash": "qwen3-coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-3",
    "tool_chat_template_llama4_pythonic": "pythonic",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai-DeepSeek-V4": "deepseek-v4",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-v3",
    "Kimi-K2-Instruct": "kimi-k2",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm-4.7",
    "MiniMax-M2": "minimax-m2",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "meetkai-functionary-medium-v3.1": "functionary-v3.1",
    "meetkai-functionary-medium-v3.2": "functionary-v3.2",
    "google-gemma-4-31B-it": "gemma-4",
    "google-gemma-2-2b-it": "gemma-3",
    "LFM2-8B-A1B": "lfm2",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r",
    "ByteDance-Seed-OSS": "seed-oss",
    "openai-gpt-oss-120b": "harmony",
    "microsoft-Phi-3.5-mini-instruct": "plain",
}

pytestmark = pytest.mark.skipif(not PATHS, reason=f"no templates in {FOLDER}")


def conversation(arguments: dict[str, Any], content: str) -> list[dict[str, Any]]:
    calls = [("call_one_0001", "get_weather", arguments), ("call_two_0002", "ping", {})]
    return [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "Let me think.\nYes.",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                for i, n, a in calls
            ],
        },
        {"role": "tool", "tool_call_id": "call_one_0001", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_two_0002", "content": "pong"},
    ]


def split(prompt: str, full: str) -> tuple[str, str]:
    """The prompt an answer followed, and the answer, where the two renders part ways."""
    if full.startswith(prompt):
        return prompt, full[len(prompt) :]
    size = next(i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b)
    begin = full.rfind("<", 0, size)
    if begin >= 0 and ">" not in full[begin:size]:
        size = begin
    return full[:size], full[size:]


def answers(
    path: Path, template: ChatTemplate, style: Style, messages: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Each assistant message of the conversation, with the prompt before it."""
    format = detect(template.source, special_tokens(template.source))
    ready = prepare(messages, TOOLS, style, format)
    kwargs = ready.arguments | thinking_controls(template.source).arguments(enabled=True)
    found = []
    for index, message in enumerate(ready.messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(ready.messages[:index], tools=ready.tools, **kwargs)
        full = template.render(
            ready.messages[: index + 1], tools=ready.tools, add_generation_prompt=False, **kwargs
        )
        before, answer = split(prompt, full)
        if path.stem in ALWAYS_PROMPTS:
            answer = answer.split(ALWAYS_PROMPTS[path.stem])[0]
        found.append((prompt if format.name == "apriel" else before, answer))
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_calls_come_back(path: Path, content: str) -> None:
    template = ChatTemplate(path.read_text(), bos_token="<BOS>", eos_token="<EOS>")
    style = probe(template)
    assert style.calls or path.stem in WITHOUT_CALLS
    format = detect(template.source, special_tokens(template.source))
    arguments = TAME if path.stem in AMBIGUOUS else HOSTILE
    try:
        parts = answers(path, template, style, conversation(arguments, content))
    except BadRequest as error:
        pytest.skip(f"the template itself cannot be rendered: {error.message[:120]}")
    rng = random.Random(path.stem)
    calls: list[tuple[str, Any]] = []
    said = thought = ""
    for prompt, answer in parts:
        whole = fold(read(format, [answer], prompt=prompt))
        for _ in range(8):
            assert fold(read(format, cut(answer, rng), prompt=prompt)) == whole
        calls += whole.calls
        said += whole.content
        thought += whole.reasoning
    assert calls == [("get_weather", arguments), ("ping", {})]
    assert said.strip() in ("", content) or format.name == "harmony"
    if style.reasoning is not None and "Let me think" in "".join(answer for _, answer in parts):
        assert thought.startswith("Let me think.\nYes.")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_family_is_detected(path: Path) -> None:
    source = path.read_text()
    format = detect(source, special_tokens(source))
    assert format.name == FAMILY.get(path.stem, format.name)
    if "</think>" in source:
        assert format.thought is not None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_cut_answer_leaks_no_markup(path: Path) -> None:
    template = ChatTemplate(path.read_text(), bos_token="<BOS>", eos_token="<EOS>")
    style = probe(template)
    format = detect(template.source, special_tokens(template.source))
    arguments = TAME if path.stem in AMBIGUOUS else HOSTILE
    try:
        parts = answers(path, template, style, conversation(arguments, ""))
    except BadRequest as error:
        pytest.skip(f"the template itself cannot be rendered: {error.message[:120]}")
    for prompt, answer in parts:
        for size in range(0, len(answer), 3):
            found = fold(read(format, [answer[:size]], prompt=prompt, truncated=True))
            for marker in format.markers:
                assert marker not in found.content
            assert found.content.strip() == "" or is_wordy_prefix(found.content, format.markers)


def is_wordy_prefix(text: str, markers: frozenset[str]) -> bool:
    """Half of a marker that begins with plain words cannot be told from words."""
    starts = [*markers, "Action:", "functools", ">>>"]
    return text.isascii() and any(start.startswith(text.strip()) for start in starts)
