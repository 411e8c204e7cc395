"""Time from `millrace serve` to the first answered request, over a plain script's load time.

The script imports mlx_lm and loads the same model folder, and does nothing else. Rounds of the two
alternate; the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from common import Child, child, default_model, free_port, warn_if_busy
from rich.console import Console
from rich.table import Table

from millrace.errors import MillraceError, SetupError

TOKENS = 8
AT_MOST = 1.5
_PLAIN = "import sys, mlx_lm; mlx_lm.load(sys.argv[1])"
_PATIENCE = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    try:
        folder = options.model or default_model()
        ours, plain = _measure(folder, options.model, options.rounds)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, ours, plain)
    if options.json:
        options.json.write_text(json.dumps({"millrace_s": ours, "plain_s": plain}) + "\n")


def _measure(folder: Path, given: Path | None, rounds: int) -> tuple[list[float], list[float]]:
    """Both in turn; one of each comes first, unmeasured, to fill the machine's file cache."""
    ours, plain = [], []
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as logs:
        for _ in range(rounds + 1):
            plain.append(_time_plain(folder))
            ours.append(_time_serve(given, Path(logs)))
    return ours[1:], plain[1:]


def _time_plain(folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _PLAIN, str(folder)], check=True, capture_output=True)
    return time.perf_counter() - start


def _time_serve(given: Path | None, logs: Path) -> float:
    port = free_port()
    model = [str(given)] if given else []
    command = [sys.executable, "-m", "millrace", "serve", *model, "--port", str(port)]
    start = time.perf_counter()
    with child("millrace", command, logs=logs, port=port) as server:
        _first_answer(server, start + _PATIENCE)
        return time.perf_counter() - start


def _first_answer(server: Child, deadline: float) -> None:
    """Asks again until an answer comes: before that the port is closed, or says 503."""
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=_PATIENCE) as http:
        while time.perf_counter() < deadline:
            if server.process.poll() is not None:
                raise server.failed(f"ended with status {server.process.returncode}.")
            try:
                answer = http.post(f"{server.url}/v1/completions", json=body)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if answer.status_code == 200:
                generated = answer.json()["usage"]["completion_tokens"]
                if generated != TOKENS:
                    raise SetupError(f"The first answer has {generated} tokens, not {TOKENS}.")
                return
            if answer.status_code != 503:
                raise server.failed(f"HTTP {answer.status_code}: {answer.text}")
            time.sleep(0.02)
    raise server.failed(f"no answer within {_PATIENCE:.0f} s.")


def _report(console: Console, ours: list[float], plain: list[float]) -> None:
    table = Table(title="Start to first answer, seconds", title_justify="left")
    for name in ("", "median", "least", "most"):
        table.add_column(name, justify="right" if name else "left")
    rows = {
        f"millrace serve, first {TOKENS} tokens answered": ours,
        "plain script: import mlx_lm, load": plain,
    }
    for name, times in rows.items():
        values = (statistics.median(times), min(times), max(times))
        table.add_row(name, *(f"{value:.2f}" for value in values))
    console.print(table)
    ratio = statistics.median(ours) / statistics.median(plain)
    word = "[green]PASS[/]" if ratio <= AT_MOST else "[red]FAIL[/]"
    console.print(f"{word} ratio {ratio:.2f} (at most {AT_MOST:g})", highlight=False)


if __name__ == "__main__":
    main()
