"""Pictures, and how tests show them to a server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from api.scrape import total
from conftest import Server
from pictures import encoded, painted, png

PICTURE = painted(120, 80)
PNG = encoded(PICTURE)
WEBP = encoded(PICTURE, "WEBP", lossless=True)
OTHER = png(120, 80, seed=2)
SHORT = {"max_tokens": 6, "temperature": 0}


def part(source: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source, **more}}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    texts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": role, "content": texts}


def chat(server: Server, *messages: dict[str, Any], **more: Any) -> Any:
    body = {"model": "sees", "messages": list(messages), **SHORT, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def encodings(server: Server) -> float:
    return total(server, "millrace_pictures_total", model="sees", kind="encoded")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def resident(server: Server) -> int:
    """Bytes that the front holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
