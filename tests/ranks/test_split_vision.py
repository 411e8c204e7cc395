"""Models that take pictures, on several ranks: token for token as on one, pictures in the prefix cache, and
the same answer when a rank is lost in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vision_models
from conftest import ROOT, Server, free_port
from pictures import data_uri, png
from split_models import LONG, ranks
from vision_kinds import ALL

pytestmark = LONG

DEEPER = 6
"""Layers of a text tower whose first ones, which see pictures, are fewer than half of them."""
MORE: dict[str, dict[str, Any]] = {
    "qwen3_vl with six layers": {"num_hidden_layers": DEEPER},
    "gemma4 with experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
SPLITS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "qwen2_vl": ({}, [("2", "tensor"), ("2", "pipeline")]),
    "qwen3_vl": ({"num_hidden_layers": DEEPER}, [("2", "tensor"), ("2", "pipeline")]),
    "gemma3": ({}, [("2", "auto")]),
    "gemma4, both ways": ({}, [("2", "auto")]),
    "smolvlm": (
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
        | {"intermediate_size": 96, "num_hidden_layers": 3},
        [("3", "tensor"), ("3", "pipeline")],
    ),
}


def test_every_familys_text_tower_gives_the_same_logits_in_two_parts(tmp_path: Path) -> None:
    for kind in ALL:
        (tmp_path / kind).mkdir()
        vision_models.write(kind, tmp_path / kind)
    for name, more in MORE.items():
        (tmp_path / name).mkdir()
        vision_models.write(name.partition(" with ")[0], tmp_path / name, **more)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    lines = [json.loads(line) for line in _two_ranks(tmp_path, hosts).splitlines()]
    apart = {(line["model"], line["how"]): line["apart"] for line in lines if "apart" in line}
    refused = {line["model"]: line["problem"] for line in lines if "problem" in line}
    assert {model for model, how in apart if how == "tensor"} == {*ALL, *MORE}
    assert max(apart.values()) < 1e-3, apart
    # Windows of several sizes, or layers that pictures are shown to on more than one rank.
    assert {r for r in refused if not r.startswith("gemma")} == {"qwen3_vl"}
    assert "different kinds of state" in refused["gemma3"]
    assert "on one rank" in refused["qwen3_vl"]


def _two_ranks(folder: Path, hosts: Path) -> str:
    script = Path(__file__).with_name("split_towers.py")
    environment = os.environ | {
        "MLX_HOSTFILE": str(hosts),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            env=environment | {"MLX_RANK": str(rank), "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    told = [each.communicate(timeout=300)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0]
    return told[0]


@pytest.mark.parametrize("kind", list(SPLITS))
def test_ranks_see_as_one_process_does(kind: str, tmp_path: Path) -> None:
    text, splits = SPLITS[kind]
    folder = tmp_path / "sees"
    folder.mkdir()
    vision_models.write(kind, folder, **text)
    bodies = _mixed(ALL[kind].text)
    whole = Server(str(folder)).wait_ready()
    expected = _nearly(_answers(whole, bodies))
    whole.stop()
    assert expected[1][0][0] != expected[2][0][0], "another picture is another answer"
    for count, how in splits:
        split = Server(str(folder), "--ranks", count, "--parallel", how).wait_ready()
        try:
            assert _answers(split, bodies) == expected
            _leave(split, bodies[3])
            assert _answers(split, bodies) == expected
            told = split.post("/generate", bodies[3]).json()["meta_info"]
            assert told["cached_tokens"] > told["prompt_tokens"] // 2, told
            assert split.status()["restarts"] == 0, split.log()
            shares = ranks(split)
            assert [r["state"] for r in shares] == ["ready"] * int(count)
            print(kind, how, [(r["weight_bytes"], r["peak_bytes"] >> 20) for r in shares])
            # The vision tower is on the first rank alone.
            if how == "tensor":
                assert all(r["weight_bytes"] < shares[0]["weight_bytes"] for r in shares[1:])
        finally:
            split.stop()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sees")
    vision_models.write("qwen2_5_vl", folder, num_hidden_layers=12)
    running = Server(str(folder), "--ranks", "2").wait_ready()
    yield running
    running.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_in_the_middle_of_a_pictures_answer_changes_nothing(
    split: Server, how: signal.Signals
) -> None:
    bodies = [_longer(body) for body in _mixed(ALL["qwen2_5_vl"].text)[:5]]
    expected = _answers(split, bodies)
    before = split.status()["restarts"]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(_answers(split, bodies)))
    asking.start()
    while not any(r["made_tokens"] > 3 for r in split.status()["requests"]):
        assert asking.is_alive(), "it was through before a rank could be lost"
        time.sleep(0.005)
    begin = time.monotonic()
    os.kill(ranks(split)[1]["pid"], how)
    while split.health()["status"] == "ready":
        time.sleep(0.02)
    noticed = time.monotonic() - begin
    asking.join(90)
    print(
        f"{how.name}: noticed after {noticed:.1f} s, answered after {time.monotonic() - begin:.1f} s"
    )
    assert found == expected
    split.restarted(before)


def test_pictures_are_shown_again_after_the_model_was_unloaded(split: Server) -> None:
    body = _mixed(ALL["qwen2_5_vl"].text)[3]
    expected = _answers(split, [body])
    assert split.post(f"/v1/models/{split.status()['name']}/unload", {}).status_code == 200
    assert _answers(split, [body]) == expected


def test_what_cannot_be_shown_is_refused_and_ranks_go_on(split: Server) -> None:
    body = _mixed(ALL["qwen2_5_vl"].text)[1]
    for image in ("data:image/png;base64,AAAA", data_uri(b"<svg/>", "image/svg+xml")):
        assert split.post("/generate", body | {"image_data": image}).status_code == 400
    assert _answers(split, [body])


def _mixed(place: str, tokens: int = 16) -> list[dict[str, Any]]:
    """Eight requests, with and without pictures."""
    first, second, third = (
        data_uri(png(*size, seed=seed)) for seed, size in enumerate(((64, 96), (120, 40), (56, 56)))
    )
    story = "Once upon a time there was a mill by the river. "

    def body(text: str, *images: str, **wishes: Any) -> dict[str, Any]:
        how = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True} | wishes
        shown = {"image_data": list(images)} if images else {}
        return {"text": text, "sampling_params": how, **shown}

    return [
        body(story),
        body(f"{place} is a", first),
        body(f"{place} is a", second),
        body(f"{story}{place} and {place}, then {place} or", first, second, third),
        body(f"{place} is a", first, temperature=1, sampling_seed=7),
        body(f"{place} and {place}", third, first, temperature=1, sampling_seed=9, top_k=30, n=2),
        body(f"{place}: ", second, regex="[a-f]{3,9}", ignore_eos=False),
        body(story * 3, temperature=1, sampling_seed=11) | {"return_logprob": True},
    ]


def _longer(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"sampling_params": body["sampling_params"] | {"max_new_tokens": 150}}


def _answers(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: _answer(server, body), bodies))


def _nearly(answers: list[Any]) -> list[Any]:
    """The same tokens, and nearly the same logprobs."""
    return [[(ids, pytest.approx(scores, abs=2e-3)) for ids, scores in a] for a in answers]


def _answer(server: Server, body: dict[str, Any]) -> Any:
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    told = response.json()
    found = []
    for each in told if isinstance(told, list) else [told]:
        scores = each["meta_info"].get("output_token_logprobs") or []
        found.append((each["output_ids"], [s[0] for s in scores]))
    return found


def _leave(server: Server, body: dict[str, Any]) -> None:
    """Ask, and go before the answer is there."""
    with server.http.stream("POST", "/generate", json=_longer(body) | {"stream": True}) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number > 3:
                return
