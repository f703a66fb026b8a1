"""The command ``status``: a cluster's nodes and actors, and this user's programs with embedded nodes."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from zcactor.cli.nodes import fail, heads_here, settings, small
from zcactor.cluster.records import nodes_here
from zcactor.errors import ZcactorError
from zcactor.exception_pickling import shown
from zcactor.node.reports import ActorReport, ProgramReport, activities_of, programs_here
from zcactor.process.cluster import HeadService
from zcactor.process.loops import run
from zcactor.sizes import sized
from zcactor.workers.kept_records import nodes_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zcactor.config import Config

__all__ = ["actor_rows", "doing", "program_lines", "show_cluster", "status"]

_LOOKED_AT: Final = 100
"""Actors of a cluster whose processes are asked, each by a connection of its own."""
_COUNTED: Final = 9999
"""Waiting calls of an actor that are counted."""
_COMMAND: Final = 44
"""Characters of a command line that are shown."""


@click.command()
@click.option("--address", metavar="HOST:PORT[,...]", help="The head. Default: that of a node on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def status(address: str | None, as_json: bool) -> None:
    """Show a cluster's nodes, resources and actors, and your programs on this host that have a node of their own.

    Each actor is shown with the method that it runs and for how long, the calls that wait for it, and the bytes of
    arrays in its process. Times begin when a call is first seen, which is up to a quarter of warn_after later. With
    --address programs are left out.
    """
    config, _ = settings(address=address)
    address = config.address
    programs = [] if address is not None else asyncio.run(programs_here())
    if address is None and (nodes_here() or not programs):
        address = heads_here()
    elif address is None and (apart := nodes_apart(os.environ)):
        click.echo(f"zcactor: {apart}", err=True)
    told: dict[str, Any] = {}
    if address is not None:
        try:
            told = {"address": address, **run(_ask(small(config, address)))}
        except (ZcactorError, OSError, ValueError) as error:
            raise fail(error) from error
    if as_json:
        click.echo(json.dumps({**told, "programs": msgspec.to_builtins(programs)}, indent=2))
        return
    if told:
        show_cluster(told)
    for program in programs:
        _show_program(program)


async def _ask(config: Config) -> dict[str, Any]:
    from zcactor.api import inspection
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=config):
        nodes, actors = await asyncio.gather(inspection.nodes(), inspection.actors())
        total, free = await asyncio.gather(inspection.cluster_resources(), inspection.available_resources())
        process = current()
        head = await process.head.ask(HeadService.leader)
        alive = [actor.actor_id for actor in actors if actor.state == "alive"][:_LOOKED_AT]
        activities = await activities_of(process, await _hosts(alive))
    plain = [_plain(actor) for actor in actors]
    for actor in plain:
        activity, store_used = activities.get(actor["actor_id"], (None, None))
        actor |= {"activity": msgspec.to_builtins(activity), "store_used": store_used}
    return {
        "head": head,
        "nodes": [_plain(node) for node in nodes],
        "resources": {name: {"total": total[name], "free": free.get(name, 0.0)} for name in total},
        "actors": plain,
    }


async def _hosts(actors: Iterable[str]) -> list[tuple[str, bytes]]:
    """Actors with their processes; those that have just ended are left out, and so are those that restart."""
    from zcactor.ids import ActorId
    from zcactor.process.context import current

    async def host_of(actor: str) -> tuple[str, bytes] | None:
        try:
            async with asyncio.timeout(1.0):
                return actor, await current().head.ask(HeadService.process_of, ActorId(bytes.fromhex(actor)))
        except (ZcactorError, TimeoutError):
            return None

    return [found for found in await asyncio.gather(*map(host_of, actors)) if found is not None]


def _plain(facts: Any) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in type(facts).__slots__}


def _lasts(seconds: float | None) -> str:
    """A time for people; empty where it is not known."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def doing(actor: ActorReport) -> str:
    """The method that an actor runs and for how long, or why that is not known."""
    if actor.state != "alive":
        return shown(actor.state)
    if actor.activity is None:
        return "does not answer"
    if not actor.activity.running:
        return "idle"
    first, *others = actor.activity.running
    more = f" and {len(others)} more" if others else ""
    return f"{shown(first.method)} {_lasts(first.seconds)}".rstrip() + more


