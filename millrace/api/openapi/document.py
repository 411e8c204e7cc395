"""The OpenAPI document, put together from the routes' descriptions and the wire types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi.routing import APIRoute

from millrace.api.bare_paths import BARE
from millrace.api.callers import is_limited
from millrace.api.errors import shape_of
from millrace.api.openapi.describe import RouteDescription, description_of
from millrace.api.openapi.errors import MEANINGS, TYPES
from millrace.api.openapi.examples import EXAMPLES
from millrace.api.openapi.fields import annotate
from millrace.api.origins import CHANGING
from millrace.serving import access
from millrace.version import __version__

_REF = "#/components/schemas/{name}"
_ID = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "An id of the client's own, by which the request can be cancelled.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
}
_ABOUT = (
    "One engine, every protocol. Streams are server-sent events unless said otherwise. A field "
    "that would change the answer and is not honoured is refused with a 400 that names it; fields "
    "that nobody knows are named in the response header `x-millrace-ignored`. OpenAI's endpoints "
    f"({', '.join(BARE)}) are served without `/v1` as well."
)
_ADMIN = "On a server with API keys, this needs one with the role `admin`."
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def build(routes: Iterable[APIRoute], *, keyed: bool) -> dict[str, Any]:
    """The document of these routes; `keyed` says whether this server wants a key."""
    described = [(r, d) for r in routes if (d := description_of(r.endpoint)) is not None]
    book = _Schemas([d for _, d in described])
    paths: dict[str, dict[str, Any]] = {}
    for route, description in described:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, method, description, book)
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "millrace", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": book.components, "securitySchemes": _SCHEMES},
        "security": [{"bearer": []}, {"key": []}, *([] if keyed else [{}])],
    }
    return document


class _Schemas:
    """Every type that is spoken of, once."""

    def __init__(self, descriptions: list[RouteDescription]) -> None:
        types = [t for d in descriptions for t in (d.body, d.answer, d.event, d.query)]
        named = [t for t in dict.fromkeys([*types, *TYPES.values()]) if t is not None]
        found = msgspec.json.schema_components(named, ref_template=_REF)
        annotate(found[1], named)
        schemas, self.components = _shortened(*found)
        self._known = dict(zip(named, schemas, strict=True))

    def of(self, type: Any) -> dict[str, Any]:
        return {"type": "object"} if type is None else self._known[type]

    def parameters(self, type: Any) -> list[dict[str, Any]]:
        """The fields of a struct as query parameters."""
        if type is None:
            return []
        schema = self.components[self._known[type]["$ref"].rpartition("/")[2]]
        required = schema.get("required", ())
        return [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in schema["properties"].items()
        ]


def _shortened(
    schemas: tuple[dict[str, Any], ...], components: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Types of one name in two protocols are told apart by the protocol, not by their module."""
    plain = {name: name.removeprefix("millrace.api.") for name in components}
    short = {k: re.sub(r"\..*\.", ".", name) for k, name in plain.items()}
    count = Counter(short.values())
    names = {k: name if count[name] == 1 else plain[k] for k, name in short.items()}

    def renamed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [renamed(v) for v in value]
        if not isinstance(value, dict):
            return value
        if isinstance(ref := value.get("$ref"), str):
            return value | {"$ref": _REF.format(name=names[ref.rpartition("/")[2]])}
        if "propertyName" in value and isinstance(mapping := value.get("mapping"), dict):
            whole = {k: _REF.format(name=names[v.rpartition("/")[2]]) for k, v in mapping.items()}
            value = value | {"mapping": whole}
        return {k: renamed(v) for k, v in value.items()}

    return renamed(schemas), {names[k]: renamed(v) for k, v in components.items()}


def _operation(
    route: APIRoute, method: str, description: RouteDescription, book: _Schemas
) -> dict[str, Any]:
    path = route.path_format
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "tags": [description.tag],
        "summary": description.summary,
        "parameters": _parameters(route, description, book),
        "responses": _responses(route, method, description, book),
    }
    if description.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": book.of(description.body)}}
        if path in EXAMPLES:
            content["application/json"]["example"] = EXAMPLES[path]
        operation["requestBody"] = {"required": description.needs_body, "content": content}
    if path in access.OPEN_PATHS:
        operation["security"] = []
    needed = access.HTTP.get((method, route.path), "admin")
    if needed == "admin":
        operation["description"] = _ADMIN
    return operation


def _parameters(
    route: APIRoute, description: RouteDescription, book: _Schemas
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    found += book.parameters(description.query)
    return [*found, _ID] if description.runs else found


def _responses(
    route: APIRoute, method: str, description: RouteDescription, book: _Schemas
) -> dict[str, Any]:
    path = route.path_format
    statuses = set(description.statuses)
    if path not in access.OPEN_PATHS:
        statuses.add(401)
    if method in CHANGING or access.HTTP.get((method, route.path), "admin") == "admin":
        statuses.add(403)
    if is_limited(method, path):
        statuses.add(429)
    found = {"200": _answer(description, book)}
    error = {"application/json": {"schema": book.of(TYPES.get(shape_of(path)))}}
    for status in sorted(statuses - {200}):
        response: dict[str, Any] = {"description": MEANINGS[status], "content": error}
        if status == 401:
            response["headers"] = _headers("www-authenticate")
        elif status == 429:
            response["headers"] = _headers("retry-after", *_LIMITS)
        found[str(status)] = response
    for status in description.alike:
        found[str(status)] = _answer(description, book) | {"description": MEANINGS[status]}
    return found


_LIMITS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


def _answer(description: RouteDescription, book: _Schemas) -> dict[str, Any]:
    schema = book.of(description.answer)
    if description.media != "application/json":
        schema = {"type": "string"}
    content: dict[str, Any] = {description.media: {"schema": schema}}
    if description.stream is not None:
        pieces: dict[str, Any] = {"schema": {"type": "string"}}
        if description.event is not None:
            pieces["x-event-schema"] = book.of(description.event)
        content[description.stream] = pieces
    answer: dict[str, Any] = {"description": MEANINGS[200], "content": content}
    if description.runs:
        answer["headers"] = _headers("x-request-id", "x-millrace-ignored", "x-millrace-stripped")
    return answer


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}} for name in names}
