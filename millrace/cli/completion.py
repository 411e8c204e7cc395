"""What the shell offers when Tab is pressed: names of models. Nothing is loaded or fetched for it."""

from __future__ import annotations


def model_names(incomplete: str) -> list[str]:
    """The models that `millrace list` shows, and the default one, which may not be here yet."""
    from millrace.models import store
    from millrace.models.resolve import DEFAULT

    names = dict.fromkeys((DEFAULT, *store.names()))
    return [name for name in names if name.startswith(incomplete)]


def fetchable_names(incomplete: str) -> list[str]:
    """Those, and what can be fetched: `auto` and the short names."""
    from millrace.models import short_names

    names = dict.fromkeys((short_names.AUTO, *(row.name for row in short_names.all_names())))
    local = model_names(incomplete)
    return local + [n for n in names if n.startswith(incomplete) and n not in local]
