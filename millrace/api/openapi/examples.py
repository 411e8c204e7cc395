"""Requests that work as they stand, for endpoints that take a body.

MODEL stands for the name of a model that makes text, EMBEDDER and RANKER for ones that make vectors and
scores; the page puts in those that the server has.
"""

from __future__ import annotations

from typing import Any

_ASK = [{"role": "user", "content": "What is the capital of France?"}]
_TEXTS = ["The capital of France is Paris.", "Whales are mammals."]
_QUERY = "What is the capital of France?"
_PDF = (
    "JVBERi0xLjQKMSAwIG9iajw8L1R5cGUvQ2F0YWxvZy9QYWdlcyAyIDAgUj4+CmVuZG9iagoyIDAgb2JqPDwvVHlwZS9QYWdl"
    "cy9LaWRzWzQgMCBSXS9Db3VudCAxPj4KZW5kb2JqCjMgMCBvYmo8PC9UeXBlL0ZvbnQvU3VidHlwZS9UeXBlMS9CYXNlRm9u"
    "dC9IZWx2ZXRpY2E+PgplbmRvYmoKNCAwIG9iajw8L1R5cGUvUGFnZS9QYXJlbnQgMiAwIFIvUmVzb3VyY2VzPDwvRm9udDw8"
    "L0YxIDMgMCBSPj4+Pi9Db250ZW50cyA1IDAgUj4+CmVuZG9iago1IDAgb2JqPDwvTGVuZ3RoIDU0Pj5zdHJlYW0KQlQgL0Yx"
    "IDEyIFRmIChBIG1pbGxyYWNlIGxlYWRzIHdhdGVyIHRvIGEgbWlsbC4pIFRqIEVUCmVuZHN0cmVhbQplbmRvYmoKeHJlZgow"
    "IDYKMDAwMDAwMDAwMCA2NTUzNSBmIAowMDAwMDAwMDA5IDAwMDAwIG4gCjAwMDAwMDAwNTMgMDAwMDAgbiAKMDAwMDAwMDEw"
    "MyAwMDAwMCBuIAowMDAwMDAwMTY1IDAwMDAwIG4gCjAwMDAwMDAyNTQgMDAwMDAgbiAKdHJhaWxlcjw8L1Jvb3QgMSAwIFIv"
    "U2l6ZSA2Pj4Kc3RhcnR4cmVmCjM1NAolJUVPRgo="
)
"""A page that says: A millrace leads water to a mill."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "MODEL", "messages": _ASK, "max_tokens": 64, "stream": True},
    "/v1/completions": {"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 32},
    "/v1/responses": {"model": "MODEL", "input": _QUERY, "max_output_tokens": 64, "store": False},
    "/v1/responses/input_tokens": {"model": "MODEL", "input": _QUERY},
    "/v1/responses/compact": {"model": "MODEL", "input": _QUERY},
    "/v1/conversations": {"metadata": {"topic": "geography"}},
    "/v1/messages": {"model": "MODEL", "messages": _ASK, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": _ASK},
    "/generate": {
        "model": "MODEL",
        "text": "Once upon a time",
        "sampling_params": {"max_new_tokens": 32},
    },
    "/tokenize": {"model": "MODEL", "prompt": "Once upon a time"},
    "/detokenize": {"model": "MODEL", "tokens": [1, 2, 3]},
    "/v1/embeddings": {"model": "EMBEDDER", "input": _TEXTS},
    "/embed": {"model": "EMBEDDER", "inputs": _TEXTS},
    "/rerank": {"model": "RANKER", "query": _QUERY, "documents": _TEXTS},
    "/v1/rerank": {"model": "RANKER", "query": _QUERY, "documents": _TEXTS},
    "/v2/rerank": {"model": "RANKER", "query": _QUERY, "documents": _TEXTS},
    "/score": {"model": "RANKER", "text_1": _QUERY, "text_2": _TEXTS},
    "/classify": {"model": "RANKER", "input": _TEXTS},
    "/pooling": {"model": "EMBEDDER", "input": _TEXTS},
    "/api/chat": {"model": "MODEL", "messages": _ASK, "options": {"num_predict": 64}},
    "/api/generate": {"model": "MODEL", "prompt": _QUERY, "options": {"num_predict": 64}},
    "/api/show": {"model": "MODEL"},
    "/api/pull": {"model": "smollm2"},
    "/api/embed": {"model": "EMBEDDER", "input": _TEXTS},
    "/api/embeddings": {"model": "EMBEDDER", "prompt": _TEXTS[0]},
    "/v1/cache/warm": {"model": "MODEL", "prompts": ["You are a helpful assistant."]},
    "/v1/files/text": {"filename": "mill.pdf", "file_data": f"data:application/pdf;base64,{_PDF}"},
    "/models/load": {"model": "MODEL"},
    "/models/unload": {"model": "MODEL"},
    "/v1/models/{name}/load": {"wait": False},
    "/v1/models/{name}/unload": {"wait": False},
    "/v1/models/{name}/pin": {"pin": True},
    "/v1/conversations/{id}": {"metadata": {"topic": "history"}},
    "/v1/conversations/{id}/items": {
        "items": [{"type": "message", "role": "user", "content": _QUERY}]
    },
    "/abort_request": {"rid": "the-id-of-a-request"},
}
EXAMPLES |= {
    f"/v1{path}": EXAMPLES[path]
    for path in ("/tokenize", "/detokenize", "/score", "/classify", "/pooling")
}
