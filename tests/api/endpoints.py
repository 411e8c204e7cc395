"""The six endpoints that answer, for tests that hold all of them to one bar."""

from __future__ import annotations

from api.endpoint import Endpoint
from api.endpoints_openai import Chat, Completions, Responses
from api.endpoints_others import Generate, Messages, Ollama

CHAT, COMPLETIONS, MESSAGES = Chat(), Completions(), Messages()
RESPONSES, GENERATE, OLLAMA = Responses(), Generate(), Ollama()
ALL: list[Endpoint] = [CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE, OLLAMA]
TALKS: list[Endpoint] = [e for e in ALL if not e.is_raw]
"""Those that take a conversation."""

_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def turn(endpoint: Endpoint, say: str) -> str:
    """A user's turn for any endpoint: raw ones get it as a ChatML template writes it."""
    return _TURN.format(say) if endpoint.is_raw else say
