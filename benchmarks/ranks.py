"""Step time of a model on one rank and on several of one machine, and the share that communication has.

    python benchmarks/ranks.py --ranks 1 2 3 --parallel auto

Every rank runs the same decode steps in a process of its own, without server or scheduler. The time of a
sum over ranks is measured where a split layer makes it, from when a rank has its own part to when it has
the sum: waiting for a slower rank counts. The bare sum of as many numbers is measured beside it, and what
docs/distributed.md's formula makes of the way between two ranks: the latency of a small message, and the
rate of a large one. Each rank's peak of memory is the largest of all.
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
from typing import Any

from millrace.config import EngineConfig, GroupConfig, RankHost, RankSeat
from millrace.distributed import environment
from millrace.models import blas, device
from millrace.models.resolve import resolve

PROMPT, STEPS, WARM = 64, 24, 4
COLUMNS = (
    *("ranks", "rows", "step ms", "sums and waiting ms", "share", "sums a step", "bare sum ms"),
    *("sum by formula ms", "latency µs", "rate MB/s", "peak MiB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--parallel", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=0, help="of each rank; a fair share if 0")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args)
        return
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for count in args.ranks:
        for found in _measured(args, count):
            print(_line(count, found), flush=True)


def _line(count: int, found: dict[str, Any]) -> str:
    step, waits = found["step"], found["waits"]
    cells: list[object] = [count, found["rows"], f"{step:.1f}"]
    if count == 1:
        cells += [""] * 7
    else:
        latency, rate = found["way"]
        message = found["bytes"] / count / rate
        formula = 2 * (count - 1) * (latency + message)
        cells += [f"{waits:.1f}", f"{waits / step:.0%}", found["sums"], f"{found['bare']:.2f}"]
        cells += [f"{1e3 * formula:.2f}", f"{1e6 * latency:.0f}", f"{rate / 1e6:.0f}"]
    return "| " + " | ".join(map(str, (*cells, found["peak"]))) + " |"


def _measured(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(s.getsockname()[1]) for s in held]
    for each in held:
        each.close()
    threads = args.threads or max(1, (os.cpu_count() or 1) // count)
    base = [sys.executable, __file__, "--parallel", args.parallel, "--ports", *ports]
    base += ["--rows", *map(str, args.rows), *(["--model", args.model] if args.model else [])]
    ranks = [
        subprocess.Popen(
            [*base, "--child", str(rank)],
            env=os.environ | {"OPENBLAS_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(count)
    ]
    told = [rank.communicate(timeout=600)[0] for rank in ranks]
    of_all: list[list[dict[str, Any]]] = [json.loads(text.splitlines()[-1]) for text in told]
    found = of_all[0]
    for each, *others in zip(*of_all, strict=True):
        each["peak"] = max(other["peak"] for other in (each, *others))
    return found


def _child(args: argparse.Namespace) -> None:
    size = len(args.ports)
    config = EngineConfig(model=str(resolve(args.model).path), name="model")
    if size > 1:
        hosts = tuple(RankHost(address="127.0.0.1", port=p, control=0) for p in args.ports)
        group = GroupConfig(hosts=hosts, parallel=args.parallel)
        seat = RankSeat(rank=args.child, turns=("", 0), secret="", alone=False)
        config = EngineConfig(model=config.model, name="model", group=group, seat=seat)
        environment.enter(group, args.child)
    device.before_import()
    blas.prepare()
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from millrace.models import splitting
    from millrace.models.load import load

    model = load(config).model
    environment.leave()
    waits: list[float] = []

    def timed(layer: Any, x: Any) -> Any:
        own = layer.inner(x)
        mx.eval(own)
        begin = time.perf_counter()
        y = mx.distributed.all_sum(own, group=layer._group)
        mx.eval(y)
        waits.append(time.perf_counter() - begin)
        return y + layer["bias"] if "bias" in layer else y

    splitting.SummedLinear.__call__ = timed
    way = _way(mx, args.child) if size > 1 else (0.0, 1.0)
    found = []
    for rows in args.rows:
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([[5] * PROMPT] * rows, mx.int32), cache=caches))
        steps, spent = [], []
        for _ in range(WARM + STEPS):
            waits.clear()
            begin = time.perf_counter()
            mx.eval(model(mx.array([[7]] * rows, mx.int32), cache=caches))
            if size > 1 and not waits:
                # The ranks of a pipeline have to wait for the token, or they would run ahead.
                mx.eval(mx.distributed.all_sum(mx.ones((1,))))
            steps.append(time.perf_counter() - begin)
            spent.append((sum(waits), len(waits)))
        width = 576 if size == 1 else _width(model)
        found.append(
            {
                "rows": rows,
                "step": 1e3 * statistics.median(steps[WARM:]),
                "waits": 1e3 * statistics.median(s for s, _ in spent[WARM:]),
                "sums": spent[-1][1],
                "bare": _bare(mx, rows, width) if size > 1 else 0.0,
                "bytes": 4 * rows * width,
                "way": way,
                "peak": _peak(),
            }
        )
    print(json.dumps(found), flush=True)


def _width(model: Any) -> int:
    return int(getattr(getattr(model, "args", None), "hidden_size", 576))


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


def _peak() -> int:
    import resource

    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // scale


if __name__ == "__main__":
    main()
