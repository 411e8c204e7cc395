"""The six ways to ask for an answer, asked alike and read alike: for tests that hold all to one bar.

Wishes are in chat's words; each endpoint knows where it has a field for them. What it answers,
whole or streamed, is read as a client of its own would, into one and the same `Said`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import httpx
from api.responses_wire import check_order, events


class Call(NamedTuple):
    name: str
    arguments: str
    """As JSON in one spelling, or as they came where they are no JSON."""


def called(name: str, arguments: Any) -> Call:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Call(name, arguments)
    return Call(name, json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Said:
    """An answer. What may differ when it is asked for again is not compared."""

    text: str
    finish: str
    """stop, length or calls."""
    prompt: int
    made: int
    matched: str | int | None = None
    """Where the protocol tells it."""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    thinking: int | None = None
    """Tokens of thoughts, where the protocol tells them."""
    cached: int | None = field(default=None, compare=False)
    ids: tuple[str, ...] = field(default=(), compare=False)
    """Of the calls."""
    pieces: tuple[str, ...] = field(default=(), compare=False)
    """The text as it came in a stream."""
    spelled: tuple[str, ...] = field(default=(), compare=False)
    """The arguments as they came in a stream."""
    raw: Any = field(default=None, compare=False, repr=False)


class Frame(NamedTuple):
    name: str | None
    data: Any
    """`[DONE]` as it is, all else decoded."""


def frames(lines: Iterator[str]) -> list[Frame]:
    """Server-sent events, or lines of JSON."""
    found: list[Frame] = []
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith(("data: ", "{")):
            data = line.removeprefix("data: ")
            found.append(Frame(name, data if data == "[DONE]" else json.loads(data)))
            name = None
    return found


_SAMPLING = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias",
    "ignore_eos", "stop",
)  # fmt: skip
_SHARED = (*_SAMPLING, "max_tokens", "model", "cache_salt", "timeout")


class Endpoint:
    name: ClassVar[str]
    path: ClassVar[str]
    where: ClassVar[dict[str, str]] = {}
    """Wish → field, with dots for fields inside others; what is not here cannot be said."""
    is_raw = False
    """Takes a text to go on with, not a conversation."""
    end = ""
    """What the last event of a stream is."""

    def ask(self, say: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": say}]}

    def body(self, say: str, **wishes: Any) -> dict[str, Any]:
        body = self.ask(say)
        for wish, value in wishes.items():
            *outer, last = self.where[wish].split(".")
            place = body
            for step in outer:
                place = place.setdefault(step, {})
            place[last] = self.shaped(wish, value)
        return body

    def shaped(self, wish: str, value: Any) -> Any:
        if wish == "tools":
            return [{"type": "function", "function": f} for f in value]
        return value

    def whole(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        response = client.post(self.path, json={**body, "stream": False}, **more)
        assert response.status_code == 200, response.text
        return self.read(response.json())

    def stream(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        with self.open(client, body, **more) as response:
            assert response.status_code == 200, response.read()
            return self.fold(frames(response.iter_lines()))

    def open(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Any:
        return client.stream("POST", self.path, json={**body, "stream": True}, **more)

    def read(self, answer: Any) -> Said:
        raise NotImplementedError

    def fold(self, found: list[Frame]) -> Said:
        """The answer of a stream, whose frame must be as the protocol has it."""
        raise NotImplementedError

    def error(self, response: httpx.Response) -> str:
        """The message of an error in the protocol's own shape."""
        return self.trouble(response.json())

    def trouble(self, told: Any) -> str:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        return str(told["error"]["message"])

    def __repr__(self) -> str:
        return self.name


