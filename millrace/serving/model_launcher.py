"""Starting a model: its engine's process, what that gets as configuration, and its text side here."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from millrace.config import FEWEST_RUNNING, EngineConfig
from millrace.errors import BrokenFiles, ModelError, SetupError
from millrace.models.description import inspect
from millrace.models.encoders import Encoder, encoder_in
from millrace.models.footprint import CACHE_SHARE, DRAFT_PART, footprint
from millrace.models.vision.families import picture_room, sees
from millrace.models.window import read_config, window_of
from millrace.private_folder import PrivateFolder
from millrace.protocol.prefixes import CacheChange
from millrace.serving.adapters import AdapterLibrary, AdapterList
from millrace.serving.admission import Admission
from millrace.serving.catalogue import ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.connection import Connection, ProcessConnection
from millrace.serving.keeper import RESTARTS
from millrace.serving.media import MediaDesk
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.pictures import ModelPictures, words_in
from millrace.serving.quotas import Quotas
from millrace.serving.ranges import MOST
from millrace.serving.ranks.connection import GroupConnection
from millrace.serving.ranks.group import RankGroup
from millrace.serving.request import in_range
from millrace.serving.residency import Need
from millrace.text.reading import described
from millrace.text.tasks import TextSide, TextSideConfig
from millrace.text.template_process import TemplateProcess

log = logging.getLogger("millrace.serving")

_LEAST_CACHE = 64 << 20
ENCODER_WORK = 256 << 20
"""What the batches of an encoder may take: it has no state."""
_LEAST_ADAPTERS = 64 << 20


class Workplace:
    """A private folder for the sockets of this server's engines, removed at the end."""

    def __init__(self) -> None:
        self._folder = PrivateFolder()
        self._numbers = itertools.count()

    def launcher(
        self, config: Callable[[], EngineConfig], group: RankGroup | None = None
    ) -> Callable[[], Awaitable[Connection]]:
        """With a `group`, of all its ranks."""

        async def launch() -> Connection:
            if group is not None:
                return GroupConnection(group, config(), self._file)
            return await ProcessConnection.launch(config(), self._file())

        return launch

    def _file(self) -> Path:
        # A fresh socket for every engine: nothing of a dead one can be heard by the next.
        return self._folder.path / f"engine-{next(self._numbers)}.sock"

    def remove(self) -> None:
        self._folder.remove()


