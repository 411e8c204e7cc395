"""Running a server from the command line: its engines first, since they take longest, then the front."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millrace import descriptors
from millrace.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millrace.config import ServeConfig
    from millrace.protocol.prefixes import CacheChange
    from millrace.rpc.smg.front import SmgFront
    from millrace.serving.catalogue import Catalogue, ModelSpec
    from millrace.serving.metrics import Metrics
    from millrace.serving.quotas import Quotas
    from millrace.serving.registry import Registry


async def run(config: ServeConfig, catalogue: Catalogue, first: list[ModelSpec]) -> None:
    from millrace.api.responses.store import open_store
    from millrace.cli import neighbours
    from millrace.cli.better_model import BetterModel, is_builtin
    from millrace.cli.progress import LoadingLine
    from millrace.media.limits import MediaLimits
    from millrace.models.encoders import encoder_in
    from millrace.models.footprint import device_budget
    from millrace.occupancy import occupy
    from millrace.serving.adapters import AdapterLibrary
    from millrace.serving.announcer import Announcer
    from millrace.serving.documents import DocumentDesk
    from millrace.serving.listener import bind
    from millrace.serving.media import MediaDesk
    from millrace.serving.memory import OtherServers
    from millrace.serving.metrics import Metrics
    from millrace.serving.model_launcher import ModelLauncher, Workplace, check_defaults
    from millrace.serving.quotas import key_quotas, model_quotas
    from millrace.serving.registry import Registry
    from millrace.serving.warm_prompts import read_file
    from millrace.text.volatile import Volatile

    # What is wrong with these is said before anything costly starts.
    descriptors.raise_limit()
    descriptors.check("A server")
    check_defaults(config.defaults)
    Volatile(config.engine.strip_volatile)
    lines = read_file(config.warm) if config.warm else []
    listener = bind(config.host, config.port)
    occupy()
    names = [s.name for s in first]
    registration = neighbours.register(config, listener, names)
    others, whole = OtherServers(registration.others, registration.record.pool), device_budget()
    neighbours.warn(others, whole, config.memory)
    workplace = Workplace()
    store = open_store(config.store, config.store_days, config.store_limit, len(config.api_keys))
    media = MediaDesk(
        MediaLimits(
            remote=config.remote_media, folders=config.media_folders, most=config.max_pictures
        )
    )
    documents = DocumentDesk()
    beside: list[SmgFront] = []

    def cache_changed(name: str, changes: Sequence[CacheChange]) -> None:
        for front in beside:
            front.cache_changed(name, changes)

    try:
        metrics = Metrics(config.metrics_names)
        quotas = key_quotas(config.api_keys, config.rate_requests, config.rate_tokens)
        adapters = AdapterLibrary()
        launcher = ModelLauncher(
            workplace,
            metrics,
            idle=config.keep_alive,
            max_queue=config.max_queue,
            quotas=model_quotas({spec.name: spec.limits for spec in catalogue.named}),
            adapters=adapters,
            media=media,
            on_cache=cache_changed,
        )
        registry = Registry(
            catalogue,
            launcher,
            metrics,
            limit=config.memory or whole,
            max_waiting=config.max_waiting,
            adapters=adapters,
            # --memory is this server's own, whatever others hold.
            others=others if config.memory is None else None,
        )
        announcer = Announcer(registration, registry)
        if config.smg is not None:
            spec = (first or registry.named)[0]
            beside.append(_worker(config.smg, registry, spec, config, quotas, metrics))
        registry.preload(first)
        announcer.look()  # what is about to be taken is not there for a server that starts now
        better = BetterModel(registry.limit, _command()) if is_builtin(first) else None
        for instance in registry.instances():
            # The engines are starting in their own processes meanwhile.
            await asyncio.wait({instance.opened})
        line = LoadingLine(lambda: _loading(registry))
        from millrace.api.context import Context
        from millrace.api.server import serve

        context = Context(
            registry, config, metrics, store, quotas=quotas, documents=documents, warm=lines
        )
        address = listener.getsockname()
        _tell_roles(config)
        warning = _exposed(address[0], config)
        if config.smg is not None:
            warning = _exposed(config.smg.rpartition(":")[0].strip("[]"), config) or warning
        encodes = bool(first) and encoder_in(first[0].engine) is not None

        def ready() -> None:
            line.end()
            facts = [*_facts(registry), *neighbours.lines(others, registry, whole)]
            _welcome(names, address, config, warning, encodes, facts)
            if better is not None:
                better.show()

        try:
            await serve(context, listener, ready, [announcer, *beside])
        finally:
            line.end()
    finally:
        await media.close()
        documents.close()
        store.close()
        listener.close()
        workplace.remove()
        registration.close()


def _worker(
    address: str,
    registry: Registry,
    spec: ModelSpec,
    config: ServeConfig,
    quotas: Quotas,
    metrics: Metrics,
) -> SmgFront:
    try:
        from millrace.rpc.smg.front import SmgFront
    except ImportError as error:
        raise SetupError(
            f"--smg needs gRPC, which is not installed ({error.name}): pip install 'millrace-server[smg]'"
        ) from None
    return SmgFront(registry, spec, config, quotas, metrics, address)


def _loading(registry: Registry) -> str:
    """How far the first loads are."""
    loading = [i for i in registry.instances() if i.phase in ("wished", "loading")]
    return "; ".join(f"{i.spec.name}: {i.client.stage}" for i in loading) or "starting"


def _exposed(address: str, config: ServeConfig) -> str | None:
    """What to say of a server that anybody who reaches it may use."""
    import logging

    from millrace.serving.keys import is_exposed

    if not is_exposed(address, config.api_keys):
        return None
    text = (
        f"listening on {address} without an API key: everybody who can reach this machine can "
        "use the model. Set a key with --api-key-file or MILLRACE_API_KEY."
    )
    logging.getLogger("millrace.api").warning(text)
    return text


def _tell_roles(config: ServeConfig) -> None:
    """Log that administration is off, on a server whose keys all have the role use."""
    import logging

    if config.api_keys and all(key.role != "admin" for key in config.api_keys):
        logging.getLogger("millrace.api").info(
            "no API key has the role admin: models and adapters cannot be managed, nor the cache emptied, "
            "over the network. To give a key the role, start the server with it as --admin-key or "
            "MILLRACE_ADMIN_KEY, or write its line in the --api-key-file as NAME[admin]:KEY"
        )


def _facts(registry: Registry) -> list[str]:
    """What each model that was loaded runs on, and what it has."""
    from millrace.serving.memory import memory_of

    lines = []
    for instance in registry.instances():
        ready, model = instance.client.ready, instance.model
        if ready is not None and model is not None:
            window = f"window {model.window:,} tokens"
            lines.append(f"{instance.spec.name}: {ready.device}, {ready.dtype}, {window}")
            lines.append(f"  memory: {memory_of(instance).in_words()}")
            if ready.cache_note is not None:
                lines.append(f"  {ready.cache_note}")
    return lines


def _command() -> str:
    """How this very program is called here, so that what is shown works as it is printed."""
    own = Path(sys.argv[0]).absolute()
    if own.name == "millrace" and os.access(own, os.X_OK):
        found = shutil.which("millrace")
        return "millrace" if found and os.path.samefile(found, own) else shlex.quote(str(own))
    return f"{shlex.quote(sys.executable)} -m millrace"


def _welcome(
    names: list[str],
    address: tuple[str, int],
    config: ServeConfig,
    warning: str | None,
    encodes: bool,
    facts: list[str],
) -> None:
    from rich.console import Console

    host, port = address[:2]
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    out = Console(highlight=False)
    served = " and ".join(names) or "models on demand"
    out.print(f"\n[bold green]millrace[/] serves [bold]{served}[/] at [bold]{base}[/]")
    for line in facts:
        out.print(f"  {line}", markup=False, soft_wrap=True)
    out.print()
    if warning:
        out.print(f"[bold red]Warning:[/] {warning}\n", soft_wrap=True)
    asked = "" if len(names) == 1 else f'"model": "{names[0] if names else "NAME"}", '
    key = " -H 'authorization: Bearer KEY'" if config.api_keys else ""
    out.print("Try next:")
    path, body = (
        "chat/completions",
        (
            '"messages": [{"role": "user", "content": "What is the capital of France?"}], '
            '"temperature": 0'
        ),
    )
    if encodes:
        path, body = "embeddings", '"input": ["What is the capital of France?"]'
    out.print(
        f"  curl {base}/v1/{path} -H 'content-type: application/json'{key} \\\n"
        f"    -d '{{{asked}{body}}}'",
        markup=False,
        soft_wrap=True,
    )
    option = " --api-key KEY" if config.api_keys else ""
    if not encodes:
        out.print(f"  {_command()} chat --url {base}{option}", markup=False, soft_wrap=True)
    out.print(
        f"  {base}/ in a browser: chat, dashboard, models; {base}/docs: the API\n",
        markup=False,
        soft_wrap=True,
    )
