"""`millrace doctor --hostfile`: whether ranks can be reached, run the same versions and have the model, and
how fast the way is between each two of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from millrace.distributed.handshake import Refused
from millrace.distributed.messages import VISIT, Look, Looked, Measure, Measured, ModelFile
from millrace.sizes import format_bytes

if TYPE_CHECKING:
    from millrace.config import EngineConfig, GroupConfig
    from millrace.serving.ranks.member import Member

_ABOUT_SECONDS = 5.0
_LOOK_SECONDS = 60.0


class Way(msgspec.Struct, frozen=True):
    """Between two ranks."""

    source: int
    target: int
    milliseconds: float
    """There and back."""
    megabytes_per_second: float
    problem: str


class RankFound(msgspec.Struct, frozen=True):
    rank: int
    address: str
    versions: dict[str, str]
    memory: int
    problem: str


class RanksReport(msgspec.Struct, frozen=True):
    ranks: list[RankFound]
    ways: list[Way]
    problems: list[str]


def look(hostfile: str, model: str | None, *, as_json: bool) -> bool:
    """Print what was found; returns whether all is well."""
    from millrace.config import EngineConfig
    from millrace.distributed.hostfile import read_hostfile
    from millrace.models.resolve import resolve
    from millrace.serving.ranks.files import files_of

    group = read_hostfile(hostfile, secret=os.environ.get("MILLRACE_RANKS_SECRET", ""))
    wanted: EngineConfig | None = None
    files: tuple[ModelFile, ...] = ()
    if model is not None:
        folder = resolve(model, download=False).path
        wanted, files = EngineConfig(model=str(folder), name=model), files_of(Path(folder))
    report = asyncio.run(examine(group, wanted, files))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _show(report)
    return not report.problems


async def examine(
    group: GroupConfig, config: EngineConfig | None = None, files: tuple[ModelFile, ...] = ()
) -> RanksReport:
    from millrace.serving.ranks.member import Member
    from millrace.serving.ranks.versions import here

    members = [
        Member(rank, (host.address, host.control), group.secret)
        for rank, host in enumerate(group.hosts)
        if rank
    ]
    first = group.hosts[0]
    ranks = [RankFound(0, f"{first.address}:{first.port}", here(), 0, "")]
    ways: list[Way] = []
    problems: list[str] = []
    try:
        reached = [m for m in members if await _reached(m, ranks, problems)]
        for member in reached:
            if config is not None:
                answer = await member.asked(Look(config, files), _LOOK_SECONDS)
                if isinstance(answer, Looked) and answer.problem:
                    problems.append(f"{member.where}: {answer.problem}")
        for member in reached:
            ways.append(await _from_here(member, group.secret))
            for other in reached:
                if other is not member:
                    ways.append(await _between(member, other))
        problems += [f"rank {w.source} to rank {w.target}: {w.problem}" for w in ways if w.problem]
    finally:
        for member in members:
            member.close()
    return RanksReport(ranks, ways, problems)


async def _reached(member: Member, ranks: list[RankFound], problems: list[str]) -> bool:
    from millrace.serving.ranks.versions import others

    problem, versions, memory = "", {}, 0
    try:
        await member.reach(VISIT)
        async with asyncio.timeout(_ABOUT_SECONDS):
            while member.about is None:
                await asyncio.sleep(0.02)
        versions, memory = member.about.versions, member.about.memory
        if differ := others(versions):
            problem = f"other versions: {differ}"
    except (OSError, Refused) as error:
        problem = member.problem or str(error) or "it does not answer"
    if problem:
        problems.append(f"{member.where}: {problem}")
    address = f"{member.address[0]}:{member.address[1]}"
    ranks.append(RankFound(member.rank, address, versions, memory, problem))
    return member.about is not None


async def _from_here(member: Member, secret: str) -> Way:
    from millrace.serving.ranks.probing import measure

    return _way(0, await measure(member.address, secret, member.rank))


async def _between(source: Member, target: Member) -> Way:
    host, port = target.address
    try:
        answer = await source.asked(Measure(target.rank, host, port), _LOOK_SECONDS)
    except TimeoutError:
        return Way(source.rank, target.rank, 0, 0, "it was not measured in time")
    assert isinstance(answer, Measured)
    return _way(source.rank, answer)


def _way(source: int, found: Measured) -> Way:
    return Way(source, found.rank, found.seconds * 1e3, found.rate / 1e6, found.problem)


def _show(report: RanksReport) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False)
    table = Table("rank", "address", "versions", "memory", "")
    for rank in report.ranks:
        told = " ".join(f"{name} {version}" for name, version in rank.versions.items())
        memory = format_bytes(rank.memory) if rank.memory else ""
        table.add_row(str(rank.rank), rank.address, told, memory, rank.problem or "well")
    out.print(table)
    if report.ways:
        ways = Table("from", "to", "there and back", "bandwidth")
        for way in report.ways:
            rate = f"{way.megabytes_per_second:.0f} MB/s"
            cells = (f"{way.milliseconds:.2f} ms", rate) if not way.problem else (way.problem, "")
            ways.add_row(str(way.source), str(way.target), *cells)
        out.print(ways)
    for problem in report.problems:
        out.print(f"[bold red]problem:[/] {problem}", soft_wrap=True)
    if not report.problems:
        out.print("The ranks are well.")
