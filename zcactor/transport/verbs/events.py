"""What happens to an open device, its port and its addresses, as its asynchronous events tell it.

An event says that something is to be looked at, and the device says what became of it: so one that comes late, twice,
or is another port's does no harm. A port that is down, or that has lost the address by which peers know it, ends the
connections there are, since nothing gets through and the device's own retries take seconds; peers are reached another
way until the port works again, with the address that it has by then.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Final, Protocol
from weakref import proxy

from zcactor.transport.verbs.base import EventType, describe_event
from zcactor.transport.verbs.viability import NotViable, look_again

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from zcactor.transport.verbs.base import Device
    from zcactor.transport.verbs.viability import Viable

__all__ = ["DeviceEvents"]

_GONE: Final = frozenset({EventType.DEVICE_FATAL, EventType.CQ_ERR, EventType.SRQ_ERR})
"""A process has one completion queue and one receive queue, without which there is no device."""
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
"""Of queue pairs that are connected or are fenced."""
LOOK_SECONDS: Final = 1.0
"""From one look at all queue pairs to the next, which takes a verb for each: a peer can cause such events at will."""

logger = logging.getLogger("zcactor")


class Affected(Protocol):
    """What is told of events; see `zcactor.transport.verbs.engine.Engine`."""

    device: Device
    loop: asyncio.AbstractEventLoop
    found: Viable
    connections: int

    def gone(self, error: OSError) -> None:
        """The device is of no use any more."""

    def path_lost(self, why: str) -> None:
        """Nobody can be reached by it for now."""

    def look_at_queue_pairs(self, why: str) -> None:
        """Some may have failed."""


class DeviceEvents:
    """Those of one engine's device. On the loop's thread.

    Args:
        engine: to be told; its `found` is kept up to date.
    """

    def __init__(self, engine: Affected) -> None:
        self.problem = ""
        """Why nobody can be reached through the port now; empty while it works."""
        self._engine: Affected = proxy(engine)  # so that the arena of a closed one goes without the garbage collector
        self._device = engine.device
        self._fd = engine.device.async_fd
        self._unknown: set[int] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._looked = float("-inf")
        if self._fd is not None:
            engine.loop.add_reader(self._fd, self._on_event)

    def stop(self) -> None:
        """Listen no more. Idempotent."""
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
