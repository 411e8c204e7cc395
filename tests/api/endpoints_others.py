"""The endpoints that are not OpenAI's: Anthropic's Messages, SGLang's /generate, Ollama's chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from api.endpoint import SAMPLING, SHARED, Endpoint, Frame, Said, called
from pydantic_core import from_json


class Messages(Endpoint):
    name, path = "messages", "/v1/messages"
    where: ClassVar = {
        **{w: w for w in (*SHARED, "tool_choice", "tools", "stop_in_reasoning", "stop_token_ids")},
        "stop": "stop_sequences",
        "include_stop": "include_stop_str_in_output",
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
            generated=usage["output_tokens"],
            thinking=usage["output_tokens_details"]["thinking_tokens"],
            cached=cached,
            ids=tuple(b["id"] for b in uses),
            turn=({"role": "assistant", "content": blocks},),
            raw=answer,
        )

    def results(self, said: Said, outputs: Sequence[str]) -> list[dict[str, Any]]:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": text}
            for id, text in zip(said.ids, outputs, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def fold(self, found: list[Frame]) -> Said:
        assert all(f.name == f.data["type"] for f in found)
        reported = [f.data for f in found if f.name != "ping"]
        first, *middle, delta, last = reported
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
        message["content"] = content
        pieces = tuple(p for parts in spelled.values() for p in parts)
        said = self.read(message)
        return Said(**{**vars(said), "pieces": tuple(texts), "spelled": pieces, "raw": reported})

    def trouble(self, reported: Any) -> str:
        assert set(reported) == {"type", "error"} and reported["type"] == "error"
        assert {"type", "message"} <= set(reported["error"]) <= {"type", "message", "details"}
        return str(reported["error"]["message"])


def _object(text: str) -> Any:
    """As the SDK reads it, which takes what is complete of a call that was cut off."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


class Generate(Endpoint):
    name, path = "generate", "/generate"
    is_raw = True
    where: ClassVar = {
        **{w: f"sampling_params.{w}" for w in (*SAMPLING, "stop_token_ids", "n")},
        "max_tokens": "sampling_params.max_new_tokens",
        "seed": "sampling_params.sampling_seed",
        "schema": "sampling_params.json_schema",
        "include_stop": "sampling_params.no_stop_trim",
        "model": "model",
        "cache_salt": "cache_salt",
        "timeout": "timeout",
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
            generated=meta["completion_tokens"],
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
        **{w: f"options.{w}" for w in SAMPLING if w not in ("logit_bias", "ignore_eos")},
        "max_tokens": "options.num_predict",
        "stop_token_ids": "options.stop_token_ids",
        "include_stop": "options.include_stop_str_in_output",
        "schema": "format",
        "enable_thinking": "think",
        **{w: w for w in ("model", "tools", "cache_salt", "timeout")},
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
            generated=answer["eval_count"],
            ids=tuple(c["id"] for c in calls),
            turn=({"role": "assistant", **message},),
            raw=answer,
        )

    def results(self, said: Said, outputs: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_name": call.name, "content": text}
            for call, text in zip(said.calls, outputs, strict=True)
        ]

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

    def trouble(self, reported: Any) -> str:
        assert set(reported) == {"error"}
        return str(reported["error"])
