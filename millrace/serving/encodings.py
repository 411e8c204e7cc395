"""What a served encoder gives, as the protocols ask for it: inputs, a run, and what came of it.

It knows prompts, lengths, sizes and activations; how a protocol words them it does not know.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from millrace.caller import current_caller
from millrace.errors import BadRequest, InputTooLong, ModelError, Overloaded
from millrace.models.encoders.facts import Encoder
from millrace.protocol import Encode, Encoded, EncodingKind
from millrace.serving.client import EngineClient
from millrace.serving.encoding import EncodingInFlight
from millrace.serving.quotas import UsageQuota
from millrace.serving.request import check_tokens
from millrace.serving.workers import TextDesk
from millrace.text.inputs import DEFAULT_INSTRUCTION, Cut, Inputs, PairsTask, TextsTask, packed
from millrace.text.tokenizer import Tokenizer

MOST_WAITING = 4 << 20
"""Tokens of all requests that may wait: what is held for them is bounded by it."""
_QUERY = ("query", "search_query", "retrieval.query", "s2p_query", "web_search_query")
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage", "corpus", "text")
_ROLES = {
    **dict.fromkeys(("query", "search_query", "retrieval.query"), _QUERY),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), _DOCUMENT),
}
"""What a text is for, in every protocol's words, and the prompts that models have for it."""
INPUT_TYPES = (*_ROLES, "classification", "clustering")


class EncodingRun:
    """Texts under way. Whoever holds it must close it, however it ends."""

    def __init__(self, active: EncodingInFlight) -> None:
        self._active = active
        self._report: Callable[[int], None] | None = None

    @property
    def tokens(self) -> int:
        return self._active.prompt_tokens

    def on_end(self, report: Callable[[int], None]) -> None:
        """`report` receives once how many tokens were run, however it ends."""
        self._report = report

    def close(self) -> None:
        self._active.close()
        report, self._report = self._report, None
        if report is not None:
            report(self._active.prefilled)

    async def found(self) -> list[Encoded]:
        return await self._active.found()


