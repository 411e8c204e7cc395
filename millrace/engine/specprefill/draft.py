"""A draft from its parts: its runner, its own prefix cache, and what the decider is told of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from millrace.cache.index import PrefixIndex
from millrace.cache.state import sizes_of
from millrace.cache.store import SegmentStore
from millrace.config import EngineConfig, SpecPrefillConfig
from millrace.engine.cache_use import CacheUse
from millrace.engine.runner import Runner
from millrace.engine.specprefill.scorer import Scorer
from millrace.engine.specprefill.scorings import DraftFacts, Scorings
from millrace.errors import ModelError
from millrace.models.files import MOST_TOKENIZER, read_bytes, read_json, reads_folder
from millrace.models.load import LoadedModel, load
from millrace.models.rotations import rotate, windows_of

log = logging.getLogger("millrace.engine")

_CACHED = 2
"""The part of a draft's memory that its prefix cache has."""


class DraftModel:
    """What an engine has beside its model."""

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        *,
        target: Any,
        chunk: int,
        room: int,
        cached: int,
        every: int = 1024,
        recurring: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        """`caches` have been run on; `room` and `cached` are bytes for the prompt at hand and for the
        draft's prefix cache, without which it keeps nothing; `vocabulary` is how many tokens it has, where
        that is fewer than the model. Raises ModelError where one of the two models cannot do it."""
        for one in (target, model):
            rotate(one)
        if all(windows_of(model)):
            raise ModelError("SpecPrefill needs a draft with layers that look at the whole prompt.")
        self.runner = Runner(model, caches, recurring=recurring)
        store = cache = None
        if cached:
            layout = self.runner.layout
            sizes = self.runner.sizes(sizes_of(layout, caches, False), pack=False)
            segments = self.runner.segments(pack=False)
            store = SegmentStore(self.runner.make_caches, layout, None, segments)
            index = PrefixIndex(layout.needs, sizes, cached)
            cache = CacheUse(index, every, uncut=self.runner.layout.needs.uncut)
        cost = replace(self.runner.cost, chunk=chunk)
        window = max(windows_of(target))
        facts = DraftFacts(cost, room, chunk, window, vocabulary)
        self.scorings = Scorings(facts, cache)
        self.scorer = Scorer(self.runner, store)


def load_draft(
    config: EngineConfig, settings: SpecPrefillConfig, model: LoadedModel
) -> LoadedModel:
    """The draft beside its model; raises ModelError where the two do not go together."""
    check_vocabulary(Path(config.model), Path(settings.draft))
    own = msgspec.structs.replace(config, model=settings.draft, context=None, specprefill=None)
    draft = load(own)
    if draft.context < model.context:
        log.warning(
            "the draft has a window of %d tokens and the model one of %d: beyond its own it chooses badly",
            draft.context,
            model.context,
        )
    # Before anything is made of them: what runs takes positions, or the engine does not start.
    for one in (model.model, draft.model):
        rotate(one)
    return draft


def draft_of(config: EngineConfig, draft: LoadedModel, model: LoadedModel, room: int) -> DraftModel:
    """A draft with so many bytes for its state."""
    cached = room // _CACHED if config.cache else 0
    return DraftModel(
        draft.model,
        draft.caches,
        target=model.model,
        chunk=config.prefill_chunk or 0,
        room=room - cached,
        cached=cached,
        every=config.checkpoint_every,
        recurring=model.device != "cpu",
        vocabulary=draft.vocab_size if draft.vocab_size < model.vocab_size else None,
    )


def check_vocabulary(model: Path, draft: Path) -> None:
    """Raise ModelError unless every token of the model's is the same to the draft."""
    files = [folder / "tokenizer.json" for folder in (model, draft)]
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"There is no tokenizer.json in {file.parent}: SpecPrefill cannot tell whether model and "
                "draft have the same vocabulary."
            )
    if read_bytes(files[0], MOST_TOKENIZER) == read_bytes(files[1], MOST_TOKENIZER):
        return
    ours, theirs = (_vocabulary(file) for file in files)
    for text, number in ours.items():
        if theirs.get(text) != number:
            raise ModelError(
                f"The draft in {draft} has another vocabulary than the model in {model}: "
                f"token {number} is {text!r} to the model and not to the draft. "
                "Choose a draft of the same family."
            )


@reads_folder
def _vocabulary(file: Path) -> dict[str, int]:
    raw = read_json(file, most=MOST_TOKENIZER)
    found = (raw.get("model") or {}).get("vocab") or {}
    if isinstance(found, list):  # of a unigram model: texts and their scores, in order
        found = {entry[0]: number for number, entry in enumerate(found)}
    added = {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or ()}
    return {**found, **added}
