"""What has to be asked of the servers before a run: do they answer, which model, how long a word.

All failures here end the command, since a run against a wrong address measures nothing.
"""

from __future__ import annotations

import httpx
import msgspec

from millrace.bench.load import Wire, headers, send
from millrace.bench.samples import BenchTarget
from millrace.bench.sse import error_text
from millrace.bench.workload import Item, Sizing, WorkloadMessage, compose
from millrace.errors import SetupError

_PROBES = (60, 260)
_PATIENCE = 10.0


class _Model(msgspec.Struct):
    id: str
    state: str | None = None
    alias_of: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def with_model(http: httpx.AsyncClient, target: BenchTarget) -> BenchTarget:
    """The target with its model's name, asked of the server when the user gave none."""
    if target.model:
        return target
    where = f"Target {target.name} ({target.url})"
    try:
        answer = await http.get(f"{target.url}/models", headers=headers(target), timeout=_PATIENCE)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SetupError(
            f"{where} does not answer: {str(error) or type(error).__name__}. "
            f"Start it, or correct --target."
        ) from None
    if answer.status_code != 200:
        raise SetupError(
            f"{where} answered HTTP {answer.status_code} when asked for its models: "
            f"{error_text(answer.content)} Name one with --model, or a key with --api-key."
        )
    try:
        listed = msgspec.json.decode(answer.content, type=_Models).data
        models = [model for model in listed if model.alias_of is None]
    except msgspec.MsgspecError:
        models = []
    names = [model.id for model in models]
    loaded = [model.id for model in models if model.state == "loaded"]
    for only in (names, loaded):
        if len(only) == 1:
            return msgspec.structs.replace(target, model=only[0])
    found = f"lists {len(names)} models ({', '.join(names[:5])})" if names else "lists no model"
    raise SetupError(f"{where} {found}; choose with --model {target.name}=MODEL.")


async def calibrate(http: httpx.AsyncClient, target: BenchTarget, wire: Wire, seed: int) -> Sizing:
    """Words to tokens as this server counts, from two prompts of different length."""
    counts = []
    for words in _PROBES:
        text = compose(f"{seed}/calibrate/{words}", words, chat=wire.endpoint == "chat")
        item = Item(messages=(WorkloadMessage("user", text),), prompt=text, max_tokens=1)
        sample = await send(http, target, wire, item)
        if sample.failure is not None:
            raise SetupError(
                f"Target {target.name} failed while prompts were calibrated: "
                f"{sample.failure.label}: {sample.failure.message}"
            )
        if sample.prompt_tokens is None:
            raise SetupError(
                f"Target {target.name} reports no usage.prompt_tokens, so prompts cannot be "
                f"calibrated against it. Leave out --calibrate."
            )
        counts.append(sample.prompt_tokens)
    return fit(_PROBES, (counts[0], counts[1]))


def fit(words: tuple[int, int], tokens: tuple[int, int]) -> Sizing:
    """The line through two measurements."""
    per_word = max(0.1, (tokens[1] - tokens[0]) / (words[1] - words[0]))
    return Sizing(tokens_per_word=per_word, overhead=max(0.0, tokens[0] - per_word * words[0]))
