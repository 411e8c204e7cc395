"""Hostile requests: sound bodies of every endpoint with odd values put in places that the API knows.

What is made up depends on the seed alone. Bodies are bytes, since much of what is sent is no value
that a JSON library would write.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

WIDTH = 49152
"""Of the tiny model's vocabulary."""
HELLO = [{"role": "user", "content": "hi"}]
_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
_FUNCTION = {"name": "look", "description": "Look.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
]  # fmt: skip
SOUND: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": HELLO, "max_tokens": 3},
        {"messages": _TALK, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"},
        {"messages": HELLO, "max_tokens": 2, "functions": [_FUNCTION], "function_call": "auto"},
        {"messages": HELLO, "max_tokens": 3, "stream": True, "logprobs": True, "top_logprobs": 2},
    ],
    "/v1/completions": [
        {"prompt": "Once", "max_tokens": 3},
        {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 1.0, "seed": 1, "top_p": 0.9},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 1, "echo": True},
    ],
    "/v1/messages": [
        {"messages": HELLO, "max_tokens": 3},
        {"messages": _BLOCKS, "max_tokens": 2, "system": [{"type": "text", "text": "Be."}],
         "tools": [{"name": "look", "input_schema": _SCHEMA}], "tool_choice": {"type": "auto"}},
    ],
    "/v1/messages/count_tokens": [{"messages": _BLOCKS}],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3},
        {"input": _ITEMS, "max_output_tokens": 2, "tools": [{"type": "function", **_FUNCTION}]},
    ],
    "/v1/responses/input_tokens": [{"input": _ITEMS}],
    "/v1/conversations": [{"items": _ITEMS, "metadata": {"a": "b"}}],
    "/v1/conversations/{id}/items": [{"items": _ITEMS}],
    "/v1/conversations/{id}": [{"metadata": {"a": "b"}}],
    "/generate": [
        {"text": "Once", "sampling_params": {"max_new_tokens": 3}},
        {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0},
         "return_logprob": True, "logprob_start_len": 0},
    ],
    "/tokenize": [{"prompt": "Once"}, {"messages": _TALK, "tools": [_TOOL]}],
    "/detokenize": [{"tokens": [1, 2]}, {"tokens": [[1], [2]]}],
    "/api/chat": [
        {"model": "tiny", "messages": HELLO, "options": {"num_predict": 3}},
        {"model": "tiny", "messages": HELLO, "tools": [_TOOL], "options": {"num_predict": 2}},
    ],
    "/api/generate": [
        {"model": "tiny", "prompt": "Once", "options": {"num_predict": 3}},
        {"model": "tiny", "prompt": "a", "context": [1, 2], "options": {"num_predict": 2}},
    ],
    "/api/show": [{"model": "tiny"}],
    "/v1/cache/warm": [{"prompts": ["Once"]}],
    "/abort_request": [{"rid": "x"}],
}  # fmt: skip
SOUND["/v1/tokenize"], SOUND["/v1/detokenize"] = SOUND["/tokenize"], SOUND["/detokenize"]

_INTEGERS = sorted(
    {s * (2**k + d) for k in (7, 31, 32, 53, 63, 64, 70) for d in (-1, 0, 1) for s in (1, -1)}
    | {0, 1, -1, 2, 3, WIDTH - 1, WIDTH, WIDTH + 1, 10**100, -(10**100), 10**4200}
)
_FLOATS = [-0.0, 0.5, 1e-5, 1e-38, 1e-39, 1e-45, 5e-324, 1e38, 1.7e308, -1e308, float("nan")]
_TEXTS = [
    "", " ", "1", "null", "\0", "a\0b", "\ud800", "\udfff x", "\ufffe", "\u2028\u2029\x85", "é" * 50,
    "👩‍👩‍👧‍👦" * 9, "\u202eabc", "\ufeff", "a\u0300" * 40, "<|im_end|>", "<think>", "{", "%s%n", "{{7*7}}",
    '"\\ud800"', '{"a": "\\ud800"}', '{"a": NaN}', "[" * 900, '{"a":' * 300 + "1" + "}" * 300, "0" * 900,
    "../../etc/passwd", "/\0", "~nobody/a", "a/" + "b" * 200,
    "9" * 5000, "²", "٣", "x" * 3000, "\r\nX-A: b", "data: x\n\n", "[", '{"a":', "\\",
]  # fmt: skip
_NAMES = [*_TEXTS, " a", "a ", "\t", "a\r\nb: c", "é "]
"""Of fields that nobody knows."""
_RAW = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E+5", "1.0", "0.0", "9" * 5000,
        "[" * 60 + "]" * 60, "[" * 400 + "]" * 400, "[" * 5000 + "]" * 5000,
        '{"a":' * 300 + "1" + "}" * 300, '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"',
        "01", "+1", "tru"]  # fmt: skip
