"""The errors of each protocol as types, and what each status means."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.api.errors import Shape, anthropic_error, ollama_error, openai_error, tei_error


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    error: AnthropicDetail
    type: Literal["error"] = "error"


class OllamaError(msgspec.Struct):
    error: str


class TeiError(msgspec.Struct):
    error: str
    error_type: str


TYPES: dict[Shape, Any] = {
    openai_error: OpenAIError,
    anthropic_error: AnthropicError,
    ollama_error: OllamaError,
    tei_error: TeiError,
}

MEANINGS = {
    200: "The answer.",
    400: "The request is at fault; the message names the field and what it should be.",
    401: "The API key is missing or wrong.",
    403: "The key has not the role that this needs, or the operator has not opened this to those who ask "
    "or to the web page they ask from.",
    404: "There is no such model, request or object.",
    405: "The path has other methods; Allow names them.",
    409: "The object is not in a state that allows it.",
    413: "The body is larger than --max-body.",
    415: "The body has a Content-Encoding.",
    429: "Too much load, or more than the limits allow; Retry-After says when to try again.",
    499: "The request was cancelled.",
    500: "The server could not carry out the request.",
    501: "This server does not do that.",
    503: "No engine is there to answer, the model could not be loaded a moment ago, too many wait "
    "for it, or the file of stored responses cannot be used.",
    504: "The request was not finished within its own timeout.",
    507: "There can never be memory for the model, or there is no room to store the response or "
    "conversation; the message has the figures.",
}
