"""A model split over processes of one machine, through HTTP: the same answers as from one process, and what
becomes of them when a rank dies. Longer runs are behind `make test-ranks` (tests/ranks)."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import PATIENCE, Server, until
from split_models import abandon, answers, mixed, ranks, write

from millrace.cli.rank_options import disk, group_of
from millrace.config import AdapterConfig, EngineConfig
from millrace.errors import ModelError, SetupError
from millrace.serving.catalogue import ModelSpec
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.ranks.group import RankGroup
from millrace.serving.ranks.versions import here, others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Any]:
    """What one process answers."""
    whole = Server(folder).wait_ready()
    try:
        assert "ranks" not in whole.status()
        return answers(whole, mixed())
    finally:
        whole.stop()


@pytest.fixture(scope="module")
def split(folder: str) -> Iterator[Server]:
    running = Server(folder, "--ranks", "2").wait_ready()
    yield running
    running.stop()


def test_two_ranks_answer_as_one_process_does(split: Server, expected: list[Any]) -> None:
    assert answers(split, mixed()) == expected
    abandon(split)
    again = answers(split, mixed())
    assert again == expected
    usage = split.post("/v1/completions", mixed()[0]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert [r["state"] for r in ranks(split)] == ["ready", "ready"]
    assert split.health()["ranks"] == {"qwen3": ["ready", "ready"]}
    # Its state was compared with the first rank's, and nobody has left the group.
    assert until(
        lambda: ranks(split)[1]["checks"] >= 1 or not split.post("/v1/completions", mixed()[0])
    )
    assert split.status()["restarts"] == 0


def test_a_rank_that_is_killed_comes_back_and_the_answer_goes_on(
    split: Server, expected: list[Any]
) -> None:
    body = mixed()[0] | {"max_tokens": 150, "ignore_eos": True}
    whole = answers(split, [body])
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(answers(split, [body])))
    asking.start()
    # A busy machine may be through with it before it is seen: then an idle rank is killed.
    until(
        lambda: (
            not asking.is_alive() or any(r["made_tokens"] > 5 for r in split.status()["requests"])
        )
    )
    os.kill(ranks(split)[1]["pid"], signal.SIGKILL)
    asking.join(PATIENCE)
    assert found == whole
    split.restarted()
    assert split.status()["restarts"] == 1
    assert "rank 1" in split.log() and "signal 9" in split.log()
    assert answers(split, mixed()) == expected


def test_what_was_on_disk_is_found_after_a_restart(folder: str, tmp_path: Path) -> None:
    args = (folder, "--ranks", "2", "--cache-disk", "64M", "--cache-dir", str(tmp_path))
    body = mixed()[2] | {"temperature": 0}
    first = Server(*args).wait_ready()
    expected = answers(first, [body])
    first.stop()
    assert "its state was found the same" in first.log()
    second = Server(*args).wait_ready()
    try:
        response = second.post("/v1/completions", body).json()
        usage = response["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        assert response["choices"][0]["text"] == expected[0][0][0]
        assert second.status()["restarts"] == 0
    finally:
        second.stop()


def test_adapters_are_refused_while_it_runs(split: Server, tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": str(tmp_path)}
    response = split.post("/v1/load_lora_adapter", body)
    assert response.status_code == 400 and "takes no adapters" in response.text


def test_a_model_that_cannot_be_split_says_why_and_what_would_work(folder: str) -> None:
    command = [sys.executable, "-m", "millrace", "serve", folder, "--only", "--port", "0"]
    ended = subprocess.run(
        [*command, "--ranks", "3"], capture_output=True, text=True, timeout=PATIENCE
    )
    told = " ".join(ended.stderr.split())
    assert ended.returncode == 1
    assert "error: The model cannot be split over 3 ranks" in told
    assert "4 attention heads cannot be divided by 3" in told and "with 2 ranks" in told


def test_ranks_that_run_other_versions_are_told_apart() -> None:
    assert others(here() | {"python": "3.99"}) == ""
    assert others(here() | {"mlx": "0.1"}).startswith("mlx 0.1 (here ")
    assert "missing" in others({})


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((0, None, "auto", None), "--ranks takes 1 to"),
        ((10**9, None, "auto", None), "--ranks takes 1 to"),
        ((None, None, "tensor", None), "need --ranks or --hostfile"),
        ((None, None, "auto", "ring"), "need --ranks or --hostfile"),
        ((2, "hosts.json", "auto", None), "choose one"),
        ((2, None, "sideways", None), "--parallel"),
        ((2, None, "auto", "jaccl"), "--hostfile"),
        ((None, "/nowhere.json", "auto", None), "cannot be read"),
    ],
)
def test_options_that_contradict_each_other_are_refused(args: Any, told: str) -> None:
    with pytest.raises(SetupError, match=told):
        group_of(*args)


def test_what_a_split_model_cannot_have_is_refused_at_the_start(folder: str) -> None:
    group = group_of(2, None, "auto", None)
    assert group is not None and group_of(1, None, "auto", None) is None
    # Ranks on one machine share its disk.
    assert disk(group, "1G", None) == disk(None, "1G", None) // 2
    assert disk(group, "0", None) == 0
    config = EngineConfig(model=folder, name="x", group=group)
    for more, told in (
        ({"adapters": (AdapterConfig(name="a", path="/a"),)}, "takes no adapters"),
        ({"task": "embed"}, "makes numbers"),
    ):
        spec = ModelSpec(engine=msgspec.structs.replace(config, **more))
        launcher = ModelLauncher(Workplace(), Metrics(), idle=1, max_queue=1)
        with pytest.raises(SetupError, match=told):
            launcher.need(spec)


def test_every_start_of_a_group_has_a_secret_of_its_own(folder: str) -> None:
    group = group_of(3, None, "auto", None)
    config = EngineConfig(model=folder, name="x", group=group)
    made = RankGroup(config)
    first, second = made.seats(config), made.seats(config)
    assert len({c.seat.secret for c in first if c.seat}) == 1
    assert first[0].seat and second[0].seat and first[0].seat.secret != second[0].seat.secret
    assert [c.seat.rank for c in first if c.seat] == [0, 1, 2]
    assert all(not c.seat.alone for c in first if c.seat)
    assert len({h.port for h in (first[0].group or made.config).hosts}) == 3


def test_splits_are_chosen_by_what_the_model_offers() -> None:
    import tiny

    from millrace.models.splitting import choose, problem_of

    def of(shape: str, **more: Any) -> Any:
        return functools.partial(problem_of, tiny.build(shape), tiny.settings(shape, **more))

    assert choose(of("llama"), "auto", 2) == "tensor"
    assert choose(of("llama", num_key_value_heads=3), "auto", 2) == "pipeline"
    quantised = {"quantization": {"group_size": 64, "bits": 4}}
    assert choose(of("llama", **quantised), "auto", 2) == "pipeline"
    with pytest.raises(ModelError, match="What would work: --parallel tensor with 2 ranks"):
        choose(of("llama"), "auto", 3)
    with pytest.raises(ModelError, match="only be served from one machine"):
        choose(of("mamba2"), "auto", 2)
