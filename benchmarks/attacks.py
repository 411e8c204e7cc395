"""First tokens and gaps of one caller while another caller attacks the server.

The neighbour runs two streams and asks short chats one after the other, first alone and then beside each
attack, with a key of its own. The attacker's requests come from another process, again and again. For every
attack the table has the neighbour's first token (p50 and longest), the p99 gap of its streams, and the
longest answer of /health, alone and beside.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from common import Child, child, default_model, free_port, wait_healthy, warn_if_busy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from millrace.bench.stats import percentile
from millrace.errors import MillraceError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

NEIGHBOUR, ATTACKER = "sk-neighbour", "sk-attacker"
STREAMS = 2
_ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@dataclass
class Seen:
    """What the neighbour saw for a while."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    refused: int = 0


@dataclass
class Attack:
    """Requests that are sent at a time, again and again."""

    method: str
    path: str
    body: bytes
    clients: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="attacks with such a word")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-attacks-") as folder:
            found = _run(options, console, Path(folder))
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, found)
    if options.json:
        options.json.write_text(
            json.dumps({n: (asdict(a), asdict(b)) for n, (a, b) in found.items()}) + "\n"
        )


def _run(
    options: argparse.Namespace, console: Console, folder: Path
) -> dict[str, tuple[Seen, Seen]]:
    model = default_model()
    endless = folder / "endless"
    shutil.copytree(model, endless, copy_function=_linked)
    (endless / "chat_template.jinja").write_text(_ENDLESS)
    pictures = _vision_model(folder / "pictures")
    config = folder / "models.toml"
    config.write_text(
        f'[models.endless]\nmodel = "{endless}"\n[models.pictures]\nmodel = "{pictures}"\n'
    )
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", str(model), "--name", "default_model"]
    command += ["--config", str(config), "--only", "--cache-disk", "0", "--port", str(port)]
    command += ["--api-key", NEIGHBOUR, "--api-key", ATTACKER]
    command += ["--store", str(folder / "responses.sqlite")]
    with child("millrace", command, logs=folder, env={}, port=port) as server:
        wait_healthy(server)
        return asyncio.run(_measure(server, options, console))


def _linked(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())


def _vision_model(folder: Path) -> Path:
    import vision_models

    return vision_models.write("qwen2_vl", folder)


async def _measure(
    server: Child, options: argparse.Namespace, console: Console
) -> dict[str, tuple[Seen, Seen]]:
    found: dict[str, tuple[Seen, Seen]] = {}
    async with _client(server, NEIGHBOUR) as http:
        await _chat(http, Seen(), "warm-up")
        for name, attack in _attacks(await _conversation(server)).items():
            if options.only and not any(word in name for word in options.only):
                continue
            console.print(name, style="dim")
            async with _streams(http) as arrivals:
                alone = await _watched(http, arrivals, options.seconds, name)
                async with _attacked(server, attack):
                    await asyncio.sleep(1.0)
                    beside = await _watched(http, arrivals, options.seconds, name + "!")
            found[name] = alone, beside
    return found


def _client(server: Child, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url,
        headers={"authorization": f"Bearer {key}"},
        timeout=300,
        limits=httpx.Limits(max_connections=None),
    )


async def _conversation(server: Child) -> str:
    """A long conversation of the attacker's; each request may add twenty items."""
    items = [{"role": "user", "content": "word"}] * 20
    async with _client(server, ATTACKER) as http:
        made = (await http.post("/v1/conversations", json={"items": items})).json()
        path = f"/v1/conversations/{made['id']}/items"
        for _ in range(100):
            await http.post(path, json={"items": items})
    return f"{path}?limit=100"


def _attacks(conversation: str) -> dict[str, Attack]:
    texts = {"text": ["a"] * 12_000, "sampling_params": {"max_new_tokens": 1}}
    most = {"text": ["a"] * 2_048, "sampling_params": {"max_new_tokens": 1}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    shown = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": _wide_png()}},
    ]
    picture = {
        "model": "pictures",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": shown}],
    }
    plain = {"model": "default_model"}
    schema = {"response_format": {"type": "json_schema", "json_schema": _schema()}}

    def post(path: str, body: object, clients: int) -> Attack:
        return Attack("POST", path, json.dumps(body).encode(), clients)

    return {
        "nothing": Attack("GET", "/health", b"", 0),
        "12,000 texts": post("/generate", texts, 2),
        "2,048 texts": post("/generate", most, 2),
        "a template that never ends": post("/v1/chat/completions", chat | {"model": "endless"}, 4),
        "24 large schemas": post("/v1/chat/completions", chat | plain | schema, 24),
        "20 wide pictures": post("/v1/chat/completions", picture, 20),
        "pages of a conversation": Attack("GET", conversation, b"", 8),
    }


