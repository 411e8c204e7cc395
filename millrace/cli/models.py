"""The commands that look after models on this machine: pull, list, show, rm.

They print what `millrace.models` finds; nothing about models is decided here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.completion import fetchable_names, model_names
from millrace.sizes import format_bytes

_NAME = (
    "A name from 'millrace list', a short name (qwen3-4b), auto, a folder, a GGUF file, or a Hugging Face "
    "id (org/name)."
)

_NOT_SERVED = " (not supported: there is no such model class here, and it cannot be served)"
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("pull")(pull)
    app.command("list")(list_)
    app.command("show")(show)
    app.command("rm")(rm)


def pull(
    name: Annotated[str, typer.Argument(help=_NAME, autocompletion=fetchable_names)] = "smollm2",
) -> None:
    """Fetch a model, or convert a GGUF file, so that it is ready to serve."""
    from millrace.cli.progress import reporter
    from millrace.models.description import describe
    from millrace.models.resolve import resolve

    with reporter() as progress:
        found = resolve(name, progress=progress)
    if found.note:
        typer.echo(found.note, err=True)
    size = format_bytes(describe(found.path).bytes)
    typer.echo(f"{found.name} is ready ({size}) in {found.path}")


def list_(as_json: Json = False) -> None:
    """List the models on this machine."""
    from millrace.models import store

    models = store.local_models()
    if as_json:
        _print_json(models)
        return
    if not models:
        typer.echo("No models here yet. Fetch the default one: millrace pull")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    table.add_column("ARCHITECTURE")
    table.add_column("WEIGHTS")
    table.add_column("CONTEXT", justify="right")
    table.add_column("SIZE", justify="right")
    table.add_column("FROM")
    for model in models:
        context = "-" if model.context is None else f"{model.context:,}"
        table.add_row(
            model.name,
            model.architecture if model.error is None else "broken",
            model.quantization,
            context,
            format_bytes(model.bytes),
            model.source,
        )
    console = Console()
    console.print(table, markup=False)
    for model in models:
        if model.error is not None:
            console.print(f"\n{model.name} is broken: {model.error}", markup=False, soft_wrap=True)


def show(
    name: Annotated[str, typer.Argument(help=_NAME, autocompletion=model_names)] = "smollm2",
    as_json: Json = False,
) -> None:
    """Show what a model on this machine is: shape, weights, window, ends, template."""
    import msgspec

    from millrace.cli.settings import profile_of
    from millrace.models.description import describe
    from millrace.models.encoders import encoder_of
    from millrace.models.resolve import resolve
    from millrace.models.supported import is_supported
    from millrace.serving.pictures import takes_in

    table = profile_of(name)
    profile = table.said if table else {}
    found = resolve(name if table is None else table.model, download=False)
    about = describe(found.path)
    tools, reasoning = formats_of(found.path)
    takes = takes_in(found.path)
    supported = is_supported(found.path)
    if as_json:
        fields = {
            "name": name if table else found.name,
            "source": found.source,
            "supported": supported,
            "profile": profile,
            "tool_format": tools,
            "reasoning_format": reasoning,
            "input_modalities": takes,
        }
        _print_json(fields | msgspec.to_builtins(about))
        return
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, show_header=False)
    out.add_column(style="bold")
    out.add_column(overflow="fold")
    rows = {
        "name": name if table else found.name,
        "from": found.source,
        "architecture": about.architecture + _NOT_SERVED * (supported is False),
        "parameters": f"{about.parameters:,}",
        "weights": f"{about.quantization}, {about.dtype}" if about.quantization else about.dtype,
        "context": "unknown" if about.context is None else f"{about.context:,} tokens",
        "vocabulary": "unknown" if about.vocabulary is None else f"{about.vocabulary:,} tokens",
        "ends with": ", ".join(map(str, about.eos)) or "unknown",
        "takes": "text and pictures" if "image" in takes else "text",
        "chat template": "yes" if about.chat_template else "no",
        "tool calls": tools,
        "reasoning": reasoning or "none",
        "size": format_bytes(about.bytes),
        "folder": about.path,
    }
    if (encoder := encoder_of(found.path, name=found.name)) is not None:
        for label in ("ends with", "chat template", "tool calls", "reasoning"):
            del rows[label]
        rows |= {"context": f"{encoder.length:,} tokens", "makes": encoder.described}
    if profile:
        rows["profile"] = ", ".join(f"{key} = {value}" for key, value in profile.items())
    for label, value in rows.items():
        out.add_row(label, value)
    Console().print(out, markup=False)


def formats_of(folder: Path) -> tuple[str, str | None]:
    """How the model is taken to write tool calls and thoughts."""
    from millrace.text.dialect import Dialect
    from millrace.text.tokenizer import Tokenizer

    found = Dialect(Tokenizer(folder)).format
    thought = found.thought.name if found.thought else None
    return found.name, thought or ("channels" if found.messages else None)


def rm(
    name: Annotated[
        str, typer.Argument(help="A name from 'millrace list'.", autocompletion=model_names)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from this machine."""
    from millrace.models import short_names, store

    own = store.own_folder(name)
    if own is None and (short := short_names.find(name)) is not None:
        name = short.source
    if not yes and (folder := own or store.hub_folder(name)) is not None:
        shared = "" if own else ", which other programs on this machine share"
        typer.confirm(f"Remove {name} from {folder}{shared}?", abort=True)
    typer.echo(f"Removed {name}; {format_bytes(store.remove(name))} are free again.")


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
