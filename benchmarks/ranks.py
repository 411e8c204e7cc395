"""Step time of a model on several ranks of one machine, and what docs/distributed.md's formula makes of it.

    python benchmarks/ranks.py --make FOLDER      # a model of 48 layers, 1.2 GB, to measure with
    python benchmarks/ranks.py --model FOLDER --ranks 2 --parallel tensor pipeline

Every rank runs the same decode steps in a process of its own, without server or scheduler. Each term of the
formula is measured by itself: the whole model as one run of our kernels, which is what its weights take;
the whole model layer after layer, as a rank runs its part; as many of these side by side as there are
ranks, since they share the machine's memory; the parts side by side without their sums, whose unevenness is
what ranks wait for each other; a small and a large message from one rank to the next. The time in sums is
measured in steps of its own, from when a rank has its own part to when it has the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.config import EngineConfig, GroupConfig, RankHost, RankSeat
from millrace.distributed import environment
from millrace.models import blas, device
from millrace.models.resolve import resolve

PROMPT, STEPS, WARM = 64, 24, 4
SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "num_attention_heads": 24,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "quantization": {"group_size": 64, "bits": 4},
}
"""Of a model whose weights are far larger than any processor's caches, and which 2 and 3 divide."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--make", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--model", default=None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    parser.add_argument("--parallel", nargs="+", default=["auto"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of each rank; a fair share if 0")
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make is not None:
        _make(args.make)
    elif args.child is not None:
        _child(args)
    else:
        for count in args.ranks:
            for how in args.parallel:
                _compared(args, count, how)