class _OpenAI(Endpoint):
    where: ClassVar = {
        **{w: w for w in _SHARED},
        **{w: w for w in ("stop_token_ids", "n", "tool_choice", "tools", "enable_thinking")},
        "thinking_budget": "thinking_token_budget",
        "schema": "response_format",
        "include_stop": "include_stop_str_in_output",
        "stop_in_reasoning": "stop_in_reasoning",
    }
    end = "[DONE]"

    def shaped(self, wish: str, value: Any) -> Any:
        if wish == "schema":
            return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
        return super().shaped(wish, value)

    def open(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Any:
        return super().open(client, {"stream_options": {"include_usage": True}, **body}, **more)

    def read(self, answer: Any) -> Said:
        (choice,) = answer["choices"]
        return self._said(choice, answer["usage"], answer)

    def fold(self, found: list[Frame]) -> Said:
        *chunks, usage = [f.data for f in found[:-1]]
        assert found[-1].data == "[DONE]"
        assert usage["choices"] == [] and not any("usage" in c for c in chunks)
        pieces = [c["choices"][0] for c in chunks]
        assert [bool(p["finish_reason"]) for p in pieces] == [False] * (len(pieces) - 1) + [True]
        return self._joined(pieces, usage["usage"])

    def _joined(self, pieces: list[Any], usage: Any) -> Said:
        texts = [p["text"] for p in pieces if p["text"]]
        whole = pieces[-1] | {"text": "".join(texts)}
        return self._said(whole, usage, pieces, pieces=tuple(texts))

    def _said(self, choice: Any, usage: Any, raw: Any, **more: Any) -> Said:
        message = choice.get("message") or {"content": choice.get("text")}
        calls = message.get("tool_calls") or []
        finish = choice["finish_reason"]
        return Said(
            text=message["content"] or "",
            thought=message.get("reasoning_content", ""),
            calls=tuple(called(c["function"]["name"], c["function"]["arguments"]) for c in calls),
            finish="calls" if finish == "tool_calls" else finish,
            matched=choice["matched_stop"],
            prompt=usage["prompt_tokens"],
            made=usage["completion_tokens"],
            thinking=usage["completion_tokens_details"]["reasoning_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            ids=tuple(c["id"] for c in calls),
            raw=raw,
            **more,
        )


class Chat(_OpenAI):
    name, path = "chat", "/v1/chat/completions"

    def _joined(self, pieces: list[Any], usage: Any) -> Said:
        texts: list[str] = []
        spelled: list[str] = []
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        for delta in (p["delta"] for p in pieces):
            texts += [delta["content"]] if delta.get("content") else []
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(part | {"function": dict(part["function"])})
                    continue
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"][
                    "arguments"
                ]
                spelled.append(part["function"]["arguments"])
        message["content"] = "".join(texts)
        whole = pieces[-1] | {"message": message}
        more = {"pieces": tuple(texts), "spelled": tuple(spelled)}
        return self._said(whole, usage, pieces, **more)


class Completions(_OpenAI):
    name, path = "completions", "/v1/completions"
    is_raw = True

    def ask(self, say: str) -> dict[str, Any]:
        return {"prompt": say}


class Messages(Endpoint):
    name, path = "messages", "/v1/messages"
    where: ClassVar = {
        **{w: w for w in (*_SHARED, "tool_choice", "tools", "stop_in_reasoning")},
        "stop": "stop_sequences",
        "schema": "output_config.format",
        "enable_thinking": "thinking",
        "thinking_budget": "thinking",
    }
    end = "message_stop"

    def ask(self, say: str) -> dict[str, Any]:
        return super().ask(say) | {"max_tokens": 400}

    def shaped(self, wish: str, value: Any) -> Any:
        match wish:
            case "tools":
                return [
                    {("input_schema" if k == "parameters" else k): v for k, v in function.items()}
                    for function in value
                ]
            case "tool_choice":
                if isinstance(value, str):
                    return {"type": "any" if value == "required" else value}
                return {"type": "tool", "name": value["function"]["name"]}
            case "schema":
                return {"type": "json_schema", "schema": value}
            case "enable_thinking":
                return {"type": "adaptive" if value else "disabled"}
            case "thinking_budget":
                return {"type": "enabled", "budget_tokens": value}
        return value

    def read(self, answer: Any) -> Said:
        blocks, usage = answer["content"], answer["usage"]
        uses = [b for b in blocks if b["type"] == "tool_use"]
        finish = answer["stop_reason"]
        cached = usage["cache_read_input_tokens"]
        return Said(
            text="".join(b["text"] for b in blocks if b["type"] == "text"),
            thought="".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            calls=tuple(called(b["name"], b["input"]) for b in uses),
            finish={"max_tokens": "length", "tool_use": "calls"}.get(finish, "stop"),
            matched=answer["stop_sequence"],
            prompt=usage["input_tokens"] + cached + usage["cache_creation_input_tokens"],
            made=usage["output_tokens"],
            thinking=usage["output_tokens_details"]["thinking_tokens"],
            cached=cached,
            ids=tuple(b["id"] for b in uses),
            raw=answer,
        )

    def fold(self, found: list[Frame]) -> Said:
        assert all(f.name == f.data["type"] for f in found)
        told = [f.data for f in found if f.name != "ping"]
        first, *middle, delta, last = told
        assert (first["type"], delta["type"]) == ("message_start", "message_delta")
        assert last["type"] == self.end
        content: list[dict[str, Any]] = []
        texts: list[str] = []
        spelled: dict[int, list[str]] = {}
        for event in middle:
            at = event["index"]
            if event["type"] == "content_block_start":
                assert at == len(content)
                content.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                kind = event["delta"]["type"]
                if kind == "input_json_delta":
                    spelled.setdefault(at, []).append(event["delta"]["partial_json"])
                    continue
                key = {"text_delta": "text", "thinking_delta": "thinking"}.get(kind, "signature")
                content[at][key] += event["delta"][key]
                texts += [event["delta"][key]] if key == "text" else []
            else:
                assert event["type"] == "content_block_stop"
        for at, parts in spelled.items():
            content[at]["input"] = _object("".join(parts))
        message = first["message"] | delta["delta"] | {"usage": delta["usage"]}
        # A call that was cut off is none that a client could carry out.
        message["content"] = [b for b in content if b.get("input", {}) is not None]
        pieces = tuple(p for parts in spelled.values() for p in parts)
        said = self.read(message)
        return Said(**{**vars(said), "pieces": tuple(texts), "spelled": pieces, "raw": told})

    def trouble(self, told: Any) -> str:
        assert set(told) == {"type", "error"} and told["type"] == "error"
        assert {"type", "message"} <= set(told["error"]) <= {"type", "message", "details"}
        return str(told["error"]["message"])


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class Responses(Endpoint):
    name, path = "responses", "/v1/responses"
    where: ClassVar = {
        **{w: w for w in (*_SHARED, "stop_token_ids", "tools", "tool_choice", "enable_thinking")},
        "max_tokens": "max_output_tokens",
        "schema": "text.format",
        "thinking_budget": "thinking_token_budget",
        "include_stop": "include_stop_str_in_output",
        "stop_in_reasoning": "stop_in_reasoning",
    }
    end = "response.completed"

    def ask(self, say: str) -> dict[str, Any]:
        return {"input": say}

    def shaped(self, wish: str, value: Any) -> Any:
        match wish:
            case "tools":
                return [{"type": "function", **function} for function in value]
            case "tool_choice" if not isinstance(value, str):
                return {"type": "function", "name": value["function"]["name"]}
            case "schema":
                return {"type": "json_schema", "name": "x", "schema": value}
        return value

    def read(self, answer: Any) -> Said:
        made: dict[str, list[Any]] = {}
        for item in answer["output"]:
            made.setdefault(item["type"], []).append(item)
        calls, usage = made.get("function_call", []), answer["usage"]
        finish = {"completed": "stop", "incomplete": "length"}[answer["status"]]
        return Said(
            text=_parts(made.get("message", [])),
            thought=_parts(made.get("reasoning", [])),
            calls=tuple(called(c["name"], c["arguments"]) for c in calls),
            finish="calls" if calls and finish == "stop" else finish,
            matched=answer.get("matched_stop"),
            prompt=usage["input_tokens"],
            made=usage["output_tokens"],
            thinking=usage["output_tokens_details"]["reasoning_tokens"],
            cached=usage["input_tokens_details"]["cached_tokens"],
            ids=tuple(c["call_id"] for c in calls),
            raw=answer,
        )

    def stream(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        with self.open(client, body, **more) as response:
            assert response.status_code == 200, response.read()
            told = events(response)
        said = self.read(check_order(told))
        deltas = {kind: tuple(e["delta"] for e in told if e["type"] == f"response.{kind}.delta")
                  for kind in ("output_text", "function_call_arguments")}  # fmt: skip
        pieces, spelled = deltas.values()
        return Said(**{**vars(said), "pieces": pieces, "spelled": spelled, "raw": told})


def _parts(items: Sequence[Any]) -> str:
    return "".join(part["text"] for item in items for part in item["content"])


class Generate(Endpoint):
    name, path = "generate", "/generate"
    is_raw = True
    where: ClassVar = {
        **{w: f"sampling_params.{w}" for w in (*_SAMPLING, "stop_token_ids", "n")},
        "max_tokens": "sampling_params.max_new_tokens",
        "seed": "sampling_params.sampling_seed",
        "schema": "sampling_params.json_schema",
        "include_stop": "sampling_params.no_stop_trim",
        "model": "model",
        "cache_salt": "cache_salt",
    }
    end = "[DONE]"

    def ask(self, say: str) -> dict[str, Any]:
        return {"text": say}

    def read(self, answer: Any) -> Said:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        assert finish["type"] == "length" or finish["matched"] == meta["matched_stop"]
        return Said(
            text=answer["text"],
            finish=finish["type"],
            matched=meta["matched_stop"],
            prompt=meta["prompt_tokens"],
            made=meta["completion_tokens"],
            cached=meta["cached_tokens"],
            raw=answer,
        )

    def fold(self, found: list[Frame]) -> Said:
        *chunks, done = [f.data for f in found]
        assert done == self.end
        ends = [c["meta_info"]["finish_reason"] is not None for c in chunks]
        assert ends == [False] * (len(chunks) - 1) + [True]
        pieces: list[str] = []
        before = ""
        for chunk in chunks:
            assert chunk["text"].startswith(before), "the text is cumulative"
            pieces.append(chunk["text"].removeprefix(before))
            before = chunk["text"]
        said = self.read(chunks[-1])
        return Said(**{**vars(said), "pieces": tuple(pieces), "raw": chunks})


class Ollama(Endpoint):
    name, path = "ollama", "/api/chat"
    where: ClassVar = {
        **{w: f"options.{w}" for w in _SAMPLING if w not in ("logit_bias", "ignore_eos")},
        "max_tokens": "options.num_predict",
        "schema": "format",
        "enable_thinking": "think",
        **{w: w for w in ("model", "tools", "cache_salt")},
    }
    end = "done"

    def read(self, answer: Any) -> Said:
        message = answer["message"]
        calls = message.get("tool_calls") or []
        functions = [c["function"] for c in calls]
        finish = answer["done_reason"]
        return Said(
            text=message["content"],
            thought=message.get("thinking", ""),
            calls=tuple(called(f["name"], f["arguments"]) for f in functions),
            finish="calls" if calls and finish == "stop" else finish,
            prompt=answer["prompt_eval_count"],
            made=answer["eval_count"],
            ids=tuple(c["id"] for c in calls),
            raw=answer,
        )

    def fold(self, found: list[Frame]) -> Said:
        lines = [f.data for f in found]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        message: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        for line in lines:
            message["content"] += line["message"]["content"]
            message["thinking"] += line["message"].get("thinking", "")
            message["tool_calls"] += line["message"].get("tool_calls", [])
        said = self.read(lines[-1] | {"message": message})
        pieces = tuple(p for line in lines if (p := line["message"]["content"]))
        return Said(**{**vars(said), "pieces": pieces, "raw": lines})

    def trouble(self, told: Any) -> str:
        assert set(told) == {"error"}
        return str(told["error"])


CHAT, COMPLETIONS, MESSAGES = Chat(), Completions(), Messages()
RESPONSES, GENERATE, OLLAMA = Responses(), Generate(), Ollama()
ALL: list[Endpoint] = [CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE, OLLAMA]
TALKS: list[Endpoint] = [e for e in ALL if not e.is_raw]
"""Those that take a conversation."""

_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def turn(endpoint: Endpoint, say: str) -> str:
    """A user's turn for any endpoint: raw ones get it as a ChatML template writes it."""
    return _TURN.format(say) if endpoint.is_raw else say
