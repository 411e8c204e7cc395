"""Every error a user can meet: a type, a stable code, and a sentence they can act on.

Protocols map these to their own wire shapes, each in one table; nothing here knows HTTP bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class MillraceError(Exception):
    """Base of all errors that are meant for a user's eyes."""

    code = "internal_error"
    status = 500
    details: ClassVar[dict[str, object] | None] = None
    """What a client's program acts on, in the terms of the one protocol that knows the error."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(MillraceError):
    """A request that is malformed, or has a value that is not taken; the message names the field."""

    code = "invalid_request"
    status = 400


class Unsupported(BadRequest):
    """A field that would change the answer and is not honoured: refused by name."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    """A prompt that is longer than the context window."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, window: int, *, at_least: bool = False) -> None:
        """`at_least` says that the prompt was not counted, since it cannot be shorter than that."""
        length = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        super().__init__(
            f"The prompt is {length} tokens long, and the context window is {window} "
            f"tokens. Shorten the prompt, or start the server with a larger --context.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.window = window


class PromptLimitExceeded(ContextLengthExceeded):
    """A prompt that the model could take, and that its caller's key or the model's table does not allow."""

    def __init__(self, prompt_tokens: int, most: int, setting: str) -> None:
        super().__init__(prompt_tokens, most)
        self.message = (
            f"The prompt is {prompt_tokens} tokens long, and the limit is {most} tokens ({setting}). "
            "Shorten the prompt."
        )
        self.args = (self.message,)


class InputTooLong(BadRequest):
    """A text for an encoder that has more tokens than it takes."""

    code = "context_length_exceeded"

    def __init__(self, name: str, tokens: int, limit: int) -> None:
        super().__init__(
            f"{name} is {tokens} tokens long, and the model takes {limit}. Shorten it, or ask for "
            f"what is too long to be cut (docs/embeddings.md says how).",
            param=name.partition("[")[0],
        )


class BadPicture(BadRequest):
    """A picture that cannot be had or read."""

    code = "invalid_image"

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class BadDocument(BadRequest):
    """A document whose text cannot be read."""

    code = "invalid_file"

    def __init__(self, message: str, *, param: str | None = "file_data") -> None:
        super().__init__(message, param=param)


class Unauthorized(MillraceError):
    """No API key, or one that the server does not know."""

    code = "invalid_api_key"
    status = 401


class NotAllowed(MillraceError):
    """Something that the operator has not opened to those who ask."""

    code = "not_allowed"
    status = 403


class RoleNeeded(NotAllowed):
    """An operation for keys of another role than the caller's."""

    code = "insufficient_permissions"


class NotFound(MillraceError):
    """A path or an id that does not exist."""

    code = "not_found"
    status = 404


class MethodNotAllowed(BadRequest):
    """A path that is there, asked with a method that it does not have."""

    status = 405

    def __init__(self, message: str, *, allow: Sequence[str]) -> None:
        super().__init__(message)
        self.allow = tuple(allow)


class PreviousResponseNotFound(BadRequest):
    """What a request goes back to is not there, or not any more."""

    code = "previous_response_not_found"

    def __init__(self, id: str, why: str = "") -> None:
        message = f"Previous response with id '{id}' not found. {why}".rstrip()
        super().__init__(message, param="previous_response_id")


class ModelNotFound(NotFound):
    """A model that this server does not serve; the message lists those that it does."""

    code = "model_not_found"

    def __init__(self, name: str, available: list[str], hint: str = "") -> None:
        known = ", ".join(available) or "none"
        shown = name if len(name) <= 200 else f"{name[:200]}..."
        hint = f" {hint}" if hint else ""
        missing = f"There is no model '{shown}' here." if name else "The request names no model."
        super().__init__(f"{missing}{hint} Models served: {known}.", param="model")


class NotLoaded(MillraceError):
    """A call that needs a model, before one was loaded."""

    code = "model_not_loaded"
    status = 409


class RequestTooLarge(MillraceError):
    """A body that is larger than `--max-body`."""

    code = "request_too_large"
    status = 413


class UnsupportedEncoding(BadRequest):
    """A request body with a Content-Encoding."""

    code = "unsupported_encoding"
    status = 415

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"The body has the Content-Encoding '{coding}', which this server does not decode. "
            f"Send it without one."
        )


class Overloaded(MillraceError):
    """The queue is full; `Retry-After` says when to come again."""

    code = "overloaded"
    status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """One caller has used up what the server grants each of them."""

    code = "rate_limit_exceeded"


class TooManyWaiting(Overloaded):
    """More wait for a model to be loaded than the server lets wait."""

    code = "model_loading"
    status = 503


class LoadFailed(Overloaded):
    """The model could not be loaded a moment ago, and is not tried again yet."""

    code = "model_load_failed"
    status = 503


class OutOfMemory(MillraceError):
    """A model for which there can never be room."""

    code = "insufficient_memory"
    status = 507


class InsufficientStorage(MillraceError):
    """No room to store a response or conversation: over the key's limit, or the disk is full."""

    code = "insufficient_storage"
    status = 507


class StorageUnavailable(MillraceError):
    """The file of stored responses cannot be read or written."""

    code = "storage_unavailable"
    status = 503


class HubUnreachable(MillraceError):
    """The Hugging Face hub does not answer, or this server may not ask it."""

    code = "hub_unreachable"
    status = 503


class DeadlineExceeded(MillraceError):
    """The `timeout` of the request has passed."""

    code = "timeout"
    status = 504


class TemplateTimeout(DeadlineExceeded):
    """A chat template that does not end: a fault of the model's files."""

    code = "template_timeout"

    def __init__(self, seconds: float, model: str = "") -> None:
        of = f" of the model '{model}'" if model else ""
        super().__init__(
            f"The chat template{of} did not finish within {seconds:g} seconds.", param="messages"
        )


class EngineUnavailable(MillraceError):
    """The engine is not running and is not coming back by itself, or died under a request."""

    code = "engine_unavailable"
    status = 503


class ShuttingDown(EngineUnavailable):
    """The server ends, and takes no more requests."""


class RequestFailed(MillraceError):
    """The engine could not carry out this one request."""

    code = "request_failed"
    status = 500


class Cancelled(MillraceError):
    """The request was cancelled, by its client or an administrator."""

    code = "cancelled"
    status = 499


class ModelError(MillraceError):
    """A model that cannot be found, read or loaded; the message names the file and the remedy."""

    code = "model_error"
    status = 503


class BrokenFiles(ModelError):
    """A model whose files are broken or missing, which a look at them tells again at any time."""


class NoSuchModel(ModelError):
    """There is no model of that name or path, here or where it would come from."""

    code = "model_not_found"
    status = 404


class AdapterError(BadRequest):
    """An adapter that cannot be served: its folder is broken, or it is for another model."""

    code = "invalid_adapter"


class AdapterUnreadable(AdapterError):
    """A path at which no adapter's files were recognised. Where the path is a client's own, the client is
    not told why: the reason says which files exist."""

    code = "unreadable_adapter"


class SetupError(MillraceError):
    """The machine or the command line is not fit: a port in use, a missing library."""

    code = "setup_error"


_BY_CODE: dict[str, type[MillraceError]] = {
    c.code: c
    for c in (
        BadRequest,
        Unsupported,
        DeadlineExceeded,
        EngineUnavailable,
        RequestFailed,
        AdapterError,
        AdapterUnreadable,
    )
} | {"model_error": ModelError, "cancelled": Cancelled}


def from_code(code: str, message: str) -> MillraceError:
    """The error an engine message stands for."""
    return _BY_CODE.get(code, RequestFailed)(message)
