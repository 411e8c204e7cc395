"""OpenAI's endpoints: chat, completions and Responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx
from api.endpoint import SHARED, Endpoint, Frame, Said, called
from api.responses_wire import check_order, events


class _OpenAI(Endpoint):
    where: ClassVar = {
        **{w: w for w in SHARED},
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
            generated=usage["completion_tokens"],
            thinking=usage["completion_tokens_details"]["reasoning_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            ids=tuple(c["id"] for c in calls),
            turn=({"role": "assistant", **message},),
            raw=raw,
            **more,
        )

    def results(self, said: Said, outputs: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": id, "content": text}
            for id, text in zip(said.ids, outputs, strict=True)
        ]


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


class Responses(Endpoint):
    name, path = "responses", "/v1/responses"
    where: ClassVar = {
        **{w: w for w in (*SHARED, "stop_token_ids", "tools", "tool_choice", "enable_thinking")},
        "max_tokens": "max_output_tokens",
        "schema": "text.format",
        "thinking_budget": "thinking_token_budget",
        "include_stop": "include_stop_str_in_output",
        "stop_in_reasoning": "stop_in_reasoning",
    }
    history = "input"
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
        generated: dict[str, list[Any]] = {}
        for item in answer["output"]:
            generated.setdefault(item["type"], []).append(item)
        calls, usage = generated.get("function_call", []), answer["usage"]
        finish = {"completed": "stop", "incomplete": "length"}[answer["status"]]
        return Said(
            text=_parts(generated.get("message", [])),
            thought=_parts(generated.get("reasoning", [])),
            calls=tuple(called(c["name"], c["arguments"]) for c in calls),
            finish="calls" if calls and finish == "stop" else finish,
            matched=answer.get("matched_stop"),
            prompt=usage["input_tokens"],
            generated=usage["output_tokens"],
            thinking=usage["output_tokens_details"]["reasoning_tokens"],
            cached=usage["input_tokens_details"]["cached_tokens"],
            ids=tuple(c["call_id"] for c in calls),
            turn=tuple(answer["output"]),
            raw=answer,
        )

    def results(self, said: Said, outputs: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in zip(said.ids, outputs, strict=True)
        ]

    def stream(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        with self.open(client, body, **more) as response:
            assert response.status_code == 200, response.read()
            reported = events(response)
        said = self.read(check_order(reported))
        deltas = {kind: tuple(e["delta"] for e in reported if e["type"] == f"response.{kind}.delta")
                  for kind in ("output_text", "function_call_arguments")}  # fmt: skip
        pieces, spelled = deltas.values()
        return Said(**{**vars(said), "pieces": pieces, "spelled": spelled, "raw": reported})


def _parts(items: Sequence[Any]) -> str:
    return "".join(part["text"] for item in items for part in item["content"])
