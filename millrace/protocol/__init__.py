"""The messages between the front and an engine: typed structs, tagged unions, nothing else.

Both sides import this module and it imports nothing of ours. Token ids travel as plain integers;
no MLX object and no text ever crosses.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.protocol.prefixes import CacheChanged, CacheQuery, CacheReport, HitKind
from millrace.protocol.specprefill import Scoring, Selected, SparsePrefill

FinishReason = Literal["stop", "length", "complete"]
"""A stop token (which is no text), the token limit, or a grammar that nothing can follow."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a row's tokens are drawn. The draw of token i depends on (seed, i) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    """Over the whole context, prompt included."""
    presence_penalty: float = 0.0
    """Over all that the choice has made, as the frequency penalty."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []
    """Runs of tokens, none of which is ever completed."""
    min_tokens: int = 0
    """No stop token is drawn before this many tokens are made."""


class Choice(msgspec.Struct, omit_defaults=True):
    """One answer to a prompt: its own seed, and what it had made before a resume."""

    index: int
    seed: int
    generated: list[int] = []


class LazyGrammar(msgspec.Struct, frozen=True):
    """A grammar for what follows any of the triggers, each time one is made."""

    triggers: list[str]
    grammar: str


class Thinking(msgspec.Struct, frozen=True):
    """How long a thought may be, and the tokens that open and close one."""

    budget: int
    inside: bool
    """The answer begins inside a thought."""
    opens: list[int]
    closes: list[int]
    ending: list[int]
    """What is made when the budget is spent; holds `closes`."""