class Encodings:
    def __init__(
        self,
        name: str,
        facts: Encoder,
        tokenizer: Tokenizer,
        client: EngineClient,
        desk: TextDesk,
        quota: UsageQuota | None = None,
    ) -> None:
        self._name = name
        self.quota = quota
        """What the model is held to for all its callers together; None sets no limit."""
        self.facts = facts
        self._tokenizer = tokenizer
        self._client = client
        self._desk = desk
        self._verdict: list[int] = _verdict(tokenizer) if facts.kind == "judge" else []

    @property
    def length(self) -> int:
        return self.facts.length

    @property
    def width(self) -> int:
        """Numbers of a vector, as far as the engine has said."""
        return self._client.ready.dimensions if self._client.ready else 0

    def need_vectors(self) -> None:
        if self.facts.kind != "embed":
            raise BadRequest(
                f"The model '{self._name}' makes no embeddings: it "
                f"{'classifies' if self.facts.kind == 'classify' else 'judges relevance'}.",
                param="model",
            )

    def need_labels(self) -> None:
        if self.facts.kind != "classify":
            raise BadRequest(f"The model '{self._name}' is no classifier.", param="model")

    def need_scores(self) -> None:
        labels = len(self.facts.labels)
        if self.facts.kind == "classify" and labels != 1:
            raise BadRequest(
                f"The model '{self._name}' tells {labels} labels apart, and no relevance; ask "
                f"/classify.",
                param="model",
            )

    def prompt(self, name: str | None = None, input_type: str | None = None) -> str:
        """What is put before a text."""
        prompts = self.facts.prompts
        if name is not None:
            if name not in prompts:
                known = ", ".join(sorted(prompts)) or "none"
                raise BadRequest(
                    f"The model '{self._name}' has no prompt '{name}'; it has {known}.",
                    param="prompt_name",
                )
            return prompts[name]
        if input_type is not None:
            for known in _ROLES.get(input_type, (input_type,)):
                if known in prompts:
                    return prompts[known]
            return ""
        return prompts.get(self.facts.default_prompt or "", "")

    def limit(self, wanted: int | None) -> tuple[int, Cut]:
        """Tokens of an input and what becomes of more, as vLLM's `truncate_prompt_tokens` says."""
        if wanted is None:
            return self.length, "none"
        if wanted == 0 or wanted > self.length:
            raise BadRequest(
                f"Inputs cannot be cut to {wanted} tokens: the model takes 1 to {self.length}.",
                param="truncate_prompt_tokens",
            )
        return (self.length if wanted < 0 else wanted), "right"

    def texts(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        cut: Cut = "none",
        limit: int | None = None,
        special: bool = True,
        own_limit: int | None = None,
        param: str = "input",
    ) -> Inputs:
        """Tokenises: not for the event loop."""
        facts = self.facts
        return self._desk.run(
            TextsTask(
                texts=list(texts),
                limit=limit or self.length,
                cut=cut,
                prompt=prompt,
                special=special,
                lowercase=facts.lowercase,
                skip_prompt=not facts.include_prompt,
                own_limit=own_limit,
                param=param,
            )
        )

    def tokens(
        self, lists: Sequence[list[int]], *, cut: Cut = "none", limit: int | None = None
    ) -> Inputs:
        """Inputs that are tokens already: taken as they are."""
        found: list[bytes] = []
        most = limit or self.length
        ready = self._client.ready
        for number, ids in enumerate(lists):
            name = f"input[{number}]" if len(lists) > 1 else "input"
            if not ids:
                raise BadRequest(f"{name} is an empty list of tokens.", param="input")
            check_tokens("input", ids, ready.vocab_size if ready else 1 << 31)
            if len(ids) > most and cut == "none":
                raise InputTooLong(name, len(ids), most)
            found.append(packed(ids[-most:] if cut == "left" else ids[:most]))
        return Inputs(tokens=found)

    def pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        cut: Cut = "right",
        limit: int | None = None,
        document_limit: int | None = None,
        instruction: str | None = None,
        param: str = "documents",
    ) -> Inputs:
        """Queries and documents, one of each at a time. Tokenises: not for the event loop."""
        if self.facts.kind == "embed":
            return self._apart(queries, documents, cut, limit, document_limit, param)
        return self._desk.run(
            PairsTask(
                queries=list(queries),
                documents=list(documents),
                limit=limit or self.length,
                cut=cut,
                document_limit=document_limit,
                judge=self.facts.kind == "judge",
                instruction=instruction or DEFAULT_INSTRUCTION,
                param=param,
            )
        )

    def _apart(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        cut: Cut,
        limit: int | None,
        document_limit: int | None,
        param: str,
    ) -> Inputs:
        """Each query that there is once, and then the documents."""
        asked = list(dict.fromkeys(queries))
        first = self.texts(
            asked, prompt=self.prompt(input_type="query"), cut=cut, limit=limit, param="query"
        )
        rest = self.texts(
            documents,
            prompt=self.prompt(input_type="document"),
            cut=cut,
            limit=limit,
            own_limit=document_limit,
            param=param,
        )
        skips = (
            []
            if not (first.skips or rest.skips)
            else [
                *(first.skips or [0] * len(first.tokens)),
                *(rest.skips or [0] * len(rest.tokens)),
            ]
        )
        return Inputs(tokens=first.tokens + rest.tokens, skips=skips)

    def check_dimensions(self, wanted: int | None) -> int | None:
        """The size to which vectors are cut; None if they are as the model makes them."""
        ready = self._client.ready
        if wanted is None or ready is None or wanted == ready.dimensions:
            return None
        sizes = self.facts.matryoshka
        if sizes is None:
            raise BadRequest(
                f"The vectors of '{self._name}' have {ready.dimensions} dimensions and are not made "
                f"to be cut.",
                param="dimensions",
            )
        if wanted > ready.dimensions or (sizes and wanted not in sizes):
            allowed = ", ".join(map(str, sizes)) if sizes else f"1 to {ready.dimensions}"
            raise BadRequest(
                f"The vectors of '{self._name}' can have these dimensions: {allowed}.",
                param="dimensions",
            )
        return wanted

    def run(
        self,
        id: str,
        inputs: Inputs,
        kind: EncodingKind = "vectors",
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
        endpoint: str = "",
        caller: str = "",
    ) -> EncodingRun:
        """Hand texts to the engine; raises at once what is wrong with them."""
        self._client.admit(1)
        whose = current_caller.get()
        tokens: Counter[str] = Counter()
        for active in self._client.in_flight.values():
            tokens[active.queue_caller] += active.prompt_tokens
        waiting = tokens.total()
        share = MOST_WAITING // max(1, len(tokens.keys() | {whose}))
        if (
            waiting
            and waiting + inputs.count > MOST_WAITING
            and tokens[whose] + inputs.count > share
        ):
            raise Overloaded(
                f"The server is busy: {waiting} tokens are waiting to be encoded, and with these "
                f"{inputs.count} they would be more than {MOST_WAITING}. Try again in a moment."
            )
        request = Encode(
            id=0,
            inputs=inputs.tokens,
            places=list(range(len(inputs.tokens))),
            kind=kind,
            segments=inputs.segments,
            skips=inputs.skips,
            wanted=self._verdict if kind == "logits" else [],
            normalize=self.facts.normalize if normalize is None else normalize,
            dimensions=dimensions,
            priority=priority,
            caller=whose,
        )
        encoding = self._client.encode(
            id, request, endpoint=endpoint, caller=caller, timeout=timeout
        )
        return EncodingRun(encoding)

    @property
    def scoring(self) -> EncodingKind:
        """What is asked of the engine where texts are scored."""
        return "vectors" if self.facts.kind == "embed" else "logits"

    def scores(
        self, found: Sequence[Encoded], queries: Sequence[str], *, raw: bool = False
    ) -> list[float]:
        """How relevant each document is; `raw` leaves the logits as they are."""
        if self.facts.kind == "embed":
            return _cosines(found, queries)
        logits = [numbers(e) for e in found]
        if self.facts.kind == "judge":
            return [yes - no if raw else _sigmoid(yes - no) for yes, no in logits]
        return [values[0] if raw else _sigmoid(values[0]) for values in logits]

    def probabilities(self, encoded: Encoded) -> list[float]:
        """What a classifier says of a text, a number per label."""
        logits = numbers(encoded)
        match self.facts.activation:
            case "identity":
                return logits
            case "sigmoid":
                return [_sigmoid(x) for x in logits]
            case "softmax":
                most = max(logits)
                parts = [math.exp(x - most) for x in logits]
                return [p / sum(parts) for p in parts]