def _compared(args: argparse.Namespace, count: int, how: str) -> None:
    """Print what a split step takes, what it should take by the formula, and the formula's terms."""
    reading = count if how != "pipeline" else 1  # ranks of a pipeline take turns
    whole = _median(_run(args, "whole", how, reading, count))
    layered = _median(_run(args, "layers", how, reading, count))
    one = _median(_run(args, "whole", how, 1, 1))
    ranks = _run(args, "split", how, count, count)
    first = ranks[0]
    latency, rate = first["way"]
    layers, message = first["layers"], first["bytes"]
    terms = {"weights": whole / (count if how != "pipeline" else 1), "layers": layered - whole}
    if how == "pipeline":
        terms["messages"] = 2e3 * (count - 1) * (latency + message / rate)
    else:
        parts = _run(args, "parts", how, count, count)
        terms["sums"] = 2 * layers * 2e3 * (count - 1) * (latency + message / count / rate)
        terms["waiting"] = _unevenness([part["between"] for part in parts])
    formula, step = sum(terms.values()), first["step"]
    print(
        f"{count} ranks, {how}, {args.rows} rows: a step {step:.1f} ms, by the formula {formula:.1f} ms"
    )
    print("  terms, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in terms.items()))
    print(f"  whole model as one run {whole:.1f} ms, layer after layer {layered:.1f} ms", end=", ")
    print(f"with all cores {one:.1f} ms")
    if first["sums"]:
        share = first["waits"] / first["timed"]
        print(
            f"  in sums {first['waits']:.1f} of {first['timed']:.1f} ms, {share:.0%}; {first['sums']} sums"
        )
        print(
            f"  a bare sum {first['bare']:.3f} ms; by the formula {terms['sums'] / first['sums']:.3f} ms"
        )
    print(f"  latency {1e6 * latency:.0f} µs, rate {rate / 1e6:.0f} MB/s", end=", ")
    print(f"peaks {[rank['peak'] for rank in ranks]} MiB", flush=True)


def _median(found: list[dict[str, Any]]) -> float:
    return float(statistics.mean(each["step"] for each in found))


def _unevenness(between: list[list[list[float]]]) -> float:
    """Milliseconds of a step that ranks wait for the slowest before each sum: `between` has the time from
    sum to sum, of each rank, step and sum."""
    steps = []
    for of_ranks in zip(*between, strict=True):
        pieces = list(zip(*of_ranks, strict=True))
        steps.append(sum(max(piece) for piece in pieces) - statistics.mean(map(sum, of_ranks)))
    return 1e3 * statistics.median(steps)


def _run(
    args: argparse.Namespace, mode: str, how: str, processes: int, ranks: int
) -> list[dict[str, Any]]:
    """What so many processes side by side have found; each has its share of the cores."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(processes)]
    ports = [str(s.getsockname()[1]) for s in held]
    for each in held:
        each.close()
    threads = args.threads or max(1, (os.cpu_count() or 1) // ranks)
    base = [sys.executable, __file__, "--ports", *ports, "--rows", str(args.rows)]
    base += ["--model", args.model] if args.model else []
    started = [
        subprocess.Popen(
            [*base, "--child", mode, how, str(rank)],
            env=os.environ | {"OPENBLAS_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    for each in started:
        assert each.stdout is not None
        each.stdout.readline()
    for each in started:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return [json.loads(each.communicate(timeout=600)[0].splitlines()[-1]) for each in started]


def _child(args: argparse.Namespace) -> None:
    mode, how, rank = args.child[0], args.child[1], int(args.child[2])
    split = mode in ("split", "parts")
    made = args.model is not None and (Path(args.model) / "config.json").is_file()
    config = EngineConfig(model=args.model if made else str(resolve(args.model).path), name="model")
    if split:
        hosts = tuple(RankHost(address="127.0.0.1", port=p, control=0) for p in args.ports)
        group = GroupConfig(hosts=hosts, parallel=how)
        seat = RankSeat(rank=rank, turns=("", 0), secret="", alone=False)
        config = EngineConfig(model=config.model, name="model", group=group, seat=seat)
        environment.enter(group, rank)
    device.before_import()
    blas.prepare()
    import mlx.core as mx

    model = _layered(config) if mode == "layers" else _loaded(config)
    environment.leave()
    way = _way(mx, rank) if mode == "split" else (0.0, 1.0)
    print("ready", flush=True)
    sys.stdin.readline()
    found: dict[str, Any] = {"way": way, "layers": len(model.layers), "sums": 0}
    wait = mode == "split" and how == "pipeline"
    if mode != "parts":
        found["step"] = 1e3 * statistics.median(_steps(mx, model, args.rows, wait))
    if mode == "split" and how != "pipeline":
        _timed(mx, model, args.rows, found)
    if mode == "parts":
        _apart(mx, model, args.rows, found)
    width = int(getattr(getattr(model, "args", None), "hidden_size", 576))
    found["bytes"] = 4 * args.rows * width
    if mode == "split":
        found["bare"] = _bare(mx, args.rows, width)
    print(json.dumps(found | {"peak": _peak()}), flush=True)


def _loaded(config: EngineConfig) -> Any:
    from millrace.models.load import load

    return load(config).model


def _layered(config: EngineConfig) -> Any:
    """A whole model, run as a rank runs its part."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from millrace.models.placement import place

    device.configure()
    kind = device.kind()
    if kind == "cpu":
        mx.disable_compile()
    model, _ = load_model(Path(config.model), lazy=True)
    model = place(model, config.weights, kind, Path(config.model), whole=False)
    mx.eval(model.parameters())
    return model


def _steps(
    mx: Any, model: Any, rows: int, wait: bool = False, each: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of decode steps; `each` is called after one."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5] * PROMPT] * rows, mx.int32), cache=caches))
    steps = []
    for _ in range(WARM + STEPS):
        begin = time.perf_counter()
        mx.eval(model(mx.array([[7]] * rows, mx.int32), cache=caches))
        if wait:
            # The ranks of a pipeline have to wait for the token, or they would run ahead.
            mx.eval(mx.distributed.all_sum(mx.ones((1,))))
        steps.append(time.perf_counter() - begin)
        each()
    return steps[WARM:]


def _timed(mx: Any, model: Any, rows: int, found: dict[str, Any]) -> None:
    """How much of a step is spent in sums; to look at each makes the step a little longer."""
    from millrace.models import splitting

    waits: list[float] = []
    spent: list[tuple[float, int]] = []

    def timed(layer: Any, x: Any) -> Any:
        own = layer.inner(x)
        mx.eval(own)
        begin = time.perf_counter()
        y = mx.distributed.all_sum(own, group=layer._group)
        mx.eval(y)
        waits.append(time.perf_counter() - begin)
        return y + layer["bias"] if "bias" in layer else y

    def each() -> None:
        spent.append((sum(waits), len(waits)))
        waits.clear()

    before, splitting.SummedLinear.__call__ = splitting.SummedLinear.__call__, timed
    found["timed"] = 1e3 * statistics.median(_steps(mx, model, rows, each=each))
    splitting.SummedLinear.__call__ = before
    found["waits"] = 1e3 * statistics.median(s for s, _ in spent[WARM:])
    found["sums"] = spent[-1][1]


def _apart(mx: Any, model: Any, rows: int, found: dict[str, Any]) -> None:
    """Run a part without its sums, and note how long it takes from one to the next."""
    from millrace.models import splitting

    between: list[float] = []
    steps: list[list[float]] = []
    last = time.perf_counter()

    def alone(layer: Any, x: Any) -> Any:
        nonlocal last
        own = layer.inner(x)
        mx.eval(own)
        now = time.perf_counter()
        between.append(now - last)
        last = now
        return own + layer["bias"] if "bias" in layer else own

    def each() -> None:
        nonlocal last
        steps.append(list(between))
        between.clear()
        last = time.perf_counter()

    splitting.SummedLinear.__call__ = alone
    found["step"] = 1e3 * statistics.median(_steps(mx, model, rows, each=each))
    found["between"] = steps[WARM:]


def _bare(mx: Any, rows: int, width: int) -> float:
    x = mx.ones((rows, 1, width))
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        mx.eval(mx.distributed.all_sum(x))
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def _way(mx: Any, rank: int) -> tuple[float, float]:
    """Seconds that a small message takes from one rank to the next, and bytes a second of a large one."""
    small, large = mx.zeros((16,)), mx.zeros((1 << 20,))
    mx.eval(small, large)
    times = []
    for x in (small, large):
        trips = []
        for _ in range(20):
            begin = time.perf_counter()
            if rank == 0:
                mx.eval(mx.distributed.send(x, 1))
                mx.eval(mx.distributed.recv_like(x, 1))
            elif rank == 1:
                mx.eval(mx.distributed.recv_like(x, 0))
                mx.eval(mx.distributed.send(x, 0))
            trips.append(time.perf_counter() - begin)
        times.append(statistics.median(trips) / 2)
    return times[0], large.nbytes / max(1e-9, times[1] - times[0])


def _make(folder: Path) -> None:
    """A random model; nothing reads its text."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.utils import quantize_model

    folder.mkdir(parents=True)
    plain = {name: value for name, value in SHAPE.items() if name != "quantization"}
    model = Model(ModelArgs.from_dict(plain))
    model.set_dtype(mx.bfloat16)
    how = SHAPE["quantization"]
    model, settings = quantize_model(model, dict(plain), how["group_size"], how["bits"])
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings))


def _peak() -> int:
    import resource

    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // scale


if __name__ == "__main__":
    main()
