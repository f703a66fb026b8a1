"""Inspection: statistics, the path to a peer, and snapshots of the cluster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from zcactor.api.device_paths import DevicePath, device_path
from zcactor.api.handle import ActorHandle
from zcactor.api.operation import Background, Operation, operation
from zcactor.config import TRANSPORTS
from zcactor.errors import DeadlineExceeded
from zcactor.exception_pickling import hides, shown_class
from zcactor.observe.html import Listing
from zcactor.observe.stats import Stats, StatsService
from zcactor.process.cluster import HeadService
from zcactor.process.context import current
from zcactor.rpc.services import Services

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zcactor.rpc.session import Session

__tracebackhide__ = hides
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
"""Seconds that the process of an actor has to report its statistics."""
_PINGS = 9
"""Round trips that `explain` times; it reports the median."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A snapshot of one node."""

    node_id: str
    host: str
    pid: int
    """Process id of the node's agent."""
    address: str
    """Address at which the agent listens for peers of other hosts; empty for an embedded node."""
    transports: Sequence[str]
    """The transports that the node allows, the preferred one first."""
    alive: bool
    resources: Mapping[str, float]
    """All resources of the node by name, in use or not."""
    workers: int
    """Number of processes that the node runs for actors."""


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """A snapshot of one actor."""

    actor_id: str
    class_name: str
    name: str | None
    namespace: str
    state: str
    """``"pending"``, ``"alive"``, ``"restarting"`` or ``"dead"``."""
    node_id: str
    pid: int
    """Process id of the actor's process; 0 before it has one."""
    restarts: int
    cause: str
    """The cause of the actor's death or latest restart; empty otherwise."""


@dataclass(frozen=True, slots=True)
class PeerPath:
    """The way by which this process reaches an actor."""

    transport: str
    """``"local"``, ``"loopback"`` (the caller's own process), ``"verbs"`` or ``"tcp"``."""
    reason: str
    """The reason for this transport."""
    rejected: Mapping[str, str]
    """The other transports, each with the reason against it."""
    rtt: float
    """Seconds of one round trip between the two event loops, the median of several."""
    eager_limit: int
    """Bytes of the largest payload in a frame; arrays of at least this size go by reference."""
    sealed: bool
    """Whether frames are protected against reading and changes on the way."""
    integrity: str
    """Protection of the bytes of arrays: ``"arrays"`` (each pull is authenticated), ``"frames"`` (the data of pickles
    is authenticated, plain arrays are not), ``"none"``, ``"tls"`` (encrypted, too) or ``"mapped"`` (they do not
    travel)."""
    device: DevicePath | None = None
    """The way that arrays on GPUs take; None where this process has no GPU."""


@operation
async def nodes() -> list[NodeInfo]:
    """List every node of the cluster.

    Raises:
        NotInitialized: no runtime is running.
        ConnectionLost: the node agent has ended.
    """
    return Listing(NodeInfo(**plain) for plain in await current().head.ask(HeadService.nodes))


@operation
async def actors() -> list[ActorInfo]:
    """List every living actor, and dead actors as long as the head remembers them.

    Raises:
        NotInitialized: no runtime is running.
        ConnectionLost: the node agent has ended.
    """
    return Listing(ActorInfo(**plain) for plain in await current().head.ask(HeadService.actors))


@operation
async def cluster_resources() -> dict[str, float]:
    """Sum up the resources of all nodes by name, in use or not.

    Raises:
        NotInitialized: no runtime is running.
        ConnectionLost: the node agent has ended.
    """
    total, _ = await current().head.ask(HeadService.resources)
    return total


@operation
async def available_resources() -> dict[str, float]:
    """Sum up the resources that are free now, by name.

    Raises:
        NotInitialized: no runtime is running.
        ConnectionLost: the node agent has ended.
    """
    _, free = await current().head.ask(HeadService.resources)
    return free


@overload
def stats() -> Stats: ...
@overload
def stats(handle: object) -> Operation[Stats]: ...
def stats(handle: object = None) -> Stats | Operation[Stats]:
    """Return the statistics of this process or, as an operation, of the process of an actor.

    Args:
        handle: handle of the actor; None means this process.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `handle` is not a handle.
        NoSuchActor: the actor is dead.
        DeadlineExceeded: the actor's process has not answered within 5 s, for instance because its event loop is
            blocked.
        ConnectionLost: the actor's process or the node agent has ended.

    Cancelling has no effect on the actor.
    """
    if handle is None:
        return current().stats()
    return Background(_stats_at(_checked(handle, "stats")), "zc.stats")


def _checked(handle: object, what: str) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise TypeError(f"zc.{what} takes a handle, not {shown_class(type(handle))}")
    return handle


async def _session_to(handle: ActorHandle) -> Session:
    process = current()
    host = await process.head.ask(HeadService.process_of, handle._remote.actor_id)
    return await process.connections.connect(host)


async def _stats_at(handle: ActorHandle) -> Stats:
    try:
        async with asyncio.timeout(STATS_TIMEOUT):
            return Stats.from_plain(await current().requests.ask(await _session_to(handle), StatsService.stats))
    except TimeoutError:
        raise DeadlineExceeded(
            f"the process of {handle._remote.label} has not told its statistics within {STATS_TIMEOUT:g} s: one of its "
            "methods blocks its event loop, or it is stopped"
        ) from None


@operation
async def explain(handle: object) -> PeerPath:
    """Describe the way that calls and arrays take to an actor, and why.

    Where this process has a GPU, 64 KiB on it are sent to find out. The actor's process opens its GPUs for that.

    Args:
        handle: handle of the actor.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `handle` is not a handle.
        NoSuchActor: the actor is dead.
        ConnectionLost: the actor's process or the node agent has ended.

    Cancelling has no effect on the actor.
    """
    process = current()
    session = await _session_to(_checked(handle, "explain"))
    times = []
    for _ in range(_PINGS):
        before = time.perf_counter()
        await process.requests.ask(session, Services.ping)
        times.append(time.perf_counter() - before)
    connection = session.connection
    rejected = _not_tried(connection.kind, process.config.transports.split(",")) | connection.rejected
    return PeerPath(
        connection.kind, connection.describe(), rejected, sorted(times)[len(times) // 2], connection.eager_limit,
        connection.sealed, connection.integrity, await device_path(process, session),
    )  # fmt: skip


def _not_tried(kind: str, allowed: list[str]) -> dict[str, str]:
    """The transports other than `kind`, each with the reason why it was not tried."""
    reasons = {}
    for name in TRANSPORTS:
        if name == kind:
            continue
        if name not in allowed:
            reasons[name] = f"not allowed: transports is {','.join(allowed)!r}"
        else:
            reasons[name] = f"not tried: {kind} works and comes first"
    return reasons
