"""Sending the page: HTML to whoever asks for it, and its files under a path that changes with them.

All files are read once. Nothing is fetched from elsewhere and nothing runs that is not one of them,
which the browser is told to see to.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.api.callers import PAGE_FILES
from millrace.errors import NotFound

_FOLDER = Path(__file__).parent
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Page:
    html: dict[str, bytes]
    files: dict[str, bytes]
    prefix: str
    """The path of the files, which is another one when any of them changes."""


@functools.cache
def page() -> Page:
    files = {f.name: f.read_bytes() for f in sorted(_FOLDER.iterdir()) if f.suffix in _TYPES}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    prefix = f"{PAGE_FILES}{digest.hexdigest()[:12]}"
    html = {}
    for file in _FOLDER.glob("*.html"):
        text = file.read_text("utf-8")
        needed = _modules(re.findall(r'src="@web/([^"]+\.js)"', text), files)
        # All modules are asked for at once, not as the browser comes upon each.
        links = (f'<link rel="modulepreload" href="@web/{name}">' for name in needed)
        html[file.name] = (
            text.replace("@preload", "\n".join(links)).replace("@web", prefix).encode()
        )
    return Page(html, files, prefix)


def _modules(names: list[str], files: dict[str, bytes]) -> list[str]:
    """These modules and all that they import, in the order in which they are come upon."""
    found = list(names)
    for name in found:
        imports = re.findall(r'^import [{*].* from "\./([^"]+)"', files[name].decode(), re.M)
        found += [module for module in dict.fromkeys(imports) if module not in found]
    return found


def as_html(name: str) -> Response:
    """One of the pages: `index.html`, or `docs.html`."""
    headers = _HEADERS | {
        "cache-control": "no-cache"
    }  # it names files that are gone with the next version
    return Response(page().html[name], media_type="text/html", headers=headers)


def wants_html(accept: str) -> bool:
    """Whether a client asks for HTML by name, and not for JSON rather. Any type at all is JSON."""
    wishes = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name in wishes:
            wishes[name] = max([wishes[name], _quality(parameters)])
    return wishes["text/html"] > 0 and wishes["text/html"] >= wishes["application/json"]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


async def file(http: Request) -> Response:
    found = page()
    name = http.path_params["name"]
    if f"{PAGE_FILES}{http.path_params['version']}" != found.prefix or name not in found.files:
        raise NotFound(f"There is no GET {http.url.path} here.")
    return Response(
        found.files[name],
        media_type=_TYPES[Path(name).suffix],
        headers=_HEADERS | {"cache-control": "public, max-age=31536000, immutable"},
    )


route = Route(PAGE_FILES + "{version}/{name}", file)
"""No part of the API: it is not described there."""
