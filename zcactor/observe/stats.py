"""Statistics of a process, as one frozen object."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.objectstore.copies import CopyCount
from zcactor.observe.html import table
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.native import hot
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.placement import Placements
    from zcactor.objectstore.store import Store

__all__ = ["Measured", "Stats", "StatsService", "stats_of"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one process since its runtime started. Fields whose names begin with ``bytes`` or ``store`` are in
    bytes."""

    calls: int
    """Number of calls sent."""
    frames_sent: int
    frames_received: int
    bytes_eager: int
    """Payload bytes sent in frames."""
    bytes_mapped: int
    """Bytes of arrays, and of other values above the eager limit, received by mapping their owner's memory. Bytes that
    a message names twice count once."""
    bytes_read: int
    """Bytes of arrays pulled by RDMA READ."""
    bytes_received: int
    """Bytes of arrays received over TCP."""
    bytes_authenticated: int
    """Bytes of arrays from other hosts whose tags were verified here; see `Config.integrity`."""
    bytes_copied: int
    """Bytes that zcactor copied in memory: the sum over `copies`."""
    copies: Mapping[str, CopyCount]
    """The copies by reason, each with their number and bytes."""
    store_used: int
    """Bytes of living objects in this process's arena."""
    store_capacity: int
    """Bytes that the arena may grow to."""
    leases: int
    """Number of leases (and pins) that peers hold on objects of this process."""
    registrations: int
    """Number of extents of the arena that were ever registered with a network card: constant while a program repeats
    itself."""
    objects_adopted: int
    """Number of objects whose owners have ended, and which this process has adopted so that they can be passed on."""
    placements: int
    """Number of arrays pulled into the destination of an earlier array: nothing was allocated or registered for
    them."""
    connections: int
    """Number of open connections to other processes."""
    pushes: int
    """Number of results that were sent from here to the processes of calls that had them as arguments."""
    collectives: int
    """Number of operations of groups that actors of this process have called."""
    bytes_reduced: int
    """Bytes of inputs that sums and other reductions of groups have read here."""
    bytes_device_mapped: int
    """Bytes of arrays on GPUs received by mapping their owner's GPU memory."""
    bytes_device_pulled: int
    """Bytes of arrays on GPUs that came to a GPU of this process from one that it does not see: copied by the GPU, or
    read from another host by network card."""
    device_used: int
    """Bytes of living objects in this process's GPU memory."""
    device_leases: int
    """Number of leases that peers hold on objects in this process's GPU memory, also part of `leases`."""
    device_extents: int
    """Number of extents of peers' GPU memory that are mapped here now."""
    device_syncs: int
    """Number of times that a thread waited for a GPU so that order holds, because other processes cannot wait for its
    events."""

    def _repr_html_(self) -> str:
        """The statistics that are not 0, for notebooks."""
        copied = {f"copies: {reason}": f"{c.count:,} of {c.nbytes:,} bytes" for reason, c in self.copies.items()}
        counted = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "copies"}
        return table(
            ("statistic", "value"),
            [*((name, f"{count:,}") for name, count in counted.items() if count), *copied.items()],
        )

    def plain(self) -> dict[str, Any]:
        """Convert the statistics to plain values, for the wire."""
        plain = asdict(self)
        plain["copies"] = {reason: [c.count, c.nbytes] for reason, c in self.copies.items()}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Stats:
        """Make statistics from the result of `plain`."""
        copies = {reason: CopyCount(*pair) for reason, pair in plain["copies"].items()}
        return cls(**{**plain, "copies": copies})


class Measured(Protocol):
    """The parts of a process that statistics are taken from."""

    process: bytes
    copies: CopyCounter
    counters: hot.Counters
    store: Store
    placements: Placements
    resolver: Any
    registrar: Any
    adoptions: Any
    sessions: Any
    groups: Any


def _is_on_a_gpu(holder: Any) -> bool:
    return hasattr(holder, "gpu")


def stats_of(process: Measured) -> Stats:
    """Take the statistics of `process` at this moment."""
    copies = process.copies.snapshot()
    counters = process.counters
    store = process.store.stats()
    sessions = list(process.sessions.all())
    devices = process.store.devices_in_use
    return Stats(
        calls=counters.calls,
        frames_sent=counters.frames_sent,
        frames_received=counters.frames_received,
        bytes_eager=counters.bytes_eager,
        bytes_mapped=counters.bytes_mapped,
        bytes_read=counters.bytes_read,
        bytes_received=counters.bytes_received,
        bytes_authenticated=counters.bytes_authenticated,
        bytes_copied=sum(count.nbytes for count in copies.values()),
        copies=copies,
        store_used=store.used - process.placements.idle_nbytes - process.resolver.devices.pieces.idle_nbytes,
        store_capacity=store.capacity,
        leases=sum(session.leases.total for session in sessions) + process.store.parking.total,
        registrations=0 if process.registrar is None else process.registrar.registrations,
        objects_adopted=process.adoptions.count,
        placements=process.placements.reused,
        connections=sum(session.peer_process != process.process for session in sessions),
        pushes=counters.pushes,
        collectives=process.groups.figures[0],
        bytes_reduced=process.groups.figures[1],
        bytes_device_mapped=0 if devices is None else devices.bytes_mapped,
        bytes_device_pulled=0 if devices is None else devices.bytes_pulled,
        device_used=0 if devices is None else devices.used,
        device_leases=0 if devices is None else sum(session.leases.count(_is_on_a_gpu) for session in sessions),
        device_extents=0 if devices is None else len(devices.imports),
        device_syncs=0 if devices is None else devices.syncs,
    )


class StatsService:
    """The statistics of a process, for its peers."""

    def __init__(self, process: Measured) -> None:
        self._process = process

    @remote(17)
    async def stats(self) -> Any:
        """The statistics as `Stats.plain` gives them."""
        return stats_of(self._process).plain()
