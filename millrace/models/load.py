"""Loading: a model folder becomes a model on the device, with the facts the engine needs of it."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from millrace.config import EngineConfig, Weights
from millrace.errors import MillraceError, ModelError
from millrace.models import device, placement
from millrace.models.vision.families import vision_in
from millrace.models.window import window_of
from millrace.native import LoadingNote, unheard

log = logging.getLogger("millrace.models")

WARM_UP_TOKENS = 16
"""State is measured after these: some layers' grows over the first few tokens and then no more."""


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    context: int
    vocab_size: int
    """The width of the logits, which may exceed the tokenizer's vocabulary."""
    dtype: str
    device: str
    native: bool
    """Whether kernels of our own run it."""
    sees: bool
    """Whether it takes pictures."""
    weight_bytes: int
    memory: int
    """Bytes of the device that models and their state may take."""
    caches: list[Any]
    """The layers' state after the warm-up: what a row is made of."""
    seconds: float
    group: Any = None
    """The ranks that it is split over."""


def load(
    config: EngineConfig,
    note: LoadingNote = unheard,
    meet: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Load, place and warm up; every failure is a ModelError that names the folder.

    `meet` is called where the model is split and it is known how: the group of ranks is joined next.
    """
    start = time.monotonic()
    path = Path(config.model)
    device.configure()
    kind = device.kind()
    if kind == "cpu":
        # MLX would run the machine's C++ compiler for a few fused operations, which gain nothing
        # here, and keep the results in the temporary folder.
        mx.disable_compile()
    try:
        model, settings = _loaded(config, config.weights, kind, note, meet)
        caches = make_prompt_cache(model)
        try:
            vocab, dtype = _warm_up(model, caches)
        except Exception as error:
            if _products(model) is None:
                raise
            # A model that looks into its layers finds ours different.
            log.warning("weights are widened to float32: our own layers do not suit it: %s", error)
            model, settings = _loaded(config, "f32", kind, note, lambda: None)
            caches = make_prompt_cache(model)
            vocab, dtype = _warm_up(model, caches)
    except MemoryError as error:
        raise ModelError(f"{path} does not fit into this machine's memory.") from error
    except ConnectionError:
        raise  # another rank is gone, which says nothing of the model
    except MillraceError:
        raise
    except Exception as error:  # model classes raise whatever comes of a file they did not expect
        raise ModelError(f"The model in {path} cannot be loaded: {error}") from error
    return LoadedModel(
        model=model,
        context=window_of(settings, config.context),
        vocab_size=_vocabulary(settings, vocab) if config.group is not None else vocab,
        dtype=dtype,
        device=kind,
        native=getattr(model, "in_place", False) or _products(model) is not None,
        sees=getattr(model, "sees", False),
        weight_bytes=_weight_bytes(model),
        memory=device.describe().budget,
        caches=caches,
        seconds=time.monotonic() - start,
        group=_group(config) if config.group is not None else None,
    )


def _loaded(
    config: EngineConfig,
    weights: Weights,
    kind: placement.Device,
    note: LoadingNote,
    meet: Callable[[], None],
) -> tuple[Any, Any]:
    """The model on its device, and its settings."""
    path = Path(config.model)
    family = vision_in(path)
    if family is not None:
        from millrace.models.vision.load import load_vision

        model, settings = load_vision(path, family)
    else:
        model, settings = _own_classes(path, config.trust_remote_code)
    whole = config.group is None
    if not whole:
        _split(model, settings, config, meet)
    model = placement.place(model, weights, kind, path, note, own=family is None, whole=whole)
    if kind != "cpu":
        # There its layers are widened side by side, which waiting for each would undo.
        _read_layers(getattr(model, "layers", None) or [], note)
    mx.eval(model.parameters())
    return model, settings


def _own_classes(path: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model of mlx-lm's classes, and its settings."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            model, settings = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
            return model, settings
    except SystemExit as error:
        # A file of a model that misses a package prints which one, and ends the process.
        said = error.code if isinstance(error.code, str) else printed.getvalue().strip()
        reason = said or f"it ended with status {error.code}"
        raise ModelError(f"The code of the model in {path} gave up: {reason}") from error


def _split(
    model: Any, settings: dict[str, Any], config: EngineConfig, meet: Callable[[], None]
) -> None:
    from millrace.models import splitting

    assert config.group is not None and config.seat is not None
    size = len(config.group.hosts)
    problem: splitting.Problem = partial(splitting.problem_of, model, settings)
    split = splitting.split
    if getattr(model, "sees", False):
        from millrace.models.vision import splitting as of_vision

        problem, split = partial(of_vision.problem, model), of_vision.split
    how = splitting.choose(problem, config.group.parallel, size)
    meet()
    group = _group(config)
    try:
        split(model, how, group)
    except (ValueError, AttributeError, IndexError) as error:
        raise ModelError(f"The model cannot be split over {size} ranks: {error}") from error
    log.info("rank %d of %d, split by %s", group.rank(), size, how)


def _group(config: EngineConfig) -> Any:
    """The group of ranks, which is joined the first time."""
    assert config.group is not None
    return mx.distributed.init(strict=True, backend=config.group.backend)


def _read_layers(layers: Sequence[Any], note: LoadingNote) -> None:
    """Layer by layer, the next on its way while one is waited for."""
    for number, layer in enumerate(layers):
        if number + 1 < len(layers):
            mx.async_eval(layers[number + 1].parameters())
        mx.eval(layer.parameters())
        note((number + 1) / len(layers))


def _warm_up(model: Any, caches: list[Any]) -> tuple[int, str]:
    """Run a few tokens: the model works, its kernels are compiled, its logits' width is known."""
    logits = model(mx.array([[0] * WARM_UP_TOKENS], mx.int32), cache=caches)
    mx.eval(logits)
    return int(logits.shape[-1]), str(logits.dtype).removeprefix("mlx.core.")


def _vocabulary(settings: dict[str, Any], width: int) -> int:
    """The width of the logits, on ranks that compute none as well."""
    text = (
        settings | nested if isinstance(nested := settings.get("text_config"), dict) else settings
    )
    found = text.get("vocab_size")
    return max(width, found) if isinstance(found, int) else width


def _weight_bytes(model: Any) -> int:
    own: int | None = getattr(model, "nbytes", None)
    if own is not None:
        return own
    ours = sum(m.nbytes for m in model.modules() if hasattr(m, "nbytes")) if _products(model) else 0
    total: int = tree_reduce(_add_bytes, model.parameters(), ours)
    return total


def _products(model: Any) -> Any:
    return getattr(model, "own_products", None)


def _add_bytes(total: int, value: Any) -> int:
    return total + int(value.nbytes) if isinstance(value, mx.array) else total
