"""Changes of an open device, its port and its addresses, which asynchronous events report.

An event is only the cause to look, and the device itself is asked for its state. So an event that is late, repeated, or
of another port does no harm. A port that is down, or has lost the address that peers know, ends the connections, since
no message arrives and the device's own retries take seconds. Peers are reached by another transport until the port
works again, with the address that it has by then.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, Protocol
from weakref import proxy

from zcactor.logs import logger
from zcactor.transport.verbs.device.viability import NotViable, look_again
from zcactor.transport.verbs.driver.codes import EventType, describe_event

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
    from zcactor.transport.verbs.device.viability import Viable
    from zcactor.transport.verbs.driver.base import Device

__all__ = ["DeviceEvents"]

_GONE: Final = frozenset({EventType.DEVICE_FATAL, EventType.CQ_ERR, EventType.SRQ_ERR})
"""Events after which the device cannot be used: a process has one completion queue and one receive queue."""
_OF_THE_PORT: Final = frozenset(
    {
        EventType.PORT_ACTIVE, EventType.PORT_ERR, EventType.LID_CHANGE, EventType.GID_CHANGE, EventType.PKEY_CHANGE,
        EventType.CLIENT_REREGISTER, EventType.SM_CHANGE,
    }
)  # fmt: skip
_OF_A_QUEUE_PAIR: Final = frozenset({EventType.QP_FATAL, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR})
_USUAL: Final = frozenset(
    {EventType.COMM_EST, EventType.SQ_DRAINED, EventType.SRQ_LIMIT_REACHED, EventType.QP_LAST_WQE_REACHED}
)
"""Events of queue pairs that are being connected or fenced."""
LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at all queue pairs. A look takes a verb for each, and a peer can cause many such events."""


class Affected(Protocol):
    """The callbacks for events; see `zcactor.transport.verbs.device.engine.Engine`."""

    device: Device
    loop: asyncio.AbstractEventLoop
    found: Viable
    gpu_memory: RegisteredGpuMemory
    connections: int

    def gone(self, error: OSError) -> None:
        """Leave the device, which is lost."""

    def path_lost(self, why: str) -> None:
        """End connections: no peer can be reached for now."""

    def look_at_queue_pairs(self, why: str) -> None:
        """Check the queue pairs: some may have failed."""


class DeviceEvents:
    """The asynchronous events of one engine's device. Runs on the loop's thread.

    Args:
        engine: its callbacks are called, and its `found` is kept up to date.
    """

    def __init__(self, engine: Affected) -> None:
        self.problem = ""
        """The reason why no peer can be reached through the port now; empty while it works."""
        self._engine: Affected = proxy(engine)  # a closed engine frees its arena without the garbage collector then
        self._device = engine.device
        self._fd = engine.device.async_fd
        self._unknown: set[int] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._looked = float("-inf")
        if self._fd is not None:
            engine.loop.add_reader(self._fd, self._on_event)

    def stop(self) -> None:
        """Stop watching the events. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._engine.loop.remove_reader(fd)
        if self._looking is not None:
            self._looking.cancel()

    def _on_event(self) -> None:
        try:
            kinds = self._device.async_events()
        except OSError as error:
            self._engine.gone(error)
            return
        self._take(kinds)

    def _take(self, kinds: Iterable[int]) -> None:
        found = dict.fromkeys(kinds)
        logger.debug("%s: %s", self._device.name, ", ".join(map(describe_event, found)))
        gone = next((kind for kind in found if kind in _GONE), None)
        if gone is not None:
            self._engine.gone(OSError(errno.EIO, f"it is of no use after {describe_event(gone)}"))
            return
        if not _OF_THE_PORT.isdisjoint(found):
            self._look_at_port()
        failed = next((kind for kind in found if kind in _OF_A_QUEUE_PAIR), None)
        if failed is not None:
            self._look_at_queue_pairs_soon(describe_event(failed))
        for kind in found.keys() - _OF_THE_PORT - _OF_A_QUEUE_PAIR - _USUAL - self._unknown:
            self._unknown.add(kind)
            told = describe_event(kind)
            logger.warning("the RDMA device %s tells of %s, which changes nothing here", self._device.name, told)

    def _look_at_port(self) -> None:
        engine, name = self._engine, self._device.name
        before = engine.found
        now = look_again(self._device, before)
        if isinstance(now, NotViable):
            was, self.problem = self.problem, str(now)
            if not was:
                logger.warning("RDMA cannot be used for now: %s; %d connections end", self.problem, engine.connections)
                engine.path_lost(now.reason)
            return
        engine.found = now
        engine.gpu_memory.path = now.port, now.gid, now.marking
        if self.problem:
            self.problem = ""
            logger.info("RDMA can be used again: %s port %d with %s", name, now.port.port, now.address)
        elif not now.has_address_of(before):
            why = f"{name} port {now.port.port} has no {before.address} any more, and {now.address} instead"
            logger.warning("%s; %d connections end", why, engine.connections)
            engine.path_lost(why)

    def _look_at_queue_pairs_soon(self, why: str) -> None:
        loop = self._engine.loop
        if self._looking is None:
            wait = max(0.0, self._looked + LOOK_SECONDS - loop.time())
            self._looking = loop.call_later(wait, self._look_at_queue_pairs, why)

    def _look_at_queue_pairs(self, why: str) -> None:
        self._looking = None
        self._looked = self._engine.loop.time()
        self._engine.look_at_queue_pairs(why)
