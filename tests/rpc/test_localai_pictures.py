"""Pictures over LocalAI's protocol: the same answer as for the same picture over HTTP's own path."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import vision_models
from pictures import encoded, painted, png
from rpc.localai_backend import Backend, Client, refused, text_of
from vision_templates import QWEN2_VL

from millrace.rpc.localai import wire

PICTURE = painted(120, 80)


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


PNG, WEBP = _base64(encoded(PICTURE)), _base64(encoded(PICTURE, "WEBP", lossless=True))
OTHER = _base64(png(120, 80, seed=2))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = vision_models.write("qwen2_vl", tmp_path_factory.mktemp("vision") / "sees")
    (folder / "chat_template.jinja").write_text(QWEN2_VL)
    running = Backend("--as", "mlx-vlm").wait_up()
    loaded = running.load(str(folder), LimitImagePerPrompt=3)
    assert (loaded.success, loaded.message) == (True, "MLX-VLM model loaded successfully")
    yield running.client
    assert running.stop() == 0


def _asked(*images: str, **more: Any) -> dict[str, Any]:
    messages = [
        wire.Message(role="user", content="Hello"),
        wire.Message(role="assistant", content="Hi"),
        wire.Message(role="user", content="What is it?"),
    ]
    fields = {"Messages": messages, "UseTokenizerTemplate": True, "Tokens": 6, "IgnoreEOS": True}
    return fields | {"Images": images, "Logprobs": 1} | more


def test_a_picture_is_part_of_the_last_question(client: Client) -> None:
    text, first = client.Predict(**_asked()), client.Predict(**_asked(PNG))
    assert first.prompt_tokens > text.prompt_tokens
    assert first.prompt_tokens == client.TokenizeString(**_asked(PNG)).length
    again, streamed = client.Predict(**_asked(WEBP)), list(client.PredictStream(**_asked(PNG)))
    assert again.logprobs == first.logprobs != client.Predict(**_asked(OTHER)).logprobs
    assert text_of(streamed) == first.message.decode() and streamed[-1].tokens == first.tokens
    assert client.Predict(**_asked(PNG, OTHER)).prompt_tokens > first.prompt_tokens


def test_what_is_no_picture_or_has_no_place_is_refused(client: Client) -> None:
    for images in (["AAAA"], ["no base64!"], [""], ["http://127.0.0.1/a.png"], [PNG, "AAAA"]):
        code, text = refused(client.Predict, **_asked(*images))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "Images" in text
    only = [wire.Message(role="system", content="x")]
    code, text = refused(client.Predict, **_asked(PNG, Messages=only))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "user" in text
    code, text = refused(client.Predict, Prompt="No place for it", Images=[PNG])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, text = refused(client.Predict, **_asked(PNG, PNG, PNG, OTHER))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "loaded for 3" in text
    marker = client.ModelMetadata().media_marker
    assert marker == "<|image_pad|>"
    prompt = f"A picture: <|vision_start|>{marker}<|vision_end|> is"
    assert client.Predict(Prompt=prompt, Images=[PNG], Tokens=3, IgnoreEOS=True).tokens == 3
