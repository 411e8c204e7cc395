"""The environment in which MLX finds its group: the variables that mlx.launch sets, made and understood."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from millrace.config import GroupConfig, RankSeat
from millrace.private_folder import PrivateFolder

SECRET = "MILLRACE_SEAT_SECRET"
"""Where a rank's process finds the secret of its group's start: command lines are for everybody to see."""


def seat_secret(seat: RankSeat) -> str:
    return os.environ.get(SECRET) or seat.secret


def hostfile_in(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The hostfile and the rank that mlx.launch, or LocalAI, has set; None where nobody has."""
    file = environment.get("MLX_HOSTFILE") or environment.get("MLX_IBV_DEVICES")
    rank = environment.get("MLX_RANK", "")
    if not file or not rank.isascii() or not rank.isdigit():
        return None
    return file, int(rank)


def variables(group: GroupConfig, rank: int, file: str) -> dict[str, str]:
    """What MLX looks for; `file` is where `contents` was written."""
    found = {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(len(group.hosts))}
    if group.backend == "ring":
        found["MLX_HOSTFILE"] = file
    elif group.backend == "jaccl":
        found |= {"MLX_IBV_DEVICES": file, "MLX_JACCL_COORDINATOR": group.coordinator}
    else:
        first = group.hosts[0]
        found |= {"NCCL_HOST_IP": first.address, "NCCL_PORT": str(first.port)}
    return found


def contents(group: GroupConfig) -> str:
    """A hostfile as MLX's own back-ends read it."""
    if group.backend == "jaccl":
        return json.dumps([list(names) for names in group.devices])
    return json.dumps([[f"{h.address}:{h.port}"] for h in group.hosts])


_folder: PrivateFolder | None = None
"""Where the hostfile is that MLX is to read."""


def enter(group: GroupConfig, rank: int) -> None:
    """Set this process's variables, before MLX looks for its group."""
    global _folder
    _folder = _folder or PrivateFolder()
    file = _folder.path / "hosts.json"
    file.write_text(contents(group), encoding="utf-8")
    os.environ.update(variables(group, rank, str(file)))


def leave() -> None:
    """The file has been read."""
    global _folder
    if _folder is not None:
        _folder.remove()
        _folder = None
