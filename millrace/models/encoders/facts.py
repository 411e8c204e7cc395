"""What a model folder is, if it turns texts into numbers: read from its JSON files alone.

The operator's word comes first, then what sentence-transformers wrote beside the weights, then what
is known of the family. No tensor is read and MLX is not imported: the front uses this as well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from millrace.config import EngineConfig, Task
from millrace.errors import ModelError
from millrace.models.files import MOST_JSON, read_bytes, read_json, reads_folder
from millrace.models.window import read_config

Kind = Literal["embed", "classify", "judge"]
"""A vector per text; a number per label; a decoder that says whether a document answers a query."""
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
Activation = Literal["identity", "sigmoid", "softmax"]

ENCODERS = frozenset(
    {
        "bert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "distilbert",
        "electra",
        "mpnet",
        "nomic_bert",
        "modernbert",
    }
)
"""Families whose forward pass is ours; all else is a decoder of mlx-lm's."""
_OFFSET = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Their positions begin after the padding's number, so that as many are lost."""
_CLS_NAMES = ("bge", "mxbai", "arctic", "gte-modernbert")
_UNSET = 1_000_000
"""A `model_max_length` from here on says that nobody set one."""
_MATRYOSHKA: dict[str, tuple[int, ...]] = {"qwen3": (), "gemma3_text": (128, 256, 512, 768)}
"""Families of embedding models that are trained to be cut, though their files do not say so."""
_DEFAULT_LENGTH = 512


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    family: str
    """`model_type` of the configuration."""
    is_decoder: bool
    length: int
    """Tokens of an input, special ones included."""
    pooling: tuple[Pooling, ...] = ("mean",)
    """Several are put one after the other."""
    normalize: bool = True
    dense: tuple[str, ...] = ()
    """Folders of the layers that follow the pooling."""
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    include_prompt: bool = True
    """Whether a prompt's own tokens are pooled."""
    lowercase: bool = False
    matryoshka: tuple[int, ...] | None = None
    """Sizes to which a vector may be cut: none of them at all if None, any if empty."""
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    """What makes a classifier's logits probabilities."""

    @property
    def described(self) -> str:
        """What the model is taken for, since its files may say little."""
        if self.kind == "judge":
            return "judgements of relevance, yes or no"
        if self.kind == "classify":
            return f"classes, {len(self.labels)} labels, {self.activation}"
        unit = "of length 1" if self.normalize else "of any length"
        return f"embeddings {unit}, {'+'.join(self.pooling)} pooling, {self.length} tokens"


@reads_folder
def encoder_of(
    folder: Path,
    *,
    task: Task = "auto",
    pooling: str | None = None,
    context: int | None = None,
    name: str = "",
) -> Encoder | None:
    """What the folder is as an encoder; None if it is a model that makes text."""
    config = read_config(folder)
    family = str(config.get("model_type", ""))
    modules = _modules(folder)
    kind = _kind(folder, config, task, modules, name)
    if kind is None:
        return None
    sentence = read_json(folder / "sentence_bert_config.json", optional=True)
    known = read_json(folder / "config_sentence_transformers.json", optional=True)
    prompts = {str(k): str(v) for k, v in (known.get("prompts") or {}).items()}
    pool = _pooling_settings(folder, modules)
    labels = _labels(config)
    return Encoder(
        kind=kind,
        family=family,
        is_decoder=family not in ENCODERS,
        length=_length(folder, config, family, sentence, context),
        pooling=_pooling(folder, family, pool, pooling, name),
        normalize=not modules or any(m.kind == "Normalize" for m in modules),
        dense=tuple(m.path for m in modules if m.kind == "Dense"),
        prompts=prompts,
        default_prompt=known.get("default_prompt_name") or None,
        include_prompt=bool(pool.get("include_prompt", True)),
        lowercase=bool(sentence.get("do_lower_case")),
        matryoshka=_matryoshka(config, known, family, modules),
        labels=labels,
        activation=_activation(config, len(labels)),
    )


def encoder_in(config: EngineConfig) -> Encoder | None:
    """The same of a model as it is configured."""
    return encoder_of(
        Path(config.model),
        task=config.task,
        pooling=config.pooling,
        context=config.context,
        name=config.name,
    )


class _Module(msgspec.Struct):
    kind: str
    path: str


_KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


