"""Which role every HTTP route and every gRPC method needs: the one table, for both fronts.

`open` needs no key, `use` any key, and `admin` a key with that role. What changes the server for other
callers, or shows what they do, is for administrators. A route or method that is not listed is refused to
all but them; a test holds the table to the routes that there are. On a server without keys everything is
allowed.
"""

from __future__ import annotations

from typing import Literal

from millrace.errors import RoleNeeded
from millrace.serving.keys import Caller, Keys

Access = Literal["open", "use", "admin"]

_HTTP: dict[Access, tuple[str, ...]] = {
    "open": (
        "GET /",
        "GET /health",
        "GET /docs",
        "GET /openapi.json",
        "GET HEAD /web/{version}/{name}",
    ),
    "use": (
        # Answers, embeddings and scores.
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST PUT /generate",
        "POST /v1/embeddings",
        "POST /embed",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
        "POST /score",
        "POST /v1/score",
        "POST /classify",
        "POST /v1/classify",
        "POST /pooling",
        "POST /v1/pooling",
        "POST /tokenize",
        "POST /v1/tokenize",
        "POST /detokenize",
        "POST /v1/detokenize",
        "POST /v1/cache/warm",
        "POST /v1/files/text",
        # Ollama's, of which an empty prompt that unloads a model is refused by the route.
        "POST /api/chat",
        "POST /api/generate",
        "POST /api/embed",
        "POST /api/embeddings",
        "GET /api/version",
        "GET /api/tags",
        "GET /api/ps",
        "POST /api/show",
        # Stored responses and conversations, which belong to the key that made them.
        "POST /v1/responses",
        "POST /v1/responses/input_tokens",
        "POST /v1/responses/compact",
        "GET DELETE /v1/responses/{id}",
        "POST /v1/responses/{id}/cancel",
        "GET /v1/responses/{id}/input_items",
        "POST /v1/conversations",
        "GET POST DELETE /v1/conversations/{id}",
        "GET POST /v1/conversations/{id}/items",
        "GET DELETE /v1/conversations/{id}/items/{item}",
        # What there is to use, and figures of all callers together.
        "GET /v1/models",
        "GET /v1/models/{name:path}",
        "GET /v1/library",
        "GET /v1/key",
        "GET /v1/cache",
        "GET /metrics",
        "GET /model_info",
        "GET /get_model_info",
        "GET /server_info",
        "GET /get_server_info",
        # Requests: the routes show and cancel those of the caller's own key alone.
        "GET /v1/status",
        "GET /v1/status/stream",
        "GET /v1/requests",
        "DELETE /v1/requests/{id}",
        "POST /v1/requests/{id}/cancel",
        "POST /abort_request",
    ),
    "admin": (
        # Models.
        "POST /v1/models/{name:path}/load",
        "POST /v1/models/{name:path}/unload",
        "POST /v1/models/{name:path}/pin",
        "POST /models/load",
        "POST /models/unload",
        "POST /api/pull",
        "GET /v1/hub/search",
        "DELETE /api/delete",
        "POST /api/create",
        "POST /api/copy",
        "POST /api/push",
        "POST HEAD /api/blobs/{digest}",
        # Adapters.
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        # The prefix cache that all share.
        "DELETE /v1/cache",
        "GET POST /flush_cache",
        # The log, which has every caller's requests.
        "GET /v1/logs/stream",
    ),
}

_VLLM: dict[Access, tuple[str, ...]] = {
    "open": ("HealthCheck",),
    "use": (
        "Generate",
        "Embed",
        "GetModelInfo",
        "GetServerInfo",
        "GetTokenizer",
        "GetLoads",
        # The stream has the token ids of prompts for administrators alone.
        "SubscribeKvEvents",
        # Cancels requests of the caller's own key alone.
        "Abort",
    ),
    "admin": ("FlushCache", "StartProfile", "StopProfile"),
}
_MLX: dict[Access, tuple[str, ...]] = {
    "open": ("HealthCheck",),
    "use": ("Generate", "GetModelInfo", "GetServerInfo", "GetTokenizer", "Abort"),
}
_SMG = {"vllm.grpc.engine.VllmEngine": _VLLM, "mlx.grpc.engine.MlxEngine": _MLX}

_PUBLIC_RPC = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)

_LOCALAI = (
    "Health",
    "LoadModel",
    "Free",
    "Predict",
    "PredictStream",
    "Embedding",
    "Rerank",
    "Score",
    "TokenizeString",
    "Detokenize",
    "Status",
    "GetMetrics",
    "ModelMetadata",
)
"""A backend belongs to the one LocalAI that started it, whose token is an admin key."""


def _http() -> dict[tuple[str, str], Access]:
    found: dict[tuple[str, str], Access] = {}
    for access, routes in _HTTP.items():
        for *methods, path in (route.split() for route in routes):
            found |= {(method, path): access for method in methods}
    return found


def _rpc() -> dict[str, Access]:
    found: dict[str, Access] = dict.fromkeys(_PUBLIC_RPC, "open")
    for service, roles in _SMG.items():
        for access, methods in roles.items():
            found |= {f"/{service}/{method}": access for method in methods}
    return found | {f"/backend.Backend/{method}": "admin" for method in _LOCALAI}


HTTP = _http()
"""By method and the route's path, as the route is declared."""
RPC = _rpc()
"""By the method's full name, as it is called."""
OPEN_PATHS = frozenset(path for (_, path), access in HTTP.items() if access == "open")


def check(what: str, access: Access, caller: Caller | None, keys: Keys) -> None:
    """Raise that the caller's key has not the role that `what` needs."""
    if access == "admin" and keys and (caller is None or not caller.is_admin):
        raise needs_admin(what, keys)


def needs_admin(what: str, keys: Keys) -> RoleNeeded:
    others = (
        "Use a key that has it."
        if keys.has_admin
        else "No key of this server has it, so this is refused to everybody over the network; the "
        "millrace command on the server's machine still manages models."
    )
    return RoleNeeded(
        f"{what} needs an API key with the role 'admin', and this key has the role 'use'. {others} To "
        "give a key the role, start the server with it as --admin-key KEY or MILLRACE_ADMIN_KEY=KEY, or "
        "write its line in the --api-key-file as NAME[admin]:KEY."
    )