def _waiting(actor: ActorReport) -> str:
    if actor.activity is None or not actor.activity.waiting:
        return ""
    lasts = _lasts(actor.activity.waited)
    count = str(actor.activity.waiting) if actor.activity.waiting <= _COUNTED else f"{_COUNTED}+"
    return count + (f" for {lasts}" if lasts else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def actor_rows(actors: Iterable[ActorReport]) -> Iterator[tuple[str, ...]]:
    """The rows of a table of actors: the actor, its pid, what it does, the calls that wait, and its store."""
    for actor in actors:
        label = f"{shown(actor.class_name)}({shown(actor.name) if actor.name else actor.actor_id[:8]})"
        store = "" if actor.store_used is None else sized(actor.store_used)
        yield _cut(label, 22), str(actor.pid), _cut(doing(actor), 18), _waiting(actor), store


_HEADS: Final = ("actor", "pid", "does", "wait", "store")


def program_lines(program: ProgramReport) -> Iterator[str]:
    """The lines about a program, without its actors."""
    yield f"program {program.pid}, {_lasts(program.seconds)}: {_cut(shown(program.program), _COMMAND)}"
    used = [f"{total - free:g} of {total:g} {shown(name)}" for name, (total, free) in program.resources.items()]
    if program.store_used is None or program.store_capacity is None:
        store = "its loop is blocked"
    else:
        store = f"store {sized(program.store_used)} of {sized(program.store_capacity)}"
    yield f"  {'; '.join([*used, store])}"
    if not program.actors:
        yield "  no actors"


def _show_program(program: ProgramReport) -> None:
    from zcactor.cli.render import plain_console, table

    console = plain_console()
    for line in program_lines(program):
        console.print(line)
    if program.actors:
        console.print(table(actor_rows(program.actors), _HEADS))
    if program.further:
        console.print(f"  and {program.further:,} more actors")
    console.print()


def show_cluster(told: dict[str, Any]) -> None:
    """Print what `_ask` has told about a cluster, and its address."""
    from zcactor.cli.render import plain_console, table

    console = plain_console()
    console.print(f"cluster at {told['address']}", soft_wrap=True)
    rows = []
    for node in told["nodes"]:
        amounts = ", ".join(f"{shown(name)} {amount:g}" for name, amount in node["resources"].items())
        place = node["address"].partition("@")[2]
        rows.append((node["node_id"][:8], shown(node["host"]), place, amounts, str(node["workers"])))
    console.print(table(rows, ("node", "host", "address", "resources", "processes")))
    head = told["head"]
    kept = f", log {head['log']}" if head["log"] else ""
    others = f", standbys {', '.join(head['standbys'])}" if head["standbys"] else ""
    waits = f", waits for {', '.join(head['waits_for'])}" if "waits_for" in head else ""
    console.print(
        f"head: pid {head['pid']}, {head['state']}, epoch {head['epoch']}{kept}{others}{waits}", soft_wrap=True
    )
    for name, amount in told["resources"].items():
        console.print(f"{shown(name)}: {amount['free']:g} of {amount['total']:g} free")
    alive = [actor for actor in told["actors"] if actor["state"] != "dead"]
    if alive:
        reports = [msgspec.convert({**actor, "name": actor["name"] or ""}, ActorReport) for actor in alive]
        nodes = [actor["node_id"][:8] for actor in alive]
        rows = [(*row[:2], node, *row[2:]) for node, row in zip(nodes, actor_rows(reports), strict=True)]
        console.print(table(rows, ("actor", "pid", "node", *_HEADS[2:])))
    else:
        console.print("no actors")
    console.print()
