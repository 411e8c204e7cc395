"""Videos as sampled frames: animations are shown to models that take them, all else is refused in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vision_models
from conftest import Server
from pictures import animated, data_uri, painted, png
from vision_templates import QWEN2_VL

from behaviours.showing import chat, encodings, said

FILM = animated("WEBP", [painted(112, 112, seed=n) for n in range(30)])
OTHER = animated("WEBP", [painted(112, 112, seed=n) for n in (0, *range(40, 69))])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = vision_models.write("qwen2_5_vl", tmp_path_factory.mktemp("vision"))
    (folder / "chat_template.jinja").write_text(QWEN2_VL)
    made = Server(f"sees={folder}")
    yield made.wait_ready()
    made.stop()


def video(source: str) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": source}}


def test_a_video_is_seen_by_its_frames_and_encoded_once(server: Server) -> None:
    before = encodings(server)
    film = said(video(data_uri(FILM, "image/webp")), "What happens?")
    one, again, other = (
        chat(server, message, logprobs=True)
        for message in (film, film, said(video(data_uri(OTHER, "image/webp")), "What happens?"))
    )
    assert one["choices"] == again["choices"]
    assert one["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
    still = chat(server, said({"type": "image_url", "image_url": data_uri(FILM)}, "What happens?"))
    assert one["usage"]["prompt_tokens"] > still["usage"]["prompt_tokens"]
    assert encodings(server) - before == 3
    counted = server.post("/tokenize", {"model": "sees", "messages": [film]}).json()
    assert counted["count"] == one["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (data_uri(png()), "does not move"),
        (data_uri(b"\0\0\0\x20ftypisom" + bytes(200), "video/mp4"), "have to be decoded"),
        (data_uri(b"\x1a\x45\xdf\xa3" + bytes(200), "video/webm"), "have to be decoded"),
        (data_uri(FILM[: len(FILM) // 2], "image/webp"), "broken"),
        ("http://127.0.0.1/film.gif", "public internet"),
    ],
)
def test_what_is_no_animation_is_refused(server: Server, source: str, why: str) -> None:
    body = {"model": "sees", "messages": [said(video(source), "?")], "max_tokens": 3}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


def test_models_say_that_they_take_videos(server: Server) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image", "video"]
