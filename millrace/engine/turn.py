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

    job: int
    rows: list[int]
    width: int
    """Places for its tokens."""
    scored: bool = False
    """The logprobs of its own tokens are asked for."""
    kept: tuple[tuple[int, int], ...] = ()
    """What stays of its request's prompt, where some is left out."""


class Chunk(Operation, frozen=True):
    """Run the next tokens of these prompts side by side, up to `count` of each."""

    jobs: list[int]
    count: int
    length: int
    """What the run is padded to at its end: at least `count`."""
    wait: bool = False
    """Nobody waits for tokens: the host waits for the device, so that it hears in between."""


class Release(Operation, frozen=True):
    """A prompt is given up, and its state with it."""

    job: int


class Join(Operation, frozen=True):
    """Rows of a prompt that has run to its last token enter the batch."""

    job: int
    rows: list[int]


class Drop(Operation, frozen=True):
    """Rows leave the batch. A draw that has not been read is still theirs."""

    rows: list[int]


class Reserve(Operation, frozen=True):
    """The memory of the batch becomes this large: rows, and tokens of each; more than the next step needs
    may come with the steps after it."""

    slots: int
    width: int


class Forward(Operation, frozen=True):
    """Launch the model on every row's last token, and on what is guessed to follow it."""

    guesses: dict[int, list[int]]
    """By row; of those without, nothing is guessed."""


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
    | Chunk
    | Release
    | Join
    | Drop
    | Reserve
    | Forward
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
    """Seconds that it should take; None if nothing like it was ever measured."""


class RowResult(msgspec.Struct):
    """What a row has generated."""

    row: int
    tokens: list[int]
    advanced: int = 1
    """Tokens of its state that are good, beside those before the step."""
    guessed: int = 0
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
    """The batch could not be run: nothing of it is left, and its rows have only what was read."""
    chunk_fault: str | None = None
    """The chunk could not be run; the state of its prompts is gone."""
    gap: float | None = None
    """Seconds between the last two reads."""
    chunk_seconds: float | None = None
    """What a chunk took by itself, where the host waited for it."""
    settled: bool = True
    """The batch's memory is as large as it was told to be."""


class Seen(msgspec.Struct):
    """All that a decision depends on beside what was decided before."""

    now: float
    messages: list[ToEngine] = []
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    disk: list[AnyObservation] = []


encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Turn)
