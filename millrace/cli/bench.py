"""`millrace bench`: load on one or more OpenAI-compatible servers, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from millrace.bench.runner import RunPlan
    from millrace.bench.samples import Level, Results
    from millrace.bench.stats import Slo
    from millrace.bench.workload import Item

_DEFAULT_REQUESTS = 32
_DEFAULT_TARGET = "millrace=http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A server as NAME=URL, with or without /v1; repeat it to compare several.",
            show_default=_DEFAULT_TARGET,
            metavar="NAME=URL",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="The model to ask for: MODEL for all targets, or NAME=MODEL for one."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key: KEY for all targets, or NAME=KEY for one.")
    ] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Which OpenAI endpoint to use.")
    ] = "chat",
    clients: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: how many clients at once; 1,4,16 sweeps.", show_default="4"
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests a second, Poisson arrivals; 1,2,4 sweeps."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests per level and target.",
            show_default=f"{_DEFAULT_REQUESTS}, or the whole trace",
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests per target before anything is measured.")
    ] = 1,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds in which targets alternate.", show_default="chosen by the load"
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Prompt length: 230, 100:300 or lognormal:MEDIAN:SIGMA.")
    ] = "230",
    output_tokens: Annotated[
        str, typer.Option(help="max_tokens, written like --prompt-tokens.")
    ] = "48",
    shared_prefix: Annotated[
        str | None,
        typer.Option(
            help="Tokens that prompts have in common, of the prompt's length; TOKENS:SHARE "
            "for a share of the requests, as in 500:0.8.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Size prompts by the first target's usage.prompt_tokens.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL with messages or prompt, max_tokens, and perhaps arrival (s)."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sent with every request.")] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for exactly max_tokens tokens; some servers refuse the field.",
        ),
    ] = False,
    specprefill: Annotated[
        bool | None,
        typer.Option(
            "--specprefill/--no-specprefill",
            help="Ask for SpecPrefill, or for none; the server's own setting if left out.",
        ),
    ] = None,
    specprefill_keep_pct: Annotated[
        float | None,
        typer.Option(min=0.0001, max=1.0, help="The share of long prompts that stays with it."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds per request.")] = 600.0,
    slo_ttft: Annotated[
        str | None, typer.Option(help="Goodput: time to the first text, as 500ms or 2s.")
    ] = None,
    slo_itl: Annotated[
        str | None, typer.Option(help="Goodput: p99 of a request's gaps between tokens.")
    ] = None,
    slo_e2e: Annotated[str | None, typer.Option(help="Goodput: the whole request.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw/--no-raw", help="Put every request into the JSON too.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a .png or .svg.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
) -> None:
    """Measure any OpenAI-compatible server, or several side by side in one run."""
    from millrace.bench.lengths import parse_length
    from millrace.bench.load import Wire
    from millrace.bench.options import parse_duration, parse_prefix, parse_targets
    from millrace.bench.runner import RunPlan
    from millrace.bench.stats import Slo
    from millrace.bench.trace import read_trace
    from millrace.bench.workload import WorkloadShape

    if plot is not None:
        from millrace.bench.plot import check_plot

        check_plot(plot)
    chat = endpoint == "chat"
    items = read_trace(trace, chat=chat) if trace is not None else None
    prefix_tokens, prefix_share = parse_prefix(shared_prefix)
    slo = Slo(
        ttft=parse_duration("--slo-ttft", slo_ttft),
        itl=parse_duration("--slo-itl", slo_itl),
        e2e=parse_duration("--slo-e2e", slo_e2e),
    )
    plan = RunPlan(
        targets=parse_targets(target or [_DEFAULT_TARGET], model or [], api_key or []),
        levels=_levels(clients, rate, items),
        shape=WorkloadShape(
            prompt=parse_length("--prompt-tokens", prompt_tokens),
            output=parse_length("--output-tokens", output_tokens),
            prefix_tokens=prefix_tokens,
            prefix_share=prefix_share,
            chat=chat,
        ),
        wire=Wire(
            endpoint=endpoint,
            temperature=temperature,
            ignore_eos=ignore_eos,
            timeout=timeout,
            specprefill=specprefill,
            specprefill_keep_pct=specprefill_keep_pct,
        ),
        requests=_count(requests, items),
        trace=items,
        warmup=warmup,
        rounds=rounds,
        seed=seed,
        calibrate=calibrate,
    )
    results, interrupted = _run(plan)
    _show(plan, results, slo, json=json, raw=raw, plot=plot, interrupted=interrupted)


def _levels(clients: str | None, rate: str | None, trace: list[Item] | None) -> list[Level]:
    from millrace.bench.options import parse_numbers
    from millrace.bench.samples import Level
    from millrace.errors import SetupError

    if clients is not None and rate is not None:
        raise SetupError("--clients is a closed loop and --rate an open one; choose one of them.")
    if rate is not None:
        return [Level(rate=r) for r in parse_numbers("--rate", rate, float)]
    if clients is None and trace is not None and trace[0].arrival is not None:
        return [Level()]
    return [Level(clients=n) for n in parse_numbers("--clients", clients or "4", int)]


def _count(requests: int | None, trace: list[Item] | None) -> int:
    if trace is None:
        return requests or _DEFAULT_REQUESTS
    return min(requests or len(trace), len(trace))


def _run(plan: RunPlan) -> tuple[Results, bool]:
    """The run under a progress bar; Ctrl-C ends it and keeps what was gathered."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millrace.bench.runner import run
    from millrace.bench.samples import RequestSample, Results

    results = Results.empty(list(plan.targets), plan.levels)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("asking the targets", total=plan.total)

        def watch(what: str, sample: RequestSample | None) -> None:
            progress.update(bar, description=what, advance=0 if sample is None else 1)

        try:
            asyncio.run(run(plan, results, watch))
        except KeyboardInterrupt:
            return results, True
    return results, False


def _show(
    plan: RunPlan,
    results: Results,
    slo: Slo,
    *,
    json: Path | None,
    raw: bool,
    plot: Path | None,
    interrupted: bool,
) -> None:
    import msgspec
    from rich.console import Console

    from millrace.bench.report import as_json, print_report, write_json

    console = Console()
    gathered = sum(len(cell.samples) for cell in results.cells)
    if interrupted:
        console.print(f"[yellow]Interrupted:[/] {gathered} requests were measured.")
    print_report(console, results, slo)
    if gathered and json is not None:
        options: dict[str, object] = {
            "requests": plan.requests,
            "warmup": plan.warmup,
            "seed": plan.seed,
            "trace": plan.trace is not None,
            "shape": msgspec.to_builtins(plan.shape),
            "wire": msgspec.to_builtins(plan.wire),
            "interrupted": interrupted,
        }
        write_json(json, as_json(results, slo, options, samples=raw))
        console.print(f"Figures: {json}", highlight=False)
    if gathered and plot is not None:
        from millrace.bench.plot import draw

        draw(plot, results)
        console.print(f"Plot: {plot}", highlight=False)
    if interrupted:
        raise typer.Exit(130)
    if not any(sample.ok for cell in results.cells for sample in cell.samples):
        raise typer.Exit(1)
