"""Facts about the device, and limits that follow from them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millrace.models import blas, device
from millrace.models.device import GIB, MIB, Device


class FakeMlx(SimpleNamespace):
    """As much of mlx.core as device.py asks for, with the calls it made."""

    def __init__(self, backend: str, info: dict[str, Any]) -> None:
        gpu = SimpleNamespace(type="gpu" if backend != "cpu" else "cpu")
        self.calls: dict[str, int] = {}
        super().__init__(
            DeviceType=SimpleNamespace(gpu="gpu", cpu="cpu"),
            default_device=lambda: gpu,
            cuda=SimpleNamespace(is_available=lambda: backend == "cuda"),
            device_info=lambda: info,
            set_cache_limit=lambda n: self.calls.__setitem__("cache", n),
            set_wired_limit=lambda n: self.calls.__setitem__("wired", n),
        )


def test_metal_is_wired_to_the_recommended_size(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {
        "device_name": "Apple M4 Max",
        "memory_size": 64 * GIB,
        "max_recommended_working_set_size": 48 * GIB,
    }
    mx = FakeMlx("metal", info)
    monkeypatch.setattr(device, "core", lambda: mx)
    assert device.describe() == Device(
        kind="metal", name="Apple M4 Max", memory=64 * GIB, budget=48 * GIB
    )
    limits = device.configure()
    assert mx.calls == {"wired": 48 * GIB, "cache": 6 * GIB}
    assert (limits.wired, limits.cache) == (48 * GIB, 6 * GIB)


def test_a_refused_wired_limit_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = FakeMlx("metal", {"memory_size": GIB, "max_recommended_working_set_size": GIB})

    def refuse(_: int) -> None:
        raise ValueError("above the system's limit")

    mx.set_wired_limit = refuse
    monkeypatch.setattr(device, "core", lambda: mx)
    assert device.configure().wired is None


def test_cuda_keeps_a_tenth_free(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = FakeMlx("cuda", {"device_name": "NVIDIA H200", "total_memory": 140 * GIB})
    monkeypatch.setattr(device, "core", lambda: mx)
    found = device.describe()
    assert (found.kind, found.budget) == ("cuda", 126 * GIB)
    assert device.configure().wired is None
    assert mx.calls == {"cache": 8 * GIB}


def test_an_mlx_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = FakeMlx("cuda", {})
    del mx.device_info, mx.set_cache_limit
    monkeypatch.setattr(device, "core", lambda: mx)
    assert device.describe() == Device(kind="cuda", name="cuda", memory=0, budget=0)
    assert device.configure().cache is None


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize("budget", [0, 100 * MIB, GIB, 16 * GIB, 512 * GIB])
def test_the_cache_never_takes_most_of_the_budget(kind: device.Kind, budget: int) -> None:
    limit = device.cache_limit(Device(kind=kind, name="", memory=budget, budget=budget))
    assert 0 <= limit <= budget // 2
    assert limit <= 8 * GIB


@pytest.mark.parametrize(("given", "limit"), [(480 * MIB, 12 * MIB), (64 * GIB, None)])
def test_freed_buffers_are_small_beside_what_was_given(
    monkeypatch: pytest.MonkeyPatch, given: int, limit: int | None
) -> None:
    mx = FakeMlx("cpu", {})
    monkeypatch.setattr(device, "core", lambda: mx)
    monkeypatch.setattr(device, "host_memory", lambda: 16 * GIB)
    monkeypatch.setattr(device, "_return_large_buffers", lambda: None)
    device.bound_freed(given)
    assert mx.calls.get("cache") == limit


def test_freed_buffers_of_a_card_are_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = FakeMlx("cuda", {"total_memory": 140 * GIB})
    monkeypatch.setattr(device, "core", lambda: mx)
    device.bound_freed(GIB)
    assert not mx.calls


def test_memory_respects_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "cgroup_values", lambda _: ["max", str(MIB)])
    assert device.host_memory() == MIB
    monkeypatch.setattr(blas, "cgroup_values", lambda _: ["max"])
    assert device.host_memory() > MIB


def test_probe_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millrace.models.device"], capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    probe = msgspec.json.decode(done.stdout, type=device.DeviceProbe)
    assert probe.gflops > 0
    assert 0 < probe.device.budget <= probe.device.memory
    assert (probe.weights == "f32") == (probe.device.kind == "cpu")


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_PACKAGES", ("msgspec", "no-such-package"))
    found = device.versions()
    assert found["msgspec"] == msgspec.__version__
    assert found["no-such-package"] == "missing"
