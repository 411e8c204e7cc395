"""The `context` of /api/generate: an earlier exchange in tokens, which the next prompt follows."""

from __future__ import annotations

import dataclasses

from millrace.serving.model import ServedModel
from millrace.serving.request import check_tokens
from millrace.text.conversation import Conversation, ConversationTurn
from millrace.text.deltas import TextFinish

_BOUNDARY = "millrace-border"


def followed(context: list[int], chat: Conversation, model: ServedModel) -> list[int]:
    """The context, and the turn after it as the template writes a turn that is not the first."""
    check_tokens("context", context, model.width)
    earlier = [ConversationTurn("user", "?"), ConversationTurn("assistant", _BOUNDARY)]
    whole = model.render(dataclasses.replace(chat, messages=[*earlier, *chat.messages])).text
    _, boundary, turn = whole.rpartition(_BOUNDARY)
    if not boundary:
        turn = model.render(chat).text
    # The template writes the end of the earlier answer, whether that came to its end or not.
    while context and context[-1] in model.tokenizer.eos_ids:
        context = context[:-1]
    return context + model.encode([turn], special=False)[0]


def after(
    prompt: list[int], generated: list[int], finish: TextFinish | None, model: ServedModel
) -> list[int]:
    """The context to go on from: prompt and answer, without a stop string that was cut off."""
    if finish is not None and isinstance(finish.matched, str):
        text = model.tokenizer.decode(generated, skip_special=False)
        generated = model.tokenizer.encode(text[: text.rfind(finish.matched)])
    return prompt + generated
