"""`millrace serve`: resolve the model, start its engine, serve."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.config import EngineConfig, ServeConfig, Weights


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder, a GGUF file, a Hugging Face id or a local name; "
            "the small default model if left out."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name to serve the model under; its own if left out.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Context window in tokens; the model's own if left out."),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Weights on the device: auto (float32 on a CPU, as stored elsewhere), "
            "keep, bf16 or f32."
        ),
    ] = "auto",
    max_running: Annotated[
        int, typer.Option(help="The most answers that are generated at the same time.")
    ] = 32,
    prefill_chunk: Annotated[
        int, typer.Option(help="The most prompt tokens run between two decode steps.")
    ] = 512,
    max_body: Annotated[int, typer.Option(help="Largest request body in bytes.")] = 32 << 20,
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream gets a comment line.")
    ] = 5.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running streams get to finish on SIGTERM.")
    ] = 30.0,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Allow a model folder to bring Python code of its own.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP."""
    import asyncio
    import logging

    import msgspec

    from millrace.cli.progress import reporter
    from millrace.errors import SetupError
    from millrace.models.resolve import resolve

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with reporter() as progress:
        found = resolve(model, progress=progress)
    try:
        weights_ = msgspec.convert(weights, Weights)
    except msgspec.ValidationError as error:
        raise SetupError("--weights must be auto, keep, bf16 or f32.") from error
    config = ServeConfig(
        engine=EngineConfig(
            model=str(found.path),
            name=name or found.name,
            weights=weights_,
            context=context,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            trust_remote_code=trust_remote_code,
        ),
        host=host,
        port=port,
        max_body=max_body,
        keep_alive=keep_alive,
        drain_timeout=drain_timeout,
        log_level=log_level,
    )
    asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> None:
    from millrace.serving.listening import bind
    from millrace.serving.opening import Workplace, open_model

    listener = bind(config.host, config.port)
    workplace = Workplace()
    try:
        model = open_model(config.engine, workplace.launcher(config.engine), idle=config.keep_alive)
        # The engine is starting in its own process while the web framework is imported here.
        from millrace.api.context import Context
        from millrace.api.server import serve
        from millrace.serving.registry import Registry

        context = Context(Registry([model], {config.engine.model: model.name}), config)
        address = listener.getsockname()
        await serve(context, listener, lambda: _welcome(model.name, address))
    finally:
        listener.close()
        workplace.remove()


def _welcome(name: str, address: tuple[str, int]) -> None:
    from rich.console import Console

    host, port = address[:2]
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    out = Console(highlight=False)
    out.print(f"\n[bold green]millrace[/] serves [bold]{name}[/] at [bold]{base}[/]\n")
    out.print("Try next:")
    out.print(
        f"  curl {base}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"messages": [{{"role": "user", '
        f'"content": "What is the capital of France?"}}]}}\'',
        markup=False,
        soft_wrap=True,
    )
    out.print(f"  millrace chat --url {base}", markup=False)
    out.print(f"  {base}/v1/status\n", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(serve)