class Span(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Where in a prompt a picture stands: one placeholder token for each of its features."""

    start: int
    length: int
    digest: str
    """Of the decoded picture: what the engine knows it by."""
    grid: tuple[int, ...] = ()
    """Its patches in time, height and width, where the model's processor tells them: what tokens after
    it are placed by, so that a picture whose state is known need not be sent for that."""


class Submit(msgspec.Struct, tag="submit", omit_defaults=True):
    """Run a prompt once and continue it once per choice."""

    id: int
    """The front's own number; the names that clients give their requests never leave it."""
    prompt: list[int]
    choices: list[Choice]
    max_tokens: int
    """Per choice, tokens made before a resume counted in."""
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    """The row ends at any of these; the token is reported, and is not part of the text."""
    priority: int = 0
    """Higher goes first."""
    logprobs: int | None = None
    """How many alternatives to report beside each drawn token's own logprob; None reports none."""
    prompt_logprobs: int | None = None
    grammar: str | None = None
    """What the answer must look like, for llguidance."""
    lazy_grammar: LazyGrammar | None = None
    end_ids: list[int] = []
    """The model's own end tokens: what a grammar may end with."""
    thinking: Thinking | None = None
    cache_salt: str = ""
    """State is shared only between requests of the same salt."""
    adapter: int = 0
    """The slot of the adapter that its rows run with; 0 is none."""
    boundaries: list[int] = []
    """Prompt lengths at which a message ends: where state that cannot be cut is worth keeping."""
    media: list[Span] = []
    """The prompt's pictures in its order. Their pixels follow as Picture, once they are wanted."""
    sparse: SparsePrefill | None = None
    """What may be left out of the prompt, where a draft is there to choose."""
    caller: str = ""
    """An opaque name of the caller, for queues that share work between callers."""
    behind: float = 0.0
    """Seconds later than now that it counts as having come, for the sake of those that come with it."""
    apart: bool = False
    """Its prompt shares no pass with other sequences: an engine died while it ran this request, and a pass
    of several would not show which of them ended it."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """An array as plain bytes, little-endian, the last axis first to change."""

    dtype: str
    """As numpy names it: float32, int64, bool."""
    shape: tuple[int, ...]
    data: memoryview
    """A view of the message that it came in: pictures are not copied to be read."""


class Picture(msgspec.Struct, tag="picture", frozen=True):
    """One picture as the model's own processor made it; the answer to PicturesWanted."""

    digest: str
    tensors: dict[str, Tensor]
    """`pixel_values`, and what goes with it."""


class Abort(msgspec.Struct, tag="abort"):
    id: int


class AbortChoice(msgspec.Struct, tag="abort_choice"):
    """The front has seen enough of one choice (a stop string, say)."""

    id: int
    choice: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


EncodingKind = Literal["vectors", "states", "logits"]
"""A vector per text; one per token; a number per label, or per token that is asked for."""


class Encode(msgspec.Struct, tag="encode", omit_defaults=True):
    """Turn texts into numbers, each by itself; for an engine that holds an encoder."""

    id: int
    inputs: list[bytes]
    """Token ids of each text, as little-endian int32: a request may hold millions."""
    places: list[int]
    """The number of each text in its request, by which it is answered."""
    kind: EncodingKind = "vectors"
    segments: list[int] = []
    """Where each text's second part begins, 0 for none; all 0 if left out."""
    skips: list[int] = []
    """Tokens at each text's start that are not pooled; all 0 if left out."""
    wanted: list[int] = []
    """The tokens whose logits are asked for, where a decoder judges."""
    normalize: bool = True
    dimensions: int | None = None
    """Numbers of a vector that are kept."""
    priority: int = 0
    caller: str = ""
    """As in Submit."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", omit_defaults=True):
    """Read an adapter's folder into a slot that is free; answered with AdapterLoaded or AdapterRefused."""

    slot: int
    name: str
    path: str
    digest: str = ""
    """Of the files that were loaded before; others are refused."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Make a slot free, which no request uses any more."""

    slot: int


ToEngine = (
    Submit
    | Picture
    | Encode
    | Abort
    | AbortChoice
    | Shutdown
    | CacheQuery
    | LoadAdapter
    | UnloadAdapter
)


class Loading(msgspec.Struct, tag="loading"):
    """A line of progress while the engine starts."""

    stage: str
    done: float | None = None
    """How much of the stage, from 0 to 1, where that is known."""


class DeviceMemory(msgspec.Struct, array_like=True):
    """What the engine's allocator holds, in bytes."""

    active: int
    """In use now."""
    peak: int
    """The most there was in use at once."""
    cached: int
    """Freed, and kept to be used again."""


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests from here on."""

    context: int
    device: str
    dtype: str
    vocab_size: int
    load_seconds: float
    weight_bytes: int
    kv_budget: int
    kv_bytes_per_token: int
    device_bytes: int = 0
    """All the memory that the device has."""
    memory: DeviceMemory | None = None
    checkpoints: bool = False
    """Some of the model's state is kept at boundaries only, so that it helps to be told of them."""
    max_running: int = 0
    """Sequences that run at a time, at most; 0 where the engine has no such limit."""
    dimensions: int = 0
    """Numbers of an encoder's vectors."""
    cache_note: str | None = None
    """Why prefixes are kept in memory only, although a prefix cache on disk was asked for."""


class TokenLogprob(msgspec.Struct, array_like=True):
    """A token under the model's own distribution, before any sampling parameter touched it."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The most likely tokens in its place, most likely first."""


class RowTokens(msgspec.Struct, array_like=True):
    """What one row made in one step."""

    id: int
    choice: int
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = []


class PromptLogprobs(msgspec.Struct, array_like=True):
    """The logprobs of a prompt's tokens from its second on, once it has been run."""

    id: int
    items: list[TokenLogprob]


class Encoded(msgspec.Struct, array_like=True):
    """What came of one text: little-endian float32, `rows` vectors of it."""

    id: int
    place: int
    data: bytes
    rows: int = 1


class Prefilled(msgspec.Struct, array_like=True):
    """How far a prompt has come: tokens run so far, and how many of them came from the cache."""

    id: int
    done: int
    total: int
    cached: int
    hit: HitKind = "none"
    written: int = 0
    """How many of the tokens that were run are kept in the cache."""


class PictureCounts(msgspec.Struct, array_like=True):
    """What happened to pictures since the last report."""

    encoded: int = 0
    """Pictures that the vision tower ran on."""
    found: int = 0
    """Pictures of requests whose features were there already."""
    skipped: int = 0
    """Pictures of requests whose features nobody needed: the prefix cache had the state after them."""
    nbytes: int = 0
    """What the features that are kept take."""


StepPart = Prefilled | PromptLogprobs | RowTokens | Encoded | Scoring | Selected


class Step(msgspec.Struct, tag="step", omit_defaults=True):
    """All that one turn of the engine's loop made."""

    rows: list[RowTokens] = []
    prefilled: list[Prefilled] = []
    prompt_logprobs: list[PromptLogprobs] = []
    encoded: list[Encoded] = []
    scoring: list[Scoring] = []
    selected: list[Selected] = []
    pictures: PictureCounts | None = None
    """Told when there is something to tell."""
    running: int = 0
    """Rows in the batch after this turn."""
    kv_bytes: int = 0
    cache_bytes: int = 0
    """Held by the prefix cache in memory."""
    cache_disk_bytes: int = 0
    memory: DeviceMemory | None = None
    """Told now and then."""
    seconds: float = 0.0
    """The turn's length."""

    @property
    def parts(self) -> list[StepPart]:
        """All that is some request's, in the order in which it is to be heard."""
        before: list[StepPart] = [*self.scoring, *self.selected, *self.prefilled]
        return [*before, *self.prompt_logprobs, *self.rows, *self.encoded]


class PicturesWanted(msgspec.Struct, tag="pictures_wanted"):
    """The engine needs the pixels of these pictures to go on with a request."""

    id: int
    digests: list[str]


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    slot: int
    digest: str
    """Of the adapter's files, as they were read."""
    rank: int
    modules: int
    """How many of the model's modules it changes."""
    nbytes: int
    """What all adapters take together."""


class AdapterUnloaded(msgspec.Struct, tag="adapter_unloaded"):
    slot: int
    nbytes: int
    """What the others take together."""


class AdapterRefused(msgspec.Struct, tag="adapter_refused"):
    slot: int
    code: str
    message: str


class Failed(msgspec.Struct, tag="failed"):
    """A request that could not be carried out, or (no id) an engine that cannot start."""

    code: str
    message: str
    id: int | None = None


AdapterAnswer = AdapterLoaded | AdapterRefused | AdapterUnloaded
FromEngine = (
    Loading | Ready | Step | Failed | PicturesWanted | CacheReport | CacheChanged | AdapterAnswer
)

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
