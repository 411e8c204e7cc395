"""`millrace embed`: texts in, vectors out, one JSON array a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

_AT_ONCE = 1024
"""Lines of standard input that are read before they are run."""


def register(app: typer.Typer) -> None:
    app.command()(embed)


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; lines of standard input if there are none.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="An embedding model: a folder, or a Hugging Face id (org/name).")
    ] = "sentence-transformers/all-MiniLM-L6-v2",
    prompt_name: Annotated[
        str | None, typer.Option(help="One of the model's prompts, put before each text.")
    ] = None,
    input_type: Annotated[str | None, typer.Option(help="query or document.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Numbers of a vector to keep.")] = None,
    truncate: Annotated[bool, typer.Option(help="Cut what is too long.")] = True,
    pooling: Annotated[
        str | None, typer.Option(help="cls, mean, lasttoken, ...; the model's own if not given.")
    ] = None,
) -> None:
    """Turn texts into vectors, one JSON array a line."""
    import msgspec

    from millrace.llm import LLM

    with LLM(model, task="embed", pooling=pooling) as llm:
        for batch in _batches(texts):
            vectors = llm.embed(
                batch,
                prompt_name=prompt_name,
                input_type=input_type,
                dimensions=dimensions,
                truncate=truncate,
            )
            for vector in vectors:
                sys.stdout.buffer.write(msgspec.json.encode(vector) + b"\n")
            sys.stdout.buffer.flush()


def _batches(texts: list[str] | None) -> Iterator[list[str]]:
    if texts:
        yield texts
        return
    batch: list[str] = []
    for line in sys.stdin:
        batch.append(line.rstrip("\n"))
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
