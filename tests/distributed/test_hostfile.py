"""Hostfiles in all the ways they are written, and what is wrong with those that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.distributed.environment import contents, hostfile_in, variables
from millrace.distributed.hostfile import among, group_of, peers_of, read_hostfile, split_address
from millrace.errors import SetupError


def test_three_ways_of_writing_them_mean_the_same() -> None:
    flat = group_of(["10.0.0.1:5000", "10.0.0.2:5000"])
    ring = group_of([["10.0.0.1:5000"], ["10.0.0.2:5000"]])
    launch = group_of([{"ips": ["10.0.0.1:5000"]}, {"ips": ["10.0.0.2:5000"]}])
    assert flat == ring == launch
    assert [(h.address, h.port, h.control) for h in flat.hosts] == [
        ("10.0.0.1", 5000, 6000),
        ("10.0.0.2", 5000, 6000),
    ]
    assert flat.backend == "ring"


def test_mlx_launchs_form_has_ssh_and_needs_no_port() -> None:
    raw = {"backend": "ring", "hosts": [{"ssh": "me@mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2"}]}
    group = group_of(raw)
    assert [h.ssh for h in group.hosts] == ["me@mac1", "mac2"]
    assert [h.address for h in group.hosts] == ["10.0.0.1", "mac2"]
    assert group.hosts[0].port == 32323


def test_jaccl_names_devices_and_a_coordinator() -> None:
    raw = [
        {"ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
        {"ips": ["10.0.0.2"], "rdma": ["rdma_en5", None]},
    ]
    group = group_of(raw)
    assert group.backend == "jaccl"
    assert group.coordinator == "10.0.0.1:32323"
    assert json.loads(contents(group)) == [[None, "rdma_en5"], ["rdma_en5", None]]
    found = variables(group, 1, "file.json")
    assert found["MLX_IBV_DEVICES"] == "file.json" and found["MLX_RANK"] == "1"
    assert group_of(raw, coordinator="10.0.0.1:9").coordinator == "10.0.0.1:9"
    with pytest.raises(ValueError, match="where the ranks are"):
        group_of([[None, "a"], ["a", None]])


def test_a_ring_gets_what_mlx_reads() -> None:
    group = group_of(["127.0.0.1:5000", "127.0.0.1:5001"])
    assert json.loads(contents(group)) == [["127.0.0.1:5000"], ["127.0.0.1:5001"]]
    assert variables(group, 0, "f")["MLX_HOSTFILE"] == "f"


@pytest.mark.parametrize(
    "raw",
    [
        *([], {}, "x", 5, None, {"hosts": {}}, [5], [""], ["a b:1"], ["h:0"], ["h:99999"], ["h:x"]),
        *([[]], [{}], [{"ips": []}], [{"ips": "x"}], [{"ssh": 5}], [None], [[5]]),
        [{"ssh": "-oProxyCommand=reboot", "ips": ["127.0.0.1"]}],
        ["127.0.0.1:5000", "127.0.0.1:5000"],
        ["127.0.0.1:5000", "127.0.0.1:6000"],
        [{"ips": ["a"], "rdma": ["x"]}, {"ips": ["b"], "rdma": ["y", None]}],
        {"hosts": ["a:1"], "backend": "pigeons"},
        {"hosts": ["a:1"], "backend": "mpi"},
        {"hosts": ["a:1"], "backend": 7},
        ["h:1"] * 300,
    ],
)
def test_what_is_no_hostfile_is_refused(raw: Any, tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(SetupError, match=str(file)):
        read_hostfile(str(file))


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        read_hostfile(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("[")
    with pytest.raises(SetupError, match="not JSON"):
        read_hostfile(str(tmp_path / "text.json"))


def test_the_secret_is_the_files_where_nobody_gives_one(tmp_path: Path) -> None:
    for name, port in (("a", 5000), ("b", 5000), ("c", 5001)):
        (tmp_path / name).write_text(json.dumps([f"127.0.0.1:{port}"]))
    a, b, c = (read_hostfile(str(tmp_path / name)).secret for name in "abc")
    assert a == b != c
    assert (
        read_hostfile(str(tmp_path / "a"), secret="a secret of mine").secret == "a secret of mine"
    )
    assert "a secret of mine" not in repr(
        read_hostfile(str(tmp_path / "a"), secret="a secret of mine")
    )


def test_addresses_are_split_at_their_port() -> None:
    assert split_address("fe80::1", "x") == ("fe80::1", None)
    assert split_address("[fe80::1]:80", "x") == ("fe80::1", 80)
    assert split_address("mac.local:80", "x") == ("mac.local", 80)


def test_what_mlx_launch_sets_is_understood() -> None:
    assert hostfile_in({"MLX_RANK": "2", "MLX_HOSTFILE": "f"}) == ("f", 2)
    assert hostfile_in({"MLX_RANK": "1", "MLX_IBV_DEVICES": "f"}) == ("f", 1)
    assert hostfile_in({"MLX_RANK": "x", "MLX_HOSTFILE": "f"}) is None
    assert hostfile_in({"MLX_RANK": "0"}) is None


def test_without_a_secret_only_the_files_own_addresses_are_spoken_to(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('["10.0.0.1:5000", "[fe80::2]:5000", "localhost:5001"]')
    peers = peers_of(read_hostfile(str(file)))
    assert peers == ("10.0.0.1", "fe80::2", "localhost")
    for known in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::2%en5", "127.0.0.1"):
        assert among(known, peers)
    for stranger in ("10.0.0.2", "127.0.0.2", "fe80::3", "::ffff:10.0.0.9"):
        assert not among(stranger, peers)
    assert not among("10.0.0.1", ["no-such-host.invalid"])
    assert peers_of(read_hostfile(str(file), secret="a secret of its own")) == ()
