"""What the shell offers when Tab is pressed: names of models on this machine. Nothing is loaded for it."""

from __future__ import annotations


def model_names(incomplete: str) -> list[str]:
    """The models that `millrace list` shows, and the default one, which may not be here yet."""
    from millrace.models import store
    from millrace.models.resolve import DEFAULT

    names = dict.fromkeys((DEFAULT, *store.names()))
    return [name for name in names if name.startswith(incomplete)]