def _schema() -> dict[str, object]:
    """About 156 KiB of properties with patterns, which takes seconds to compile."""
    properties = {
        f"property_{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 60 + 1}}}-[0-9]+-{i}$"}
        for i in range(1600)
    }
    return {
        "name": "large",
        "schema": {"type": "object", "properties": properties, "additionalProperties": False},
    }


def _wide_png() -> str:
    """32,000 by 2,000 pixels of one bit in some ten kilobytes."""
    width, height = 32_000, 2_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes(1 + width // 8) * height, 9)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


async def _watched(
    http: httpx.AsyncClient, arrivals: list[list[float]], seconds: float, name: str
) -> Seen:
    seen, begun = Seen(), time.perf_counter()
    tasks = [
        asyncio.create_task(_repeat(_health(http, seen))),
        asyncio.create_task(_chats(http, seen, name)),
    ]
    await asyncio.sleep(seconds)
    ended = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for times in arrivals:
        inside = [t for t in times if begun <= t <= ended] + [ended]
        seen.gaps += [late - soon for soon, late in pairwise(inside)]
    return seen


async def _repeat(once: AsyncIterator[None]) -> None:
    async for _ in once:
        await asyncio.sleep(0.1)


async def _health(http: httpx.AsyncClient, seen: Seen) -> AsyncIterator[None]:
    while True:
        begun = time.perf_counter()
        try:
            await http.get("/health")
        finally:
            seen.health.append(time.perf_counter() - begun)
        yield


async def _chats(http: httpx.AsyncClient, seen: Seen, name: str) -> None:
    number = 0
    while True:
        await _chat(http, seen, f"{name} {number}")
        number += 1
        await asyncio.sleep(0.2)


async def _chat(http: httpx.AsyncClient, seen: Seen, text: str) -> None:
    body = {
        "model": "default_model",
        "messages": [{"role": "user", "content": f"Say something about {text}."}],
        "max_tokens": 8,
        "stream": True,
    }
    begun = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                seen.refused += 1
                return
            async for line in response.aiter_lines():
                if line.startswith("data:") and '"content":' in line:
                    seen.first.append(time.perf_counter() - begun)
                    return
    except asyncio.CancelledError:
        seen.first.append(time.perf_counter() - begun)  # as far as it has come
        raise


@contextlib.asynccontextmanager
async def _streams(http: httpx.AsyncClient) -> AsyncIterator[list[list[float]]]:
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    tasks = [asyncio.create_task(_read(http, i, times)) for i, times in enumerate(arrivals)]
    while not all(arrivals):
        await asyncio.sleep(0.01)
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(http: httpx.AsyncClient, number: int, times: list[float]) -> None:
    body = {
        "model": "default_model",
        "prompt": f"Story number {number}:",
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter())


_SENDER = """
import http.client, json, sys, threading, time, urllib.parse
url, method, path, clients, key = sys.argv[1:6]
body, place = sys.stdin.buffer.read(), urllib.parse.urlsplit(url)
head = {"content-type": "application/json", "authorization": "Bearer " + key}
def send():
    while True:
        try:
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=300)
            connection.request(method, path, body or None, head)
            connection.getresponse().read()
            connection.close()
        except OSError:
            pass
        time.sleep(0.2)
for _ in range(int(clients)):
    threading.Thread(target=send, daemon=True).start()
threading.Event().wait()
"""


@contextlib.asynccontextmanager
async def _attacked(server: Child, attack: Attack) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SENDER,
        server.url, attack.method, attack.path, str(attack.clients), ATTACKER,
        stdin=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(attack.body)
    process.stdin.close()
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def _report(console: Console, found: dict[str, tuple[Seen, Seen]]) -> None:
    table = Table(title="A neighbour alone and beside", title_justify="left", box=SIMPLE)
    table.add_column("")
    for name in (
        "first token p50, s",
        "longest, s",
        "p99 gap, ms",
        "longest /health, s",
        "refused",
    ):
        table.add_column(name, justify="right")
    for name, (alone, beside) in found.items():
        table.add_row(
            name,
            *(
                f"{one} → {other}"
                for one, other in zip(_figures(alone), _figures(beside), strict=True)
            ),
            str(beside.refused),
        )
    console.print(table)


def _figures(seen: Seen) -> list[str]:
    first = sorted(seen.first) or [float("nan")]
    return [
        f"{percentile(first, 0.5):.2f}",
        f"{first[-1]:.2f}",
        f"{1000 * percentile(sorted(seen.gaps), 0.99):.0f}",
        f"{max(seen.health):.2f}",
    ]


if __name__ == "__main__":
    main()
