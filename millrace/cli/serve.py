"""`millrace serve`: resolve the model, start its engine, serve."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from millrace.config import EngineConfig, LogFormat, ServeConfig, Weights


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
    max_queue: Annotated[
        int, typer.Option(help="Answers that may wait beside those; more are refused with a 429.")
    ] = 256,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the key-value state of running requests, like 8G or 512M; "
            "most of what the device has left if not given."
        ),
    ] = None,
    max_stall: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a long prompt may hold up running streams; "
            "2.5 times the recent decode step if not given."
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="The most prompt tokens run between two decode steps; "
            "512 on a CPU and 2048 on a GPU if not given."
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(help="Largest request body in bytes.")] = 32 << 20,
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream gets a comment line.")
    ] = 5.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running streams get to finish on SIGTERM.")
    ] = 30.0,
    tool_format: Annotated[
        str | None,
        typer.Option(help="How the model writes tool calls; detected if not given (see docs)."),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        typer.Option(help="How the model marks its thinking; detected if not given (see docs)."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Allow a model folder to bring Python code of its own.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Serve a model over HTTP."""
    import asyncio

    from millrace import logs
    from millrace.cli.progress import reporter
    from millrace.cli.values import bytes_of, one_of
    from millrace.models.resolve import resolve

    log_level = one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    form: LogFormat = one_of("--log-format", log_format, get_args(LogFormat))
    logs.setup(log_level, form)
    with reporter() as progress:
        found = resolve(model, progress=progress)
    config = ServeConfig(
        engine=EngineConfig(
            model=str(found.path),
            name=name or found.name,
            weights=one_of("--weights", weights, get_args(Weights)),
            context=context,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_stall=max_stall,
            kv_memory=bytes_of("--kv-memory", kv_memory),
            log_level=log_level,
            log_format=form,
            trust_remote_code=trust_remote_code,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        ),
        host=host,
        port=port,
        max_body=max_body,
        keep_alive=keep_alive,
        drain_timeout=drain_timeout,
        max_queue=max_queue,
    )
    asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> None:
    from millrace.serving.listening import bind
    from millrace.serving.metrics import Metrics
    from millrace.serving.opening import Workplace, open_model

    listener = bind(config.host, config.port)
    workplace = Workplace()
    try:
        metrics = Metrics()
        model = await open_model(
            config.engine,
            workplace.launcher(config.engine),
            metrics,
            idle=config.keep_alive,
            max_queue=config.max_queue,
        )
        # The engine is starting in its own process while the web framework is imported here.
        from millrace.api.context import Context
        from millrace.api.server import serve
        from millrace.serving.registry import Registry

        registry = Registry([model], {config.engine.model: model.name})
        context = Context(registry, config, metrics)
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
