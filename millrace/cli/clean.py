"""`millrace clean`: what millrace keeps on this machine, how much of it there is, and its removal.

Only what millrace itself wrote into its folder is removed, and models of the Hugging Face cache that are
named. It knows where things lie, and nothing of what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from millrace.config import home
from millrace.errors import SetupError
from millrace.sizes import format_bytes

KINDS = {
    "prefixes": ("state of prompts and answers, made again as they are asked", ("prefixes",)),
    "responses": (
        "stored responses, conversations and what was typed in chats; gone for good",
        ("responses.sqlite", "responses.sqlite-wal", "responses.sqlite-shm", "chat_history"),
    ),
    "kernels": ("compiled code and OpenBLAS, made again at the next start", ("compiled", "blas")),
    "models": ("the default model and converted GGUF files, fetched and made again", ("models",)),
}
ALL = "all"


def register(app: typer.Typer) -> None:
    app.command("clean")(clean)


def _whats(incomplete: str) -> list[str]:
    return [name for name in (*KINDS, ALL) if name.startswith(incomplete)]


def clean(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="prefixes, responses, kernels, models or all, or a model of the Hugging Face cache by "
            "its name (org/name). Without any, only the sizes are shown.",
            autocompletion=_whats,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Show what millrace keeps on this machine, and remove what you name."""
    folder = home()
    if not what:
        _show(folder)
        return
    kinds, hub = _wanted(what)
    targets = [p for kind in kinds for p in paths_of(folder, kind)]
    size = sum(size_of(p) for p in targets)
    hub_size = sum(size_of(_hub_folder(name)) for name in hub)
    if not targets and not hub:
        typer.echo(f"There is nothing of that in {folder}.")
        return
    named = ", ".join([*(k for k in kinds if paths_of(folder, k)), *hub])
    if not yes:
        typer.confirm(f"Remove {named} ({format_bytes(size + hub_size)})?", abort=True)
    _remove(folder, [*targets, *map(_hub_folder, hub)])
    typer.echo(f"Removed {named}; {format_bytes(size + hub_size)} are free again.")


def paths_of(folder: Path, kind: str) -> list[Path]:
    """What there is of a kind; a link is removed as a link, whatever it points to."""
    return [p for name in KINDS[kind][1] if os.path.lexists(p := folder / name)]


def size_of(path: Path) -> int:
    """The bytes that removing it gives back: its own files, each once, and nothing behind links."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def _wanted(what: Sequence[str]) -> tuple[list[str], list[str]]:
    kinds: list[str] = []
    hub: list[str] = []
    for word in dict.fromkeys(what):
        if word == ALL:
            kinds += KINDS
        elif word in KINDS:
            kinds.append(word)
        elif "/" in word and _hub_folder(word).is_dir():
            hub.append(word)
        else:
            raise SetupError(
                f"There is no '{word}' to remove. There are: {', '.join((*KINDS, ALL))}, and models of "
                "the Hugging Face cache by their names; `millrace rm NAME` removes one model."
            )
    return list(dict.fromkeys(kinds)), hub


def _hub_folder(name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _remove(folder: Path, targets: Iterable[Path]) -> None:
    from millrace.occupancy import alone

    path = folder
    try:
        with alone(folder) as free:
            if not free:
                raise SetupError(
                    f"A server or another program uses {folder}. End it first: `millrace service remove` "
                    "if it is the service, Ctrl-C where it runs."
                )
            for path in targets:
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                else:
                    shutil.rmtree(path)
    except OSError as error:
        raise SetupError(f"{path} cannot be removed: {error.strerror or error}.") from None


def _show(folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    total = 0
    for kind, (about, _) in KINDS.items():
        size = sum(size_of(p) for p in paths_of(folder, kind))
        total += size
        table.add_row(kind, format_bytes(size), about)
    table.add_row(ALL, format_bytes(total), f"in {folder}")
    Console(highlight=False).print(table, markup=False)
    typer.echo("Remove some: millrace clean prefixes kernels")
