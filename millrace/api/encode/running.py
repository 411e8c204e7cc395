"""What the endpoints share: inputs of every form, a run that is charged, numbers as JSON."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from millrace.api.answer import whole
from millrace.api.encode.schema import EncodeCommon, InputFields, Way
from millrace.api.running import origin_of
from millrace.errors import BadRequest
from millrace.protocol import Encoded, EncodingKind
from millrace.serving.batches import PromptCount, is_token, prompts_in
from millrace.serving.dispatch import run_encoding
from millrace.serving.encodings import Encodings, numbers, rows
from millrace.serving.model import ServedModel
from millrace.text.inputs import Cut, Inputs


class Found(msgspec.Struct):
    encoded: list[Encoded]
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens, "completion_tokens": 0}


async def loaded(http: HttpRequest, model: ServedModel) -> None:
    """Wait for the model's engine, which knows sizes that its files do not tell."""
    await whole(http, model.client.settled(), lambda: None)


async def run(
    http: HttpRequest,
    encodings: Encodings,
    id: str,
    inputs: Inputs,
    kind: EncodingKind = "vectors",
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
    common: EncodeCommon | None = None,
) -> Found:
    """Have the engine do it, unless the client leaves; its tokens are charged to its caller."""
    running = run_encoding(
        encodings,
        id,
        inputs,
        origin_of(http),
        kind,
        normalize=normalize,
        dimensions=dimensions,
        priority=(common.priority if common else None) or 0,
        timeout=common.timeout if common else None,
    )
    return Found(await whole(http, running.found(), running.close), inputs.count)


def input_count(wire: InputFields) -> PromptCount:
    return PromptCount(prompts_in(wire.input), "input")


def items_of(given: str | list[Any], param: str = "input") -> list[str] | list[list[int]]:
    """A text, texts, a list of token ids, or a list of those, as a list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest(f"'{param}' is an empty list.", param=param)
    if all(isinstance(item, str) for item in given):
        return given
    if all(is_token(item) for item in given):
        return [given]
    if all(isinstance(item, list) and all(map(is_token, item)) for item in given):
        return given
    raise BadRequest(
        f"'{param}' must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids.",
        param=param,
    )


def inputs_of(
    encodings: Encodings,
    given: str | list[Any],
    *,
    cut: Cut,
    limit: int | None = None,
    prompt: str = "",
    special: bool = True,
    param: str = "input",
) -> Inputs:
    """Inputs as the engine takes them. Tokenises: not for the event loop."""
    items = items_of(given, param)
    if isinstance(items[0], str):
        texts = [item for item in items if isinstance(item, str)]
        return encodings.texts(
            texts, prompt=prompt, cut=cut, limit=limit, special=special, param=param
        )
    if prompt:
        raise BadRequest(
            "Token ids are taken as they are: no prompt can be put before them.", param=param
        )
    lists = [item for item in items if isinstance(item, list)]
    return encodings.tokens(lists, cut=cut, limit=limit)


def limit_of(
    encodings: Encodings, tokens: int | None, truncate: bool | Way | None = None
) -> tuple[int, Cut]:
    """Tokens of an input, and what becomes of more: vLLM's number and Cohere's way together."""
    limit, cut = encodings.limit(tokens)
    if truncate in (False, "NONE"):
        return limit, "none"
    if truncate is None:
        return limit, cut
    return limit, "left" if truncate == "START" else "right"


def way_of(truncate: bool | None, direction: str | None) -> Cut:
    """As TEI says it."""
    if not truncate:
        return "none"
    return "left" if (direction or "").lower() == "left" else "right"


async def spelled(found: Sequence[Encoded], *, as_base64: bool = False) -> list[msgspec.Raw]:
    """Vectors as JSON. Millions of numbers take a while to write: not on the event loop."""
    return await asyncio.to_thread(_spelled, found, as_base64)


def _spelled(found: Sequence[Encoded], as_base64: bool) -> list[msgspec.Raw]:
    if as_base64:
        return [msgspec.Raw(b'"' + base64.b64encode(e.data) + b'"') for e in found]
    # One at a time, so that others get to run in between.
    return [msgspec.Raw(msgspec.json.encode(numbers(e))) for e in found]


async def spelled_rows(found: Sequence[Encoded], *, as_base64: bool = False) -> list[msgspec.Raw]:
    """The same for texts with a vector per token."""
    if as_base64:
        return await spelled(found, as_base64=True)
    return await asyncio.to_thread(
        lambda: [msgspec.Raw(msgspec.json.encode(rows(e))) for e in found]
    )
