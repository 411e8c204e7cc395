"""A turn of the engine as data: what the decider wants done, and what came of it.

A turn is a list of operations, carried out in order. Together with the requests in it, it says all
that an executor needs: a recorded list of turns replays to the same tokens, and ranks beside the
first need nothing else. Nothing here knows arrays or clocks.
"""

from __future__ import annotations

import msgspec

from millrace.cache.observations import AnyObservation
from millrace.cache.operations import AnyOperation, Operation
from millrace.engine.specprefill.operations import ScoringOperation, ScoringResult
from millrace.protocol import (
    AdapterAnswer,
    Failed,
    FinishReason,
    PicturesWanted,
    Prefilled,
    Submit,
    ToEngine,
)
from millrace.protocol.specprefill import Scoring, Selected


class Admit(Operation, frozen=True):
    """A request and the numbers of its rows, one for each of its choices."""

    request: Submit
    rows: list[int]


class Begin(Operation, frozen=True):
    """A prompt is going to run, for these rows; they have the same tokens behind them."""

    prefill: int
    rows: list[int]
    scored: bool = False
    """The logprobs of its own tokens are asked for."""
    kept: tuple[tuple[int, int], ...] = ()
    """What stays of its request's prompt, where some is left out."""


class PromptRun(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of a prompt."""

    prefill: int
    count: int


class Pass(Operation, frozen=True):
    """Run the model: on the last token of every row and its draft tokens, and on prompts beside them."""

    rows: bool
    """Whether the rows of the batch take part."""
    drafts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """Draft tokens by row."""
    prompts: list[PromptRun] = msgspec.field(default_factory=list)
    wait: bool = False
    """No row runs: the host waits for the device, so that it hears in between."""


class Release(Operation, frozen=True):
    """A prompt is given up, and its state with it."""

    prefill: int


class Join(Operation, frozen=True):
    """Rows of a prompt that has run to its last token enter the batch."""

    prefill: int
    rows: list[int]


class Drop(Operation, frozen=True):
    """Rows leave the batch. A draw that has not been read is still theirs."""

    rows: list[int]


class Read(Operation, frozen=True):
    """Take the tokens that were drawn and not read yet."""


class Sample(Operation, frozen=True):
    """Launch the draws from the logits of the last forward pass."""


class Finish(Operation, frozen=True):
    """A row ends for a reason that is not in its tokens."""

    row: int
    reason: FinishReason


class Forget(Operation, frozen=True):
    """These rows are over: what is still drawn for them is thrown away."""

    rows: list[int]


class PlaceAdapter(Operation, frozen=True):
    """An adapter comes into a slot; the rows of requests that name the slot run with it from here on."""

    slot: int
    name: str
    path: str
    digest: str = ""


class RemoveAdapter(Operation, frozen=True):
    """A slot becomes free: no row that runs has it."""

    slot: int


class EncodePicture(Operation, frozen=True):
    """Run the vision tower on a picture whose pixels have come."""

    digest: str
    tokens: list[int]
    """Its placeholders, and what stands between them."""
    requests: list[int]
    """Those that need it."""
    parts: int = 0
    """How many stages of the tower to run now; 0 is all that are left."""


class DropPictures(Operation, frozen=True):
    """What there is of these pictures, pixels or features, leaves the memory."""

    digests: list[str]


EngineOperation = (
    Admit
    | Begin
    | Pass
    | Release
    | Join
    | Drop
    | Read
    | Sample
    | Finish
    | Forget
    | PlaceAdapter
    | RemoveAdapter
    | EncodePicture
    | DropPictures
    | ScoringOperation
)
TurnOperation = EngineOperation | AnyOperation


class Turn(msgspec.Struct):
    number: int
    operations: list[TurnOperation] = []
    progress: list[Prefilled] = []
    """How far prompts are once the turn has been carried out."""
    refused: list[Failed] = []
    wanted: list[PicturesWanted] = []
    """Pictures that prompts cannot go on without."""
    scoring: list[Scoring] = []
    """How far the draft is."""
    selected: list[Selected] = []
    """What stays of prompts that it is done with."""
    expected: float | None = None
    """Seconds that it should take; None if nothing was measured yet."""


class RowResult(msgspec.Struct):
    """What a row has generated."""

    row: int
    tokens: list[int]
    advanced: int = 1
    """Tokens that its state has more than before the step."""
    drafted: int = 0
    """Draft tokens that were tried."""
    finish: FinishReason | None = None
    problem: str | None = None
    """Why it cannot go on; the others can."""


class PictureResult(msgspec.Struct):
    """What came of a run of the vision tower."""

    digest: str
    requests: list[int]
    done: bool = False
    nbytes: int = 0
    """Of its features."""
    parts: int = 0
    """Stages that were run; 0 for all, or for what comes before them."""
    seconds: float = 0.0
    problem: str | None = None


class Outcome(msgspec.Struct):
    """What came of a turn, for the next decision."""

    rows: list[RowResult] = []
    failed: list[Failed] = []
    """Requests that could not be admitted."""
    adapters: list[AdapterAnswer] = []
    pictures: list[PictureResult] = []
    scorings: list[ScoringResult] = []
    step_fault: str | None = None
    """The rows could not be run: none is left in the batch, and each has only what was read."""
    prompt_faults: dict[int, str] = {}
    """Prompts that could not be run, by prefill; their state is gone."""
    gap: float | None = None
    """Seconds between the last two reads."""
    pass_seconds: float | None = None
    """What a pass without rows took, where the host waited for it."""


class Seen(msgspec.Struct):
    """All that a decision depends on beside what was decided before."""

    now: float
    messages: list[ToEngine] = []
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    disk: list[AnyObservation] = []


encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Turn)
