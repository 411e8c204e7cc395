"""The models this server answers for, by name."""

from __future__ import annotations

from millrace.errors import ModelNotFound
from millrace.serving.model import ServedModel


class Registry:
    def __init__(self, models: list[ServedModel], aliases: dict[str, str] | None = None) -> None:
        self._models = {m.name: m for m in models}
        self._aliases = aliases or {}

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """A model by name or alias; without a name, the only one there is."""
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        found = self._models.get(self._aliases.get(name or "", name or ""))
        if found is None:
            raise ModelNotFound(name or "", list(self._models))
        return found