def numbers(encoded: Encoded) -> list[float]:
    found = array("f")
    found.frombytes(encoded.data)
    return found.tolist()


def rows(encoded: Encoded) -> list[list[float]]:
    """A text's vectors, one per token."""
    flat = numbers(encoded)
    width = len(flat) // max(1, encoded.rows)
    return [flat[i * width : (i + 1) * width] for i in range(encoded.rows)]


def _cosines(found: Sequence[Encoded], queries: Sequence[str]) -> list[float]:
    import numpy as np

    asked = {text: number for number, text in enumerate(dict.fromkeys(queries))}
    vectors: Any = np.stack([np.frombuffer(e.data, "<f4") for e in found])
    firsts = vectors[[asked[q] for q in queries]]
    scores: list[float] = (firsts * vectors[len(asked) :]).sum(axis=1).tolist()
    return scores


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x)) if x > -700 else 0.0


def _verdict(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a yes and a no."""
    found = [tokenizer.vocabulary.id_of(word) for word in ("yes", "no")]
    marks = [tokenizer.vocabulary.id_of(mark) for mark in ("<|im_start|>", "<|im_end|>")]
    if None in (*found, *marks):
        raise ModelError(
            f"{tokenizer.folder} cannot judge relevance as Qwen3-Reranker does: its vocabulary lacks "
            f"yes, no or the marks of a turn."
        )
    return [token for token in found if token is not None]
