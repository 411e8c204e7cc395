"""The description of the API: complete, valid, and true, which random requests put to the test.

`make test-fuzz` runs thousands of them (MILLRACE_FUZZ); the normal run a sample that is always the
same.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from api import tiny_folder
from conftest import Server
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from models import encoder_folders

from millrace.api.app import create_app
from millrace.api.context import Context
from millrace.api.openapi.describe import description_of
from millrace.api.openapi.document import build
from millrace.api.openapi.routing import flat
from millrace.config import EngineConfig, ServeConfig
from millrace.serving.access import OPEN_PATHS
from millrace.serving.catalogue import Catalogue
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry

CASES = int(os.environ.get("MILLRACE_FUZZ", "0"))
"""Random requests over all endpoints; 0 takes a small sample."""
SAMPLE = 1
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def app() -> Any:
    config = ServeConfig(engine=EngineConfig(model="none", name="none"))
    metrics = Metrics()
    launcher = ModelLauncher(Workplace(), metrics, idle=1.0, max_queue=1)
    registry = Registry(Catalogue([]), launcher, metrics)
    return create_app(Context(registry, config, metrics))


@pytest.fixture(scope="module")
def document(app: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(build(flat(app.routes), keyed=False))))


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_described(app: Any) -> None:
    missing = [(r.path, r.methods) for r in flat(app.routes) if description_of(r.endpoint) is None]
    assert missing == []


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document)):
        assert name in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [o["operationId"] for _, _, o in _operations(document)]
    assert len(ids) == len(set(ids))


def test_errors_have_their_protocols_shape(document: dict[str, Any]) -> None:
    def shape(path: str, status: str) -> str:
        content = document["paths"][path]["post"]["responses"][status]["content"]
        return str(content["application/json"]["schema"]["$ref"]).rpartition("/")[2]

    assert shape("/v1/chat/completions", "400") == "OpenAIError"
    assert shape("/v1/messages", "429") == "AnthropicError"
    assert shape("/api/chat", "404") == "OllamaError"


def test_keys_and_limits_are_told(app: Any, document: dict[str, Any]) -> None:
    for path, _, operation in _operations(document):
        is_open = path in OPEN_PATHS
        assert ("401" in operation["responses"]) != is_open, path
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "499", "503", "504"} <= set(chat["responses"])
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {} in document["security"]
    assert {} not in build(flat(app.routes), keyed=True)["security"]


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page.text)


def test_fields_are_described_and_examples_are_valid(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["timeout"]["description"] == "Seconds until the request ends with an error."
    for path, _, operation in _operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in body:
            _validator(document, body["schema"]).validate(body["example"])
        elif operation.get("requestBody", {}).get("required"):
            assert path in NO_EXAMPLE, path


def test_every_field_of_a_request_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    bare = set()
    for _, _, operation in _operations(document):
        content = operation.get("requestBody", {}).get("content", {})
        ref = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        fields = schemas.get(ref.rpartition("/")[2], {}).get("properties", {})
        bare |= {(ref, name) for name, field in fields.items() if "description" not in field}
    assert bare == set()


NO_EXAMPLE = {
    "/api/delete",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""What takes something away, or needs something of the reader's own."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    """A tiny model with a tiny window, in a home of its own: nothing real can be deleted."""
    home = tmp_path_factory.mktemp("fuzz")
    model = tiny_folder.make(home / "tiny", default_model)
    places = {"MILLRACE_HOME": str(home / "home"), "HF_HOME": str(home / "hub")}
    running = Server(
        str(model), "--name", "tiny", "--context", "48", "--max-body", "200000",
        env=places | {"HF_HUB_OFFLINE": "1"},
    ).wait_ready()  # fmt: skip
    yield running
    running.stop()


def _validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


def _held(document: dict[str, Any], operation: dict[str, Any], response: httpx.Response) -> None:
    """A response is one of those that the description knows."""
    status, text = response.status_code, response.text
    assert status != 500, text
    described = operation["responses"].get(str(status))
    assert described is not None, f"{status} is not documented: {text[:500]}"
    media = response.headers.get("content-type", "").partition(";")[0]
    assert media in described["content"], f"{status} with {media}"
    if media == "application/json" and response.content:
        _validator(document, described["content"][media]["schema"]).validate(response.json())
    elif media == "text/event-stream":
        _check_events(document, described["content"][media], text)


def _check_events(document: dict[str, Any], described: dict[str, Any], text: str) -> None:
    lines = [x.removeprefix("data: ") for x in text.splitlines() if x.startswith("data: ")]
    assert lines, "a stream without an event"
    schema = described.get("x-event-schema")
    for line in lines:
        value = None if line == "[DONE]" else json.loads(line)
        if value is not None and schema and "error" not in value:
            _validator(document, schema).validate(value)


CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
RAW: dict[str, Any] = {"prompt": "Once", "max_tokens": 3}
GENERATE: dict[str, Any] = {"text": ["Once", "A"], "sampling_params": {"max_new_tokens": 3}}
KNOWN = [
    ("/v1/chat/completions", "post", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", "post", CHAT | {"stream": True, "logprobs": True}),
    ("/v1/chat/completions", "post", CHAT | {"stop": "e", "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", "post", {"messages": []}),
    ("/v1/completions", "post", RAW | {"logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ("/v1/completions", "post", RAW | {"stream": True, "logprobs": 0}),
    ("/v1/completions", "post", RAW | {"model": "nope"}),
    ("/v1/completions", "post", RAW | {"timeout": 1e-6}),
    ("/v1/messages", "post", CHAT | {"model": "tiny"}),
    ("/v1/messages", "post", CHAT | {"model": "tiny", "stream": True}),
    ("/v1/messages/count_tokens", "post", {"messages": HELLO}),
    ("/v1/responses", "post", {"input": "hi", "max_output_tokens": 16}),
    ("/v1/responses", "post", {"input": "hi", "max_output_tokens": 16, "stream": True}),
    ("/generate", "post", {"text": "Once", "sampling_params": {"max_new_tokens": 3}}),
    ("/generate", "put", {"text": "Once", "sampling_params": {"max_new_tokens": 3, "n": 2}}),
    ("/generate", "post", {"text": ["Once", "A"], "sampling_params": {"stop": "e"}, "stream": True}),
    ("/generate", "post", GENERATE | {"return_logprob": True, "logprob_start_len": 0}),
    ("/generate", "post", GENERATE | {"return_logprob": True, "logprob_start_len": 0, "stream": True,
                                      "top_logprobs_num": 2, "return_text_in_logprobs": True}),
    ("/api/chat", "post", {"model": "tiny", "messages": HELLO, "options": {"num_predict": 3}}),
    ("/api/tags", "get", None),
    ("/v1/models", "get", None),
    ("/v1/status", "get", None),
    ("/health", "get", None),
    ("/metrics", "get", None),
    ("/", "get", None),
]  # fmt: skip


ENCODED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 32}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": []}),
    ("/embed", {"inputs": ["a", "b"], "truncate": True}),
    ("/embed", {"inputs": 7}),
    ("/pooling", {"input": ["a"]}),
    ("/pooling", {"input": ["a"], "task": "token_embed"}),
    ("/classify", {"input": ["a"]}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"], "return_documents": True}),
    ("/v2/rerank", {"query": "a", "texts": ["b", "c"], "return_text": True}),
    ("/api/embed", {"model": "tiny", "input": ["a", "b"]}),
    ("/api/embeddings", {"model": "tiny", "prompt": "a"}),
    ("/v1/chat/completions", CHAT),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = encoder_folders.encoder(tmp_path_factory.mktemp("encoder") / "tiny")
    running = Server(str(folder), "--name", "tiny", "--max-body", "200000").wait_ready()
    yield running
    running.stop()


@pytest.mark.parametrize(("path", "body"), ENCODED)
def test_encoders_answer_as_described(
    encoder: Server, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    response = encoder.post(path, body)
    _held(document, document["paths"][path]["post"], response)


@pytest.mark.parametrize(("path", "method", "body"), KNOWN)
def test_known_requests_are_answered_as_described(
    target: Server, document: dict[str, Any], path: str, method: str, body: dict[str, Any] | None
) -> None:
    response = target.http.request(method, path, json=body, timeout=60)
    _held(document, document["paths"][path][method], response)


def test_the_server_serves_this_description(target: Server, document: dict[str, Any]) -> None:
    assert target.http.get("/openapi.json").json() == document


SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"model": "tiny"},
    "/v1/completions": RAW | {"model": "tiny"},
    "/v1/messages": CHAT | {"model": "tiny"},
    "/v1/messages/count_tokens": {"messages": HELLO, "model": "tiny"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3, "model": "tiny"},
    "/v1/responses/input_tokens": {"input": "hi", "model": "tiny"},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "Once", "model": "tiny"},
    "/detokenize": {"tokens": [1, 2], "model": "tiny"},
    "/api/chat": {"model": "tiny", "messages": HELLO, "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": "Once", "options": {"num_predict": 3}},
    "/api/show": {"model": "tiny"},
    "/v1/embeddings": {"model": "tiny", "input": ["Once", "upon"]},
    "/embed": {"inputs": ["Once", "upon"]},
    "/pooling": {"input": "Once"},
    "/classify": {"input": "Once"},
    "/score": {"text_1": "Once", "text_2": ["upon", "a"]},
    "/rerank": {"query": "Once", "documents": ["upon", "a"]},
    "/api/embed": {"model": "tiny", "input": ["Once", "upon"]},
    "/api/embeddings": {"model": "tiny", "prompt": "Once"},
}
"""What a request needs to get past the first check."""


def _sounder(case: Any, dice: random.Random) -> None:
    """Some of what was made up, around what every request must have: it gets further in."""
    base = SOUND.get(case.operation.path)
    if base is not None and isinstance(case.body, dict) and dice.random() < 0.6:
        share = dice.choice([0.05, 0.1, 0.3])
        case.body = {k: v for k, v in case.body.items() if dice.random() < share} | base


def test_random_requests_are_answered_as_described(
    target: Server, document: dict[str, Any]
) -> None:
    _bombard(target, document, lambda path: not path.endswith("/stream"))  # those never end
    assert target.post("/v1/completions", RAW).status_code == 200


def test_random_requests_to_encoders_are_answered_as_described(
    encoder: Server, document: dict[str, Any]
) -> None:
    _bombard(encoder, document, {path for path, _ in ENCODED[:-1]}.__contains__)
    assert encoder.post("/v1/embeddings", {"input": "a"}).status_code == 200


def _bombard(target: Server, document: dict[str, Any], wanted: Callable[[str], bool]) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=target.url)
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [o for o in operations if wanted(o.path)]
    # What takes a body has more to go wrong, and gets three times as many.
    weights = [3 if operation.body else 1 for operation in operations]
    share = max(1, CASES // (2 * sum(weights))) if CASES else SAMPLE
    answers, faults = Counter[int](), list[Exception]()
    for operation, weight in zip(operations, weights, strict=True):
        described = document["paths"][operation.path][operation.method]
        for mode in schemathesis.GenerationMode:
            try:
                answers += _attempt(operation, mode, share * weight, document, described)
            except Exception as fault:  # the others are tried as well
                faults.append(fault)
    print(f"{answers.total()} requests over {len(operations)} operations: {dict(answers)}")
    if faults:
        raise ExceptionGroup(f"{len(faults)} endpoints fail", faults)
    assert target.health()["status"] == "ready"
    assert target.status()["restarts"] == 0


def _attempt(
    operation: Any, mode: Any, count: int, document: dict[str, Any], described: dict[str, Any]
) -> Counter[int]:
    """Random requests to one endpoint, valid or not; their statuses."""
    generated, dice = Counter[int](), random.Random(os.getpid() if CASES else 0)

    @seed(os.getpid() if CASES else 0)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        _sounder(case, dice)
        answer = case.call(timeout=60)
        generated[answer.status_code] += 1
        response = httpx.Response(
            answer.status_code,
            headers=[(name, value) for name, values in answer.headers.items() for value in values],
            content=answer.content,
        )
        try:
            _held(document, described, response)
        except (AssertionError, jsonschema.ValidationError) as error:
            error.add_note(case.as_curl_command())
            raise

    try:
        attempt()
    except Unsatisfiable:  # nothing about it can be wrong
        pass
    return generated
