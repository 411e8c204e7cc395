"""The options of `serve` in groups, as `--help` shows them, and under the names that other servers have for
them. It knows their names and no option itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

_EPILOG = (
    "Every option can stand in millrace.toml under its name, and in the environment: MILLRACE_PORT "
    "is --port."
)
OTHERS = "Others"
"""Where an option is shown that nobody has given a group."""
PANELS = {
    "Models": "config_ name alias only on_demand model_dir memory pin ttl max_waiting weights context "
    "trust_remote_code tool_format reasoning_format",
    "Where it listens": "host port server_name max_body keep_alive reader_timeout drain_timeout "
    "cors_origin allowed_host",
    "Who may ask, and how much": "api_key admin_key api_key_file rate_requests rate_tokens max_queue "
    "max_connections_per_address",
    "How it answers where a request says nothing": "temperature top_p top_k min_p repetition_penalty "
    "presence_penalty frequency_penalty max_tokens loop_guard",
    "Batch and memory": "max_running kv_memory max_stall prefill_chunk speculate",
    "Long prompts": "specprefill_draft specprefill specprefill_threshold specprefill_keep_pct",
    "Prefix cache": "cache cache_memory cache_disk cache_dir cache_quant cache_isolation "
    "checkpoint_every warm strip_volatile",
    "Adapters": "lora lora_dir lora_memory",
    "Pictures": "remote_media allow_local_media max_pictures",
    "Embeddings and ranking": "embed rerank pooling",
    "Stored responses": "store store_days store_limit",
    "Several machines": "ranks hostfile parallel distributed_backend",
    "Behind a gateway": "smg smg_engine",
    "Log and figures": "log_level log_format metrics_names",
}

ALIASES = {
    "name": ("--served-model-name",),
    "context": ("--ctx-size", "--max-model-len", "--context-length"),
    "max_running": ("--max-num-seqs", "--max-running-requests", "--decode-concurrency"),
    "prefill_chunk": (
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "--prefill-step-size",
    ),
    "temperature": ("--temp",),
}
"""What vLLM, SGLang, llama.cpp and mlx-lm call the same, on the command line alone."""


def add_in_panels(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add the command, whose options know the group they are shown in and stand in the environment, too."""
    panels = {name: title for title, names in PANELS.items() for name in names.split()}
    hints = get_type_hints(command, include_extras=True)
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, OptionInfo):
                note.rich_help_panel = panels.get(name, OTHERS)
                note.show_envvar = False  # all have one alike, which is said once
                if more := ALIASES.get(name):
                    note.help = f"{note.help} Also {', '.join(more)}."
    command.__annotations__ = hints
    settings = {"auto_envvar_prefix": "MILLRACE"}
    app.command(cls=_AliasedCommand, context_settings=settings, epilog=_EPILOG)(command)


class _AliasedCommand(TyperCommand):
    """A command that takes its options under their other names as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            other: f"--{name.replace('_', '-')}" for name, more in ALIASES.items() for other in more
        }
        end = args.index("--") if "--" in args else len(args)
        for place, arg in enumerate(args[:end]):
            name, equals, value = arg.partition("=")
            if name in own:
                args[place] = f"{own[name]}{equals}{value}"
        rest: list[str] = super().parse_args(ctx, args)
        return rest