class ModelLauncher:
    """Makes the parts of this server's models."""

    def __init__(
        self,
        workplace: Workplace,
        metrics: Metrics,
        *,
        idle: float,
        max_queue: int,
        quotas: Quotas | None = None,
        adapters: AdapterLibrary | None = None,
        media: MediaDesk | None = None,
        on_cache: Callable[[str, Sequence[CacheChange]], None] = lambda _name, _changes: None,
    ) -> None:
        """`media` finds the pictures of models that take any; without it, none does. `on_cache`
        receives what becomes of models' prefix caches, where engines tell it. `quotas` are the models'."""
        self._media = media
        self._adapters = adapters or AdapterLibrary()
        self._on_cache = on_cache
        self._workplace = workplace
        self._metrics = metrics
        self._idle = idle
        # One thread for all: the C library keeps what a thread has freed for that thread.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="text-side")
        self._max_queue = max_queue
        self._quotas = quotas

    def check(self, spec: ModelSpec) -> None:
        if (error := inspect(spec.folder).error) is not None:
            raise BrokenFiles(error)

    def need(self, spec: ModelSpec) -> Need:
        config, encodes = spec.engine, encoder_in(spec.engine) is not None
        found = footprint(spec.folder, config.weights, encodes=encodes)
        if config.group is not None:
            _refuse_split(config, encodes)
            found = found.part(len(config.group.hosts), _here(config))
        if encodes:
            _refuse_beside(config)
            work = config.kv_memory or ENCODER_WORK
            return Need(found.fixed, work, work)
        cache = _least_cache(config, found.least_kv)
        fixed = found.fixed + (config.adapter_memory or 0)
        state = (config.kv_memory or found.least_kv) + cache
        if config.specprefill is not None:
            beside = footprint(Path(config.specprefill.draft), config.weights)
            fixed += beside.fixed - beside.process + (config.draft_memory or 0)
            if config.draft_memory is None:
                state += -(-state // (DRAFT_PART - 1))
        return Need(fixed, state)

    def engine_config(self, spec: ModelSpec, state: int | None) -> EngineConfig:
        """What its engine gets, with the state that it may hold divided between requests and prefixes."""
        config = spec.engine
        if state is None:
            return config
        if encoder_in(config) is not None:
            return msgspec.structs.replace(config, kv_memory=max(1, state), cache=False)
        room = config.adapter_memory
        if room is None and config.adapters:
            room = max(min(_LEAST_ADAPTERS, state // 4), state // 10)
            state -= room
        pictures = config.picture_memory
        if pictures is None and sees(read_config(spec.folder)):
            pictures = picture_room(state)
            state -= pictures
        draft = config.draft_memory
        if draft is None and config.specprefill is not None:
            draft = state // DRAFT_PART
            state -= draft
        cache = config.cache_memory or 0
        if not config.cache:
            cache = 0
        elif not cache:
            spare = state - (config.kv_memory or 0)
            least = min(_LEAST_CACHE, state // 2)
            cache = max(1, min(spare, max(least, int(CACHE_SHARE * state))))
        kv = config.kv_memory or max(1, state - cache)
        ranks = _here(config)  # each gets its part of what the machine has
        kv, cache = kv // ranks, cache // ranks
        if pictures is not None and config.picture_memory is None:
            pictures = max(1, pictures // ranks)
        return msgspec.structs.replace(
            config,
            kv_memory=kv,
            cache_memory=cache or None,
            adapter_memory=room,
            picture_memory=pictures,
            draft_memory=draft,
        )

    def client(self, spec: ModelSpec, config: Callable[[], EngineConfig]) -> EngineClient:
        queue = self._max_queue if spec.max_queue is None else spec.max_queue
        admission = Admission(spec.engine.max_running or FEWEST_RUNNING, queue)
        group = RankGroup(spec.engine) if spec.engine.group is not None else None
        launch = self._workplace.launcher(config, group)
        client = EngineClient(
            launch,
            admission,
            self._metrics.of(spec.name),
            idle=self._idle,
            adapters=self._adapters.of(spec.name, spec.engine.adapters),
            diagnose=lambda: inspect(spec.folder).error,
            # Other machines of a group may be away for as long as they like.
            restarts=RESTARTS if group is None else None,
        )
        if group is not None:
            client.group, group.on_absent = group, client.fail_all
        client.queries.on_change = lambda changes: self._on_cache(spec.name, changes)
        return client

    async def text(self, spec: ModelSpec, client: EngineClient) -> ServedModel:
        loop = asyncio.get_running_loop()
        side, encoder = await loop.run_in_executor(self._reader, _text_side, spec.engine)
        arguments = spec.template_arguments
        pictures = _pictures(spec.engine, side, self._media)
        sparse = spec.engine.specprefill
        quota = self._quotas.of(spec.name) if self._quotas is not None else None
        own = spec.defaults, arguments, encoder, pictures, sparse, quota
        return ServedModel(spec.name, side, client, *own)

    async def tidy(self) -> None:
        """Have what models held in this process go back to the system."""
        await asyncio.get_running_loop().run_in_executor(self._reader, _trim)


def _trim() -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _refuse_beside(config: EngineConfig) -> None:
    """What only models that make text can have."""
    if config.adapters:
        name = config.adapters[0].name
        raise SetupError(f"--lora {name}: adapters are for models that make text.")
    if config.specprefill is not None:
        raise SetupError("--specprefill-draft is for models that make text.")


def _here(config: EngineConfig) -> int:
    """How many ranks are on the first one's machine."""
    if config.group is None:
        return 1
    return sum(h.address == config.group.hosts[0].address for h in config.group.hosts)


def _refuse_split(config: EngineConfig, encodes: bool) -> None:
    """What a model that is split over ranks cannot have."""
    if encodes:
        raise SetupError("A model that makes numbers cannot be split over ranks.")
    if config.adapters:
        name = config.adapters[0].name
        raise SetupError(f"--lora {name}: a model that is split over ranks takes no adapters.")


def _least_cache(config: EngineConfig, kv: int) -> int:
    return (config.cache_memory or min(_LEAST_CACHE, kv)) if config.cache else 0


async def open_model(
    config: EngineConfig,
    launch: Callable[[], Awaitable[Connection]],
    metrics: Metrics,
    *,
    idle: float,
    max_queue: int,
    defaults: Mapping[str, float] | None = None,
    media: MediaDesk | None = None,
) -> ServedModel:
    """One model for itself. The engine is started first, since it takes longest."""
    check_defaults(defaults or {})
    if encoder_in(config) is not None:
        _refuse_beside(config)
    admission = Admission(config.max_running or FEWEST_RUNNING, max_queue)
    adapters = AdapterList(config.adapters)
    client = EngineClient(launch, admission, metrics.of(config.name), idle=idle, adapters=adapters)
    await client.start()
    side, encoder = await asyncio.to_thread(_text_side, config)
    pictures = _pictures(config, side, media)
    return ServedModel(
        config.name,
        side,
        client,
        defaults,
        encoder=encoder,
        pictures=pictures,
        specprefill=config.specprefill,
    )


def _pictures(config: EngineConfig, side: TextSide, media: MediaDesk | None) -> ModelPictures:
    found = ModelPictures(
        config.name,
        Path(config.model),
        side.config.pictures,
        media,
        trust_remote_code=config.trust_remote_code,
    )
    found.open()
    return found


def _text_side(config: EngineConfig) -> tuple[TextSide, Encoder | None]:
    encoder = encoder_in(config)
    folder = Path(config.model)
    settings = read_config(folder)
    templates = TemplateProcess(config.name)
    side = TextSide(
        TextSideConfig(
            folder=config.model,
            window=encoder.length if encoder else window_of(settings, config.context),
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            strip_volatile=config.strip_volatile,
            pictures=None if encoder else words_in(folder),
        ),
        templates,
    )
    if encoder is not None:
        log.info("%s: %s", config.name, encoder.described)
        return side, encoder
    if side.tokenizer.template_source is not None:
        templates.open()
    # What grammars need is read now, since it holds up everything else while it is.
    with contextlib.suppress(ModelError):
        side.read_ahead()
    log.info("%s: %s", config.name, described(side.dialect.format))
    return side, None


def check_defaults(defaults: Mapping[str, float], where: str = "") -> None:
    """The server's own defaults are held to what requests are held to."""
    for name, value in defaults.items():
        fits = in_range(name, value)
        if name == "loop_guard":
            fits = isinstance(value, bool)
        elif name == "max_tokens":
            fits = isinstance(value, int) and 1 <= value <= MOST
        if not fits:
            option = f"{where} {name}" if where else f"--{name.replace('_', '-')}"
            raise SetupError(f"{option} {value} is out of range (docs/api.md has the ranges).")
