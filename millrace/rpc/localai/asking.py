"""A PredictOptions message made into a Request: every field honoured, or refused by its name.

What only says how work is to be done, and not what is answered, is taken as the advice it is.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import BadRequest, Unsupported
from millrace.rpc.localai.holder import HeldModel
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.sampling_fields import SamplingFields, fill
from millrace.serving.thinking import strange_arguments, template_switch
from millrace.serving.toolbox import ChosenTools, check_tools, choose, flat_tool, open_tools
from millrace.text.conversation import Conversation, ConversationTurn, ImagePart, TextPart, turn_of
from millrace.text.grammar import Demand

_CALLED = {"stop": "StopPrompts"}
_HERE = {"thinking": "Metadata.enable_thinking", "effort": "Metadata.reasoning_effort"}
_MEDIA = {"Videos": "videos", "Audios": "sounds"}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "Mirostat": (0,),
    "TailFreeSamplingZ": (0.0, 1.0),
    "RopeFreqBase": (0.0,),
    "RopeFreqScale": (0.0, 1.0),
    "NegativePrompt": ("",),
    "NegativePromptScale": (0.0, 1.0),
}
"""Fields that change the answer and are not there, with the values that ask for nothing."""
_FLOATS = (
    *("Temperature", "TopP", "MinP", "TypicalP"),
    *("Penalty", "FrequencyPenalty", "PresencePenalty"),
)
_WHOLE_CONTEXT = (0, -1)
"""What `Repeat` may be where penalties look at the whole context."""
_RANDOM_SEEDS = (0, -1)
"""What is sent where nobody chose a seed."""


@dataclass(frozen=True)
class BackendRequest:
    request: Request
    ignored: list[str] = field(default_factory=list)
    """The names of fields that this model cannot be steered by."""


async def asked_of(wire: Any, held: HeldModel, model: ServedModel) -> BackendRequest:
    """What takes long, rendering, tokenising and pictures, is done on threads."""
    _refuse(wire)
    if (most := held.plan.most_pictures) and len(wire.Images) > most:
        raise BadRequest(
            f"'Images' has {len(wire.Images)} pictures; this model was loaded for {most} a prompt.",
            param="Images",
        )
    demand = Demand("grammar", wire.Grammar, "Grammar") if wire.Grammar.strip() else None
    id = f"localai-{secrets.token_hex(12)}"
    if is_chat(wire):

        def finish(chat: Conversation) -> BackendRequest:
            request = model.chat(id, chat, demand)
            ignored = [_HERE[name] for name in model.dialect.ignored(chat)]
            ignored += strange_arguments(_template_arguments(wire), model.dialect)
            return _filled(request, wire, held, model, ignored)

        return await prepared(model.pictures, lambda: conversation_of(wire), finish)

    def read() -> list[int]:
        _refuse_forced_tools(wire, demand)
        model.need_text()
        return model.text_prompt(wire.Prompt)

    tokens = await asyncio.to_thread(read)
    raw = await model.pictures.placed(tokens, _pictures(wire), model.tokenizer)

    def write() -> BackendRequest:
        request = Request(id=id, prompt=raw.tokens, grammar=model.form(demand))
        request.media, request.pictures = raw.media, raw.pictures
        return _filled(request, wire, held, model, [])

    return await asyncio.to_thread(write)


def _filled(
    request: Request, wire: Any, held: HeldModel, model: ServedModel, ignored: list[str]
) -> BackendRequest:
    fill(request, _sampling_fields(wire, held), model, _CALLED)
    request.end_token_ids = list(held.plan.end_ids)
    request.logprobs = _logprobs(wire)
    return BackendRequest(request, ignored)


def _pictures(wire: Any) -> list[ImagePart]:
    return [ImagePart(image, where=f"Images[{at}]") for at, image in enumerate(wire.Images)]


def is_chat(wire: Any) -> bool:
    """Whether the model's own template writes the prompt."""
    return not wire.Prompt and wire.UseTokenizerTemplate and bool(wire.Messages)


def refuse_media(wire: Any) -> None:
    for name, what in _MEDIA.items():
        if getattr(wire, name):
            raise Unsupported(f"'{name}': {what} are not taken over this protocol yet.", param=name)


def _refuse(wire: Any) -> None:
    refuse_media(wire)
    for name, plain in _REFUSED.items():
        if getattr(wire, name) not in plain:
            raise Unsupported(f"'{name}' is not supported by this server.", param=name)
    for name in _FLOATS:
        if not math.isfinite(getattr(wire, name)):
            raise BadRequest(f"'{name}' is not a finite number.", param=name)
    penalised = wire.Penalty not in (0.0, 1.0) or wire.FrequencyPenalty or wire.PresencePenalty
    if penalised and wire.Repeat not in _WHOLE_CONTEXT:
        raise Unsupported(
            "'Repeat': penalties look at the whole context here; send 0 or -1.", param="Repeat"
        )


def _refuse_forced_tools(wire: Any, demand: Demand | None) -> None:
    """With a prompt of its own making, the client reads the calls; a demand for one is a grammar's."""
    if demand is None and wire.Tools and _choice(wire) not in (None, "auto", "none"):
        raise Unsupported(
            "'ToolChoice' demands a call, and the prompt was not written by the model's template. "
            "Send Messages with UseTokenizerTemplate, or a Grammar.",
            param="ToolChoice",
        )