_SHAPES: list[Any] = [
    [], {}, [[]], [{}], [None], {"type": [{}]}, [{"type": [{}]}], [{"type": {}}], {"type": None},
    [{"role": ["user"], "content": "x"}], [{"role": "user", "content": [{"type": []}]}],
    {"type": "function", "name": [1]}, {"name": {}}, [True], [1, "a", None], {"": ""}, [[[1]]],
    {"type": "json_schema", "schema": {"type": ["x"]}}, {"type": "object", "required": "😀"},
    [{"type": "function", "function": {"name": [], "parameters": []}}], [0.5], {"\ud800": 1},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": []}]},
]  # fmt: skip
_MARK = "@raw:"
Place = tuple[tuple[str, ...], tuple[float, ...]]
"""The path of a field, and numbers about the ends of its range if it holds numbers."""
Places = list[Place]
_BOUND = re.compile(r'"(?:exclusiveM|m)(?:in|ax)imum": ([-+.0-9e]+)')


@dataclass(frozen=True)
class Shot:
    """One request, ready to be sent."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers or ''} {(self.body or b'')[:600]!r}"


class Fuzzer:
    """Makes requests to all operations of an OpenAPI document."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._dice = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._operations: list[tuple[str, str, Places, dict[str, Any]]] = []
        for path, methods in document["paths"].items():
            if path.endswith("/stream"):
                continue  # those never end
            for method, operation in methods.items():
                content = operation.get("requestBody", {}).get("content", {})
                schema = content.get("application/json", {}).get("schema", {})
                found = sorted(set(self._places(schema)))
                # Numbers that are parameters of their own decide most.
                places = found + [p for p in found if p[1] and len(p[0]) <= 2] * 6
                self._operations.append((path, method, places, operation))
        # What takes a body has more to go wrong, and what runs a model most of all.
        self._weights = [
            (12 if len(places) > 40 else 3) if places else 1 for _, _, places, _ in self._operations
        ]

    def shots(self, count: int) -> Iterator[Shot]:
        for _ in range(count):
            (operation,) = self._dice.choices(self._operations, self._weights)
            yield self._shot(*operation)

    def _places(self, schema: Any, depth: int = 0) -> Iterator[Place]:
        """The paths of all fields that the description knows, with the bounds of numbers."""
        if not isinstance(schema, dict) or depth > 5:
            return
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        for name, inner in schema.get("properties", {}).items():
            yield (name,), _bounds(json.dumps(inner))
            for rest, bounds in self._places(inner, depth + 1):
                yield (name, *rest), bounds
        for key in ("anyOf", "oneOf", "allOf"):
            for inner in schema.get(key, []):
                yield from self._places(inner, depth + 1)

    def _shot(self, path: str, method: str, places: Places, operation: dict[str, Any]) -> Shot:
        dice, headers, query = self._dice, {}, []
        target = path
        for parameter in operation.get("parameters", []):
            name, where = parameter["name"], parameter["in"]
            if where == "path":
                target = target.replace(f"{{{name}}}", quote(self._word() or "x", safe=""))
            elif where == "query" and dice.random() < 0.5:
                query.append(f"{name}={quote(self._word(), safe='')}")
            elif where == "header" and dice.random() < 0.1:
                headers[name] = dice.choice(["a b", "x" * 200, "é", "ok-1", "#", "a,b"])
        target += f"?{'&'.join(query)}" if query else ""
        if not places:
            return Shot(method.upper(), target, headers=headers)
        headers["content-type"] = dice.choice(["application/json"] * 9 + ["text/plain"])
        return Shot(method.upper(), target, self._body(path, places), headers)

    def _word(self) -> str:
        dice = self._dice
        word = dice.choice([str(dice.choice(_INTEGERS)), dice.choice(_TEXTS), "true", "desc", "5"])
        return word[:400].encode("utf-8", "replace").decode()

    def _body(self, path: str, places: Places) -> bytes:
        dice = self._dice
        body: dict[str, Any] = copy.deepcopy(dice.choice(SOUND.get(path) or [{}]))
        for _ in range(dice.choice([1, 1, 1, 1, 2, 2, 3, 6])):
            if dice.random() < 0.75:
                place, bounds = dice.choice(places)
                if bounds and dice.random() < 0.8:
                    _put(body, place, self._number(bounds))
                else:
                    _put(body, place, self._odd())
            else:
                self._spoil(body)
        if dice.random() < 0.1:
            body[dice.choice(_NAMES)] = 1
        text = _written(body).encode()
        if dice.random() < 0.03:
            spoilt: list[Callable[[bytes], bytes]] = [
                lambda b: b[: dice.randrange(len(b))],
                lambda b: b.replace(b"i", b"\xff", 1),
                lambda b: b + b" x",
                lambda b: b"[" * 3000,
                lambda b: b"",
                lambda b: b"\xef\xbb\xbf" + b,
                lambda b: b.decode().encode("utf-16"),
            ]
            text = dice.choice(spoilt)(text)
        return text

    def _spoil(self, value: Any) -> None:
        """Put something odd in the place of something that is there, at any depth."""
        dice = self._dice
        while True:
            keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = dice.choice(keys)
            if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.75:
                value = value[key]
                continue
            value[key] = self._odd()
            return

    def _number(self, bounds: tuple[float, ...]) -> Any:
        """What a field of numbers may get past its type with: often just inside its range."""
        dice = self._dice
        if dice.random() < 0.5:
            return dice.choice(bounds)
        kinds: list[Callable[[], Any]] = [
            lambda: dice.choice(_INTEGERS),
            lambda: abs(dice.choice(_INTEGERS)),
            lambda: dice.choice(_FLOATS),
            lambda: abs(dice.choice(_FLOATS)),
            lambda: dice.choice([1, 2, 3, 0.1, 0.9, 1.0]),
            lambda: [abs(dice.choice(_INTEGERS)) for _ in range(dice.choice([1, 2, 30]))],
            lambda: [dice.randrange(WIDTH) for _ in range(dice.choice([1, 2, 30]))],
            lambda: {str(dice.choice(_INTEGERS)): dice.choice([1.0, -100.0, 1e300])},
            lambda: {str(dice.randrange(WIDTH)): dice.choice([1.0, -100.0, 100])},
        ]
        return dice.choice(kinds)()

    def _odd(self) -> Any:
        dice = self._dice
        kinds: list[Callable[[], Any]] = [
            lambda: dice.choice(_INTEGERS),
            lambda: dice.choice(_INTEGERS),
            lambda: dice.choice(_FLOATS),
            lambda: dice.choice(_TEXTS),
            lambda: dice.choice([True, False, None]),
            lambda: _MARK + dice.choice(_RAW),
            lambda: copy.deepcopy(dice.choice(_SHAPES)),
            lambda: [dice.choice(_INTEGERS) for _ in range(dice.choice([1, 2, 30]))],
            lambda: {str(dice.choice(_INTEGERS)): dice.choice([1.0, -100.0, 1e300])},
            lambda: dice.choice([1, 2, 0.5, 1.0, "auto", "none", "required", [1], ["a"]]),
            lambda: [dice.choice(_TEXTS) for _ in range(2)],
        ]
        return dice.choice(kinds)()


def _bounds(schema: str) -> tuple[float, ...]:
    if '"integer"' in schema:
        ends = {int(b) for b in _BOUND.findall(schema) if b.lstrip("-").isdigit()} | {0, 1}
        return tuple(sorted({e + d for e in ends for d in (-1, 0, 1)}))
    if '"number"' in schema:
        ends = {float(b) for b in _BOUND.findall(schema)} | {0.0, 1.0}
        return tuple(sorted({e + d for e in ends for d in (-1e-9, 0.0, 1e-40, 1e-9, 0.5)}))
    return ()


def _put(body: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    *outer, last = place
    at: Any = body
    for step in outer:
        inner = at.get(step)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        elif not isinstance(inner, dict):
            inner = at[step] = {}
        at = inner
    at[last] = value


def _written(value: Any) -> str:
    text = json.dumps(value)
    while (start := text.find(f'"{_MARK}')) >= 0:
        end = text.index('"', start + 1)
        while text[end - 1] == "\\":
            end = text.index('"', end + 1)
        raw = json.loads(text[start : end + 1]).removeprefix(_MARK)
        text = text[:start] + raw + text[end + 1 :]
    return text
