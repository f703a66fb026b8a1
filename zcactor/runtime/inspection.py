"""Seeing: statistics, the path to a peer, and snapshots of the cluster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from zcactor.config import TRANSPORTS
from zcactor.context import current
from zcactor.errors import DeadlineExceeded
from zcactor.handle import ActorHandle
from zcactor.observe.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from zcactor.rpc.session import Session

__all__ = [
    "ActorInfo",
    "NodeInfo",
    "PeerPath",
    "actors",
    "available_resources",
    "cluster_resources",
    "explain",
    "nodes",
    "stats",
]

STATS_TIMEOUT = 5.0
"""Seconds that the process of an actor has to tell its statistics."""
_PINGS = 9
"""Round trips timed by `explain`; the median is told."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node."""

    node_id: str
    host: str
    pid: int
    """Of its agent."""
    address: str
    """Where its agent listens for peers of other hosts; empty for an embedded node."""
    transports: Sequence[str]
    """The ways to a peer that it allows, the preferred one first."""
    alive: bool
    resources: Mapping[str, float]
    """In all."""
    workers: int
    """Processes it runs for actors."""


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """One actor."""

    actor_id: str
    class_name: str
    name: str | None
    namespace: str
    state: str
    """``"pending"``, ``"alive"``, ``"restarting"`` or ``"dead"``."""
    node_id: str
    pid: int
    """Of its process; 0 before it has one."""
    restarts: int
    cause: str
    """Why it is dead or was restarted; empty otherwise."""


@dataclass(frozen=True, slots=True)
class PeerPath:
    """How this process reaches an actor."""

    transport: str
    """``"local"``, ``"loopback"`` (its own process), ``"verbs"`` or ``"tcp"``."""
    reason: str
    """Why this one."""
    rejected: Mapping[str, str]
    """The others, each with the reason against it."""
    rtt: float
    """Seconds of one round trip between the two event loops, median of several."""
    eager_limit: int
    """Bytes of the largest payload in a frame; arrays of at least this size go by reference."""
    sealed: bool
    """Whether nobody on the way can read or change the frames."""
    integrity: str
    """Of the bytes of arrays: ``"arrays"`` (each pull is authenticated), ``"frames"`` (what belongs to a pickle is,
    plain arrays travel bare), ``"none"``, ``"tls"`` (encrypted, too) or ``"mapped"`` (they do not travel)."""


async def nodes() -> list[NodeInfo]:
    """Every node of the cluster."""
    return [NodeInfo(**plain) for plain in await current().head.ask_agent("nodes")]


async def actors() -> list[ActorInfo]:
    """Every actor that lives, and those whose death is remembered."""
    return [ActorInfo(**plain) for plain in await current().head.ask_agent("actors")]


async def cluster_resources() -> dict[str, float]:
    """Resources of all nodes, by name, in use or not."""
    total, _ = await current().head.ask_agent("resources")
    return total  # type: ignore[no-any-return]


async def available_resources() -> dict[str, float]:
    """Resources that are free now, by name."""
    _, free = await current().head.ask_agent("resources")
    return free  # type: ignore[no-any-return]


@overload
def stats() -> Stats: ...
@overload
def stats(handle: object) -> Awaitable[Stats]: ...
def stats(handle: object = None) -> Stats | Awaitable[Stats]:
    """Counts of this process, or awaitable, of the process of an actor.

    Raises:
        TypeError: `handle` is no handle.
        NoSuchActor: the actor is dead.
        DeadlineExceeded: its process has not answered within 5 s, because its event loop is blocked, say.
    """
    if handle is None:
        return current().stats()
    return _stats_at(_checked(handle, "stats"))


def _checked(handle: object, what: str) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise TypeError(f"zc.{what} takes a handle, not {type(handle).__name__}")
    return handle


async def _session_to(handle: ActorHandle) -> Session:
    process = current()
    host = await process.head.ask_agent("process_of", handle._remote.actor_id)
    return await process.connections.connect(host)


async def _stats_at(handle: ActorHandle) -> Stats:
    try:
        async with asyncio.timeout(STATS_TIMEOUT):
            return Stats.from_plain(await current().requests.ask(await _session_to(handle), "stats"))
    except TimeoutError:
        raise DeadlineExceeded(
            f"the process of {handle._remote.label} has not told its statistics within {STATS_TIMEOUT:g} s: one of its "
            "methods blocks its event loop, or it is stopped"
        ) from None


async def explain(handle: object) -> PeerPath:
    """Which way calls and arrays take to an actor, and why.

    Raises:
        TypeError: `handle` is no handle.
        NoSuchActor: the actor is dead.
    """
    process = current()
    session = await _session_to(_checked(handle, "explain"))
    times = []
    for _ in range(_PINGS):
        before = time.perf_counter()
        await process.requests.ask(session, "ping")
        times.append(time.perf_counter() - before)
    connection = session.connection
    rejected = _not_tried(connection.kind, process.config.transports.split(",")) | connection.rejected
    return PeerPath(
        connection.kind, _why(connection), rejected, sorted(times)[len(times) // 2], connection.eager_limit,
        connection.sealed, connection.integrity,
    )  # fmt: skip


def _why(connection: Any) -> str:
    """What a path is, for people."""
    if connection.kind == "loopback":
        return "the actor lives in this process"
    if connection.kind == "local":
        return "same host: frames over a unix socket, arrays mapped in place"
    if connection.kind == "verbs":
        frames = ", frames sealed" if connection.seals_payloads else ""
        return f"RDMA, proven by a message and a READ{frames}: {connection.describe()}"
    if connection.tls:
        return "frames and arrays over TCP by TLS; arrays received into the store over further sockets"
    frames = "frames over TCP, sealed" if connection.sealed else "frames over TCP"
    arrays = "arrays authenticated and received" if connection.integrity == "arrays" else "arrays received"
    return f"{frames}; {arrays} into the store over further sockets"


def _not_tried(kind: str, allowed: list[str]) -> dict[str, str]:
    """The transports other than `kind`, each with why it was not even tried."""
    reasons = {}
    for name in TRANSPORTS:
        if name == kind:
            continue
        if kind == "loopback":
            reasons[name] = "not needed inside one process"
        elif name not in allowed:
            reasons[name] = f"not allowed: transports is {','.join(allowed)!r}"
        else:
            reasons[name] = f"not tried: {kind} works and comes first"
    return reasons
