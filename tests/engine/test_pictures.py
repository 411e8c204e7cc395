"""Pictures in requests, as far as the engine goes: refused by models that take none."""

from __future__ import annotations

from engine.harness import Bench
from tiny import build

from millrace.protocol import Choice, Picture, Sampling, Span, Submit, Tensor, encoder, to_engine

GREEDY = Sampling(temperature=0.0)


def test_a_text_model_refuses_a_picture_and_serves_the_others() -> None:
    bench = Bench(build("llama"))
    seen = Submit(1, [1, 2, 2, 3], [Choice(0, 0)], 4, GREEDY, media=[Span(1, 2, "ab")])
    bench.put(Picture("ab", {"pixel_values": Tensor("float32", (1,), b"\0\0\0\0")}))
    bench.run([seen, Submit(2, [1, 2, 3], [Choice(0, 0)], 4, GREEDY)])
    assert bench.failed[1].code == "invalid_request"
    assert "takes text only" in bench.failed[1].message
    assert len(bench.generated[2, 0]) == 4 and (1, 0) not in bench.generated


def test_pictures_and_their_places_cross_as_they_are() -> None:
    picture = Picture("ab", {"image_grid_thw": Tensor("int64", (1, 3), bytes(24))})
    request = Submit(7, [1, 2, 2, 3], [Choice(0, 0)], 4, media=[Span(1, 2, "ab", (1, 4, 2))])
    for message in (picture, request):
        assert to_engine.decode(encoder.encode(message)) == message