def _sampling_fields(wire: Any, held: HeldModel) -> SamplingFields:
    if wire.Tokens < -1:
        raise BadRequest("'Tokens' is negative.", param="Tokens")
    fields = SamplingFields(
        temperature=wire.Temperature,
        top_p=wire.TopP or None,
        top_k=wire.TopK or None,
        min_p=wire.MinP or None,
        typical_p=wire.TypicalP or None,
        repetition_penalty=wire.Penalty or None,
        presence_penalty=wire.PresencePenalty or None,
        frequency_penalty=wire.FrequencyPenalty or None,
        logit_bias=_bias(wire.LogitBias),
        seed=None if wire.Seed in _RANDOM_SEEDS else wire.Seed,
        max_tokens=wire.Tokens if wire.Tokens > 0 else None,
        stop=list(wire.StopPrompts) or None,
        ignore_eos=wire.IgnoreEOS,
        loop_guard=_truth(wire, "loop_guard"),
        specprefill=_truth(wire, "specprefill"),
        specprefill_keep_pct=_share(wire, "specprefill_keep_pct"),
    )
    for name, value in held.plan.options.overrides.items():
        setattr(fields, name, value)
    return fields


def _truth(wire: Any, name: str) -> bool | None:
    said = wire.Metadata.get(name, "").strip().lower()
    if said not in ("", "true", "false"):
        raise BadRequest(f"'Metadata.{name}' must be true or false.", param=f"Metadata.{name}")
    return said == "true" if said else None


def _share(wire: Any, name: str) -> float | None:
    said = wire.Metadata.get(name, "").strip()
    if not said:
        return None
    try:
        share = float(said)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadRequest(
            f"'Metadata.{name}' must be a share above 0 and at most 1.", param=f"Metadata.{name}"
        )
    return share


def _bias(text: str) -> dict[str, float] | None:
    if not text.strip():
        return None
    found = read_json("LogitBias", text)
    if not isinstance(found, dict):
        raise BadRequest("'LogitBias' must map token ids to numbers.", param="LogitBias")
    for value in found.values():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest("'LogitBias' must map token ids to numbers.", param="LogitBias")
        if not -100 <= value <= 100:
            raise BadRequest("'LogitBias' takes numbers from -100 to 100.", param="LogitBias")
    return {key: float(value) for key, value in found.items()}


def _logprobs(wire: Any) -> int | None:
    """Alternatives beside each token's own logprob; a plain field for logprobs is sent as 1."""
    if wire.Logprobs < 0 or wire.TopLogprobs < 0:
        raise BadRequest("'Logprobs' and 'TopLogprobs' cannot be negative.", param="TopLogprobs")
    if not wire.Logprobs and not wire.TopLogprobs:
        return None
    return wire.TopLogprobs or (wire.Logprobs if wire.Logprobs > 1 else 0)  # type: ignore[no-any-return]


def conversation_of(wire: Any) -> Conversation:
    tools = _tools(wire)
    arguments = _template_arguments(wire)
    switch = template_switch(arguments)
    turns = [turn_of(_message(m)) for m in wire.Messages]
    if wire.Images:
        _show(turns, _pictures(wire))
    return Conversation(
        messages=turns,
        tools=tools.functions,
        tool_choice=tools.choice,
        tool_name=tools.name,
        thinking=_truth(wire, "enable_thinking") if switch is None else switch,
        effort=wire.Metadata.get("reasoning_effort") or None,
        template_arguments=arguments,
    )


def _show(turns: list[ConversationTurn], pictures: list[ImagePart]) -> None:
    """Pictures come beside the messages, all in one list: they are the last question's."""
    asked = next((turn for turn in reversed(turns) if turn.role == "user"), None)
    if asked is None:
        raise BadRequest("'Images' need a message of the user's.", param="Images")
    text = asked.content if isinstance(asked.content, str) else ""
    asked.content = [*pictures, TextPart(text)] if text else [*pictures]


def _message(wire: Any) -> dict[str, Any]:
    """As a template has it: what is empty was not said."""
    found: dict[str, Any] = {"role": wire.role, "content": wire.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(wire, name):
            found[name] = value
    if wire.tool_calls.strip():
        calls = read_json("Messages.tool_calls", wire.tool_calls)
        if not isinstance(calls, list):
            raise BadRequest("'tool_calls' must be a list of calls.", param="Messages")
        found["tool_calls"] = calls
    return found


def _tools(wire: Any) -> ChosenTools:
    listed = read_json("Tools", wire.Tools) if wire.Tools.strip() else []
    if not isinstance(listed, list) or not all(isinstance(t, Mapping) for t in listed or ()):
        raise BadRequest("'Tools' must be a list of tools.", param="Tools")
    check_tools(len(listed), "Tools")
    box = open_tools([flat_tool(f"Tools[{i}]", tool) for i, tool in enumerate(listed)])
    choice = _choice(wire)
    if isinstance(choice, Mapping):
        inner = choice.get("function")
        name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        choice = {"type": "function", "name": name}
    if not listed and choice in ("auto", "none"):
        choice = None
    return choose(choice, box)


def _choice(wire: Any) -> Any:
    """A word as it is or as JSON, or an object that names a function."""
    text = wire.ToolChoice.strip()
    if not text:
        return None
    if text[0] in '{"[':
        return read_json("ToolChoice", text) or None
    return text


def _template_arguments(wire: Any) -> dict[str, Any]:
    text = wire.Metadata.get("chat_template_kwargs", "")
    if not text.strip():
        return {}
    found = read_json("Metadata.chat_template_kwargs", text)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadRequest(
            "'Metadata.chat_template_kwargs' must be an object.",
            param="Metadata.chat_template_kwargs",
        )
    return found


def read_json(name: str, text: str) -> Any:
    """JSON in a field of this name, which holds no numbers that JSON does not have."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"'{name}' is not JSON: {error}.", param=name) from None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")
