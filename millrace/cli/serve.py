"""`millrace serve`: the options, and the models and the configuration that they make."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, get_args

import typer

from millrace.cli import access_options as access
from millrace.cli import log_options as telling
from millrace.cli import rank_options
from millrace.cli import sampling_options as sampling
from millrace.cli import specprefill as specprefill_options
from millrace.cli.completion import fetchable_names
from millrace.cli.panels import add_in_panels
from millrace.cli.settings import keys_of, tables_of, use_file
from millrace.config import EngineConfig, Isolation, ServeConfig, SmgEngine, Weights


def serve(
    context_: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models that are loaded at the start: short names (qwen3-4b), folders, GGUF files, "
            "Hugging Face ids or local names, or NAME=MODEL; auto for the best one that fits this "
            "machine; the small built-in model if left out. Others on this machine are loaded when "
            "they are asked for.",
            autocompletion=fetchable_names,
        ),
    ] = None,
    config_: Annotated[
        str | None,
        typer.Option(
            "--config",
            envvar="MILLRACE_CONFIG",
            is_eager=True,
            callback=use_file,
            help="A file of these options and of models; millrace.toml here or in millrace's own folder.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    server_name: Annotated[
        str | None,
        typer.Option(
            help="Name of this server for ps, chat and stop --server on this machine; --name is the "
            "model's."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name to serve the model under; its own if left out.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="A further name of the model; may be repeated.")
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Serve no other models than those named here.")
    ] = False,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Load nothing before it is asked for.")
    ] = False,
    model_dir: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder of model folders, served by their names like those in the cache; "
            "may be repeated."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for all models together, weights and state, like 12G; "
            "most of the device's if not given."
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="A model that never leaves to make room for others; may be repeated."),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Time without use after which a model is unloaded, like 300, 5m or -1 for never; "
            "if not given, 30m for those loaded on demand, never for those loaded at the start."
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for a model to load; more get a 503.")
    ] = 256,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="An adapter (LoRA) as NAME=FOLDER, in mlx-lm's form or PEFT's; requests choose it by "
            "giving NAME as model. May be repeated."
        ),
    ] = None,
    lora_dir: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder whose adapters may be loaded while the server runs; may be repeated. Without "
            "any, all folders may, if only this machine reaches the server."
        ),
    ] = None,
    lora_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for adapters, like 512M; a tenth of what there is for state if not given."
        ),
    ] = None,
    api_key: access.ApiKeys = None,
    admin_key: access.AdminKeys = None,
    api_key_file: access.ApiKeyFile = None,
    rate_requests: access.RateRequests = None,
    rate_tokens: access.RateTokens = None,
    max_connections_per_address: access.AddressConnections = None,
    cors_origin: access.CorsOrigins = None,
    allowed_host: access.AllowedHosts = None,
    context: Annotated[
        int | None, typer.Option(help="Context window in tokens; the model's own if left out.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Weights on the device: auto (as stored; on a CPU float32 where our kernels do not "
            "know the model, on CUDA bf16 where that is 1.1 GB at most), keep, bf16 or f32."
        ),
    ] = "auto",
    max_running: Annotated[
        int | None,
        typer.Option(
            help="The most answers that are generated at the same time; by default 32 on a CPU, and on "
            "a GPU as many of 1,024 tokens as its memory holds, from 32 to 256."
        ),
    ] = None,
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
            help="While answers are generated, no step is planned to take longer than this many seconds; "
            "0.5 on a CPU and 0.05 on a GPU if not given."
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of a step, those of prompts and of answers; "
            "512 on a CPU and 2048 on a GPU if not given."
        ),
    ] = None,
    speculate: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens that an answer may try from what its text repeats, 0 for none; "
            "8 on a CPU and none elsewhere if not given."
        ),
    ] = None,
    specprefill_draft: specprefill_options.DraftOption = None,
    specprefill: specprefill_options.SwitchOption = False,
    specprefill_threshold: specprefill_options.ThresholdOption = None,
    specprefill_keep_pct: specprefill_options.KeepOption = None,
    cache: Annotated[
        bool, typer.Option(help="Keep the state of prompts and answers for later requests.")
    ] = True,
    cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for that state in any case, like 4G; a share of the device's if not given. "
            "What running requests leave of theirs comes on top."
        ),
    ] = None,
    cache_disk: Annotated[
        str | None,
        typer.Option(
            help="Disk for that state, like 16G, or 0 for none; 16G or a tenth of the free space "
            "if not given, whichever is less."
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(help="Where it is kept on disk; in millrace's own folder if not given."),
    ] = None,
    cache_quant: Annotated[
        bool, typer.Option(help="Keep that state in 8 bits: half the room, slightly inexact.")
    ] = False,
    cache_isolation: Annotated[
        str, typer.Option(help="key: holders of different API keys share no state; or none.")
    ] = "none",
    checkpoint_every: Annotated[
        int, typer.Option(help="Tokens between checkpoints of state that cannot be cut.")
    ] = 1024,
    remote_media: Annotated[
        bool,
        typer.Option(
            help="Fetch pictures from web addresses that requests name, public ones only; or not."
        ),
    ] = True,
    allow_local_media: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder whose pictures requests may name by file: addresses; may be repeated. "
            "Without any, none may."
        ),
    ] = None,
    max_pictures: Annotated[int, typer.Option(help="The most pictures of one request.")] = 64,
    warm: Annotated[
        str | None,
        typer.Option(
            help='Prompts to run at the start, one a line: {"prompt": ...} or {"messages": [...]}.'
        ),
    ] = None,
    strip_volatile: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave lines with this pattern out of system messages, or auto for dates, times "
            "and token counters; may be repeated."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="File for stored responses and conversations, or none to store nothing; "
            "responses.sqlite in millrace's own folder if not given."
        ),
    ] = None,
    store_days: Annotated[
        int, typer.Option(help="Days that a stored response is kept after its last use.")
    ] = 30,
    store_limit: Annotated[
        str | None,
        typer.Option(
            help="Disk for stored responses and conversations, like 8G, divided equally between the API "
            "keys; 16G or half of the free space if not given, whichever is less."
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(help="Largest request body in bytes.")] = 32 << 20,
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream gets a comment line.")
    ] = 5.0,
    reader_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that reads nothing is let go.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running streams get to finish on SIGTERM.")
    ] = 30.0,
    smg: Annotated[
        str | None,
        typer.Option(
            help="Be a worker of the SMG gateway too, over gRPC at this HOST:PORT, with the first model "
            "that is named."
        ),
    ] = None,
    smg_engine: Annotated[
        str,
        typer.Option(
            help="The engine whose protocol gateways meet there: vllm (all that they can ask), mlx "
            "or both (of which they take vllm's)."
        ),
    ] = "vllm",
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    presence_penalty: sampling.PresencePenalty = None,
    frequency_penalty: sampling.FrequencyPenalty = None,
    max_tokens: sampling.MaxTokens = None,
    loop_guard: sampling.LoopGuard = None,
    ranks: rank_options.Ranks = None,
    hostfile: rank_options.Hostfile = None,
    parallel: rank_options.Split = "auto",
    distributed_backend: rank_options.Backend = None,
    tool_format: Annotated[
        str | None,
        typer.Option(help="How the model writes tool calls; detected if not given (see docs)."),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        typer.Option(help="How the model marks its thinking; detected if not given (see docs)."),
    ] = None,
    embed: Annotated[
        bool,
        typer.Option(
            "--embed",
            help="Serve embeddings, also of a model that makes text; its text generation is then off.",
        ),
    ] = False,
    rerank: Annotated[
        bool,
        typer.Option(
            "--rerank",
            help="Have the model judge relevance by yes and no; its text generation is then off.",
        ),
    ] = False,
    pooling: Annotated[
        str | None,
        typer.Option(help="How an encoder's states become one vector: cls, mean, lasttoken, ..."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Allow a model folder to bring Python code of its own.")
    ] = False,
    log_level: telling.LogLevel = "info",
    log_format: telling.LogForm = "text",
    metrics_names: telling.Names = "millrace",
) -> None:
    """Serve models over HTTP."""
    from millrace import native
    from millrace.cli import models_served
    from millrace.cli.progress import reporter
    from millrace.cli.serving import run
    from millrace.cli.values import adapter_of, bytes_of, one_of, said, task_of
    from millrace.models import blas
    from millrace.serving.drafts import specprefill_of
    from millrace.serving.keys import gather

    log_level, form = telling.start_log(log_level, log_format)
    if config_ is not None:
        logging.getLogger("millrace").info("options and models are read from %s", config_)
    if rank_options.launched_as_worker(hostfile):
        return
    speaks: SmgEngine = one_of("--smg-engine", smg_engine, get_args(SmgEngine))
    group = rank_options.group_of(ranks, hostfile, parallel, distributed_backend)
    config = ServeConfig(
        engine=EngineConfig(
            model="",
            name="",
            weights=one_of("--weights", weights, get_args(Weights)),
            context=context,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            speculate=speculate,
            max_stall=max_stall,
            specprefill=specprefill_of(
                specprefill_draft, specprefill, specprefill_threshold, specprefill_keep_pct
            ),
            kv_memory=bytes_of("--kv-memory", kv_memory),
            cache=cache,
            cache_memory=bytes_of("--cache-memory", cache_memory),
            cache_disk=rank_options.disk(group, cache_disk, cache_dir) if cache else 0,
            cache_dir=cache_dir,
            server_port=port,
            cache_quant=cache_quant,
            checkpoint_every=checkpoint_every,
            cache_told=smg is not None and speaks != "mlx",
            adapters=tuple(adapter_of(text) for text in lora or ()),
            adapter_memory=bytes_of("--lora-memory", lora_memory),
            strip_volatile=tuple(strip_volatile or ()),
            log_level=log_level,
            log_format=form,
            task=task_of(embed=embed, rerank=rerank),
            pooling=pooling,
            trust_remote_code=trust_remote_code,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            group=group,
        ),
        host=host,
        port=port,
        server_name=server_name,
        max_body=max_body,
        keep_alive=keep_alive,
        reader_timeout=reader_timeout,
        drain_timeout=drain_timeout,
        max_queue=max_queue,
        max_connections_per_address=max_connections_per_address,
        store=store,
        store_days=store_days,
        store_limit=bytes_of("--store-limit", store_limit),
        max_waiting=max_waiting,
        memory=bytes_of("--memory", memory),
        adapter_folders=tuple(lora_dir or ()),
        api_keys=gather(api_key or [], api_key_file, admin_key or [], keys_of(context_)),
        rate_requests=rate_requests,
        rate_tokens=rate_tokens,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        cache_isolation=one_of("--cache-isolation", cache_isolation, get_args(Isolation)),
        remote_media=remote_media,
        media_folders=models_served.media_folders(allow_local_media or []),
        max_pictures=max_pictures,
        warm=warm,
        smg=smg,
        smg_engine=speaks,
        metrics_names=telling.names_of(metrics_names),
        defaults=said(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            loop_guard=loop_guard,
        ),
    )
    if not model and config.engine.weights == "auto" and blas.mlx_backend() == "cpu":
        native.begin_in_fresh_home()
    with reporter() as progress:
        catalogue, first = models_served.catalogue_of(
            config,
            model or [],
            tables_of(context_),
            progress,
            name=name,
            aliases=alias or [],
            pins=pin or [],
            ttl=ttl,
            only=only,
            folders=model_dir or [],
        )
    asyncio.run(run(config, catalogue, [] if on_demand else first))


def register(app: typer.Typer) -> None:
    add_in_panels(app, serve)
