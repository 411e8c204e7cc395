"""Logits only where somebody asks for them: the output layer runs on the chosen tokens alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class TokenChoice:
    """The tokens of a pass whose logits are wanted, by their place in it."""

    def __init__(self) -> None:
        self.places: mx.array | None = None
        """None is all of them."""
        self.made = False
        """Whether the choice has been carried out."""

    def of(self, hidden: mx.array) -> mx.array:
        """The chosen tokens, shaped [tokens, 1, size]."""
        if self.places is None or hidden.ndim != 3:
            return hidden
        self.made = True
        return hidden.reshape(-1, 1, hidden.shape[-1])[self.places]


class Wrapped(nn.Module):  # type: ignore[misc]
    """A module in the place of another, whose attributes it has."""

    def __init__(self, inner: nn.Module, choice: TokenChoice) -> None:
        super().__init__()
        self.inner = inner
        self.choice = choice

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if "inner" not in self:
            raise AttributeError(name)
        return getattr(self["inner"], name)


class ChosenHead(Wrapped):
    """An output layer that runs on the chosen tokens."""

    def __call__(self, hidden: mx.array) -> Any:
        return self.inner(self.choice.of(hidden))


class ChosenEmbedding(Wrapped):
    """An embedding whose transpose is the output layer."""

    def __call__(self, tokens: mx.array) -> Any:
        return self.inner(tokens)

    def as_linear(self, hidden: mx.array) -> Any:
        return self.inner.as_linear(self.choice.of(hidden))


def choose_in(model: nn.Module) -> TokenChoice:
    """Have a model's output layer, wherever it is, follow the choice that is returned."""
    modules = [module for _, module in model.named_modules()]
    wrapped = [m for m in modules if isinstance(m, (ChosenHead, ChosenEmbedding))]
    if wrapped:
        return wrapped[0].choice
    choice = TokenChoice()
    for module in modules:
        for name, child in list(module.children().items()):
            if name == "lm_head" and isinstance(child, nn.Module):
                setattr(module, name, ChosenHead(child, choice))
            elif name == "embed_tokens" and hasattr(child, "as_linear"):
                setattr(module, name, ChosenEmbedding(child, choice))
    return choice
