"""POST /v1/files/text over HTTP."""

from __future__ import annotations

import base64

import pdfs
from conftest import Server


def _data(content: bytes) -> str:
    return "data:application/pdf;base64," + base64.b64encode(content).decode()


def test_the_text_of_a_pdf_is_returned(server: Server) -> None:
    body = {"filename": "mill.pdf", "file_data": _data(pdfs.pdf(["The wheel", "The race"]))}
    answer = server.post("/v1/files/text", body)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "file.text", "filename": "mill.pdf", "text": "The wheel\n\nThe race",
        "pages": 2, "pages_read": 2, "truncated": False,
    }  # fmt: skip


def test_what_is_no_readable_pdf_is_refused(server: Server) -> None:
    for content, reason in (
        (pdfs.locked(), "password"),
        (pdfs.without_text(), "pictures"),
        (pdfs.bomb(), "cannot be read"),
        (b"plain text", "not a PDF"),
    ):
        answer = server.post("/v1/files/text", {"file_data": _data(content)})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_file")
        assert (error["param"], reason in error["message"]) == ("file_data", True), error
    assert server.health()["status"] == "ready"


def test_fields_are_checked(server: Server) -> None:
    for body, named in (({}, "file_data"), ({"file_data": 1}, "file_data")):
        answer = server.post("/v1/files/text", body)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    unknown = server.post("/v1/files/text", {"file_data": "", "language": "en"})
    assert unknown.status_code == 400 and "language" in unknown.json()["error"]["message"]
    large = server.post("/v1/files/text", {"file_data": "A" * (29 << 20)})
    assert large.status_code == 400 and "21 MB" in large.json()["error"]["message"]