def _modules(folder: Path) -> list[_Module]:
    """sentence-transformers' list of what follows what; empty where there is none."""
    file = folder / "modules.json"
    if not os.path.exists(file):
        return []
    try:
        listed = json.loads(read_bytes(file, MOST_JSON))
        found = [_Module(str(m["type"]).rpartition(".")[2], str(m.get("path", ""))) for m in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be understood: {error}. Fetch the model again.") from error
    for module in found:
        if module.kind not in _KNOWN_MODULES:
            raise ModelError(
                f"{file} asks for a module '{module.kind}', which millrace does not have; it has "
                f"{', '.join(_KNOWN_MODULES)}."
            )
        if not _is_inside(folder, module.path):
            raise ModelError(f"{file} names a folder outside of the model: {module.path}.")
    return found


def _is_inside(folder: Path, path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _kind(
    folder: Path, config: dict[str, Any], task: Task, modules: list[_Module], name: str
) -> Kind | None:
    family, architecture = str(config.get("model_type", "")), _architecture(config)
    if family in ENCODERS:
        if task == "generate":
            raise ModelError(f"{folder} holds an encoder ({family}), which makes no text.")
        return "classify" if architecture.endswith("ForSequenceClassification") else "embed"
    if task == "generate":
        return None
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    if task == "rerank":
        return "judge"
    pools = any(m.kind == "Pooling" for m in modules)
    if task == "embed" or pools or config.get("use_bidirectional_attention"):
        return "embed"
    return "judge" if "rerank" in _name(folder, name) else None


def _architecture(config: dict[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _name(folder: Path, name: str) -> str:
    """What the model is called; a snapshot of the hub's is named in the folder above."""
    own = folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name
    return f"{own} {name}".lower()


def _pooling_settings(folder: Path, modules: list[_Module]) -> dict[str, Any]:
    for module in modules:
        if module.kind == "Pooling":
            return read_json(folder / module.path / "config.json", optional=True)
    return {}


def _pooling(
    folder: Path, family: str, settings: dict[str, Any], wanted: str | None, name: str
) -> tuple[Pooling, ...]:
    if wanted is not None:
        return (pooling_called(wanted),)
    stated = settings.get("pooling_mode")
    if isinstance(stated, str):
        return (pooling_called(stated),)
    if isinstance(stated, list) and stated:
        return tuple(pooling_called(str(s)) for s in stated)
    known = {
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
        "mean": "pooling_mode_mean_tokens",
        "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    if found := tuple(pooling_called(p) for p, key in known.items() if settings.get(key)):
        return found
    if family not in ENCODERS:
        return ("mean",) if family == "gemma3_text" else ("lasttoken",)
    return ("cls",) if any(n in _name(folder, name) for n in _CLS_NAMES) else ("mean",)


_ALSO: dict[str, Pooling] = {
    "last": "lasttoken",
    "last_token": "lasttoken",
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
}


def pooling_called(pooling: str) -> Pooling:
    wanted = _ALSO.get(pooling, pooling)
    for known in get_args(Pooling):
        if known == wanted:
            return known  # type: ignore[no-any-return]
    raise ModelError(f"There is no pooling '{pooling}'; there are {', '.join(get_args(Pooling))}.")


def _length(
    folder: Path,
    config: dict[str, Any],
    family: str,
    sentence: dict[str, Any],
    context: int | None,
) -> int:
    bounds: list[int] = []
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(positions, int) and positions > 0:
        pad = config.get("pad_token_id")
        lost = (1 if pad is None else int(pad)) + 1 if family in _OFFSET else 0
        bounds.append(positions - lost)
    stated = sentence.get("max_seq_length")
    if not isinstance(stated, int):
        settings = read_json(folder / "tokenizer_config.json", optional=True)
        stated = settings.get("model_max_length")
    if isinstance(stated, int | float) and 0 < stated < _UNSET:
        bounds.append(int(stated))
    if context is not None:
        bounds.append(context)
    return max(1, min(bounds, default=_DEFAULT_LENGTH))


def _matryoshka(
    config: dict[str, Any], known: dict[str, Any], family: str, modules: list[_Module]
) -> tuple[int, ...] | None:
    for source in (config, known):
        sizes = source.get("matryoshka_dimensions")
        if isinstance(sizes, list) and sizes:
            return tuple(sorted(int(s) for s in sizes))
        if source.get("is_matryoshka"):
            return ()
    return _MATRYOSHKA.get(family) if modules else None


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return tuple(str(v) for _, v in sorted(named.items(), key=lambda item: int(item[0])))
    count = config.get("num_labels")
    return tuple(f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2))


def _activation(config: dict[str, Any], labels: int) -> Activation:
    if labels == 1:
        return "sigmoid"
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = str(named or config.get("sbert_ce_default_activation_function") or "")
    by_name: dict[str, Activation] = {
        "Identity": "identity",
        "Sigmoid": "sigmoid",
        "Softmax": "softmax",
    }
    by_problem: dict[str, Activation] = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
    }
    own = by_name.get(named.rpartition(".")[2])
    return own or by_problem.get(str(config.get("problem_type")), "softmax")
