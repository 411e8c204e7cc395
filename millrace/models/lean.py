"""Importing mlx-lm's models without what its front door brings along.

`import mlx_lm` imports transformers for the tokenizers, which takes longer than everything else an engine
does before it answers, and an engine has no use for a tokenizer. Here the package is entered by its side:
its own `__init__` and its tokenizers are imported when somebody asks for a name of theirs, and not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PACKAGE = "mlx_lm"
_TOKENIZERS = "mlx_lm.tokenizer_utils"
_PUBLIC = ("__all__", "__version__")


def defer_tokenizers() -> None:
    """For a process that runs models and reads no text; does nothing where mlx-lm is imported already."""
    if _PACKAGE in sys.modules or importlib.util.find_spec("transformers") is None:
        return
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    loader = spec.loader

    def open_front_door(name: str) -> Any:
        if name.startswith("__") and name not in _PUBLIC:
            raise AttributeError(name)
        vars(package).pop("__getattr__", None)
        _real_tokenizers()
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = open_front_door
    sys.modules[_PACKAGE] = package
    sys.modules[_TOKENIZERS] = _stand_in()


def _stand_in() -> ModuleType:
    """The tokenizers' module with the two names that mlx-lm's own utilities take from it."""
    module = ModuleType(_TOKENIZERS, "Stands for mlx-lm's tokenizers until one is wanted.")

    def load(*args: Any, **kwargs: Any) -> Any:
        return _real_tokenizers().load(*args, **kwargs)

    vars(module).update(TokenizerWrapper=object, load=load, __getattr__=_tokenizer_name)
    return module


def _tokenizer_name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_real_tokenizers(), name)


def _real_tokenizers() -> ModuleType:
    found = sys.modules.get(_TOKENIZERS)
    if found is not None and found.__spec__ is None:
        del sys.modules[_TOKENIZERS]
    return importlib.import_module(_TOKENIZERS)
