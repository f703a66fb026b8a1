"""What all implementations of the verbs share: their checks, and the bookkeeping of what is open on a device.

An implementation derives its device from `OpenDevice`, its queue pairs from `OpenQueuePair`, and everything else that
a device has from `Child`. For those with libibverbs below them more is shared: `DriverDevice` and what is named like
it. The contracts are those of the protocols in `base`.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from zcactor.transport.verbs import base, checks
from zcactor.transport.verbs.ledger import Kind, Ledger
from zcactor.transport.verbs.sysfs import gid_table

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "Child",
    "DriverCompletionQueue",
    "DriverDevice",
    "DriverRegion",
    "OpenDevice",
    "OpenQueuePair",
    "device_attributes",
    "port_attributes",
]

_C = TypeVar("_C", bound="Child")


class Child(ABC):
    """What is made from a device and closed once. An ``__init__`` calls this one at its end, when there is something
    to close.

    Args:
        ledger: of the device.
        uses: other children, which it needs to stay open.
    """

    kind: ClassVar[Kind]

    def __init__(self, ledger: Ledger, *uses: object) -> None:
        self._ledger = ledger
        ledger.add(self.kind, self, *uses)

    def _check(self) -> None:
        if id(self) not in self._ledger.uses:
            checks.check_not_closed(True, self.kind.words)

    def close(self) -> None:
        if self._ledger.remove(self.kind, self):
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Give the driver's object back. Called once."""


class OpenQueuePair(Child):
    """A queue pair, which knows its longest message while it is connected."""

    kind = Kind.QUEUE_PAIR
    qp_num: int
    _max_message: int | None = None
    """That of the port that it is connected through."""

    def _limit(self) -> int:
        """Bytes of the longest message.

        Raises:
            VerbsError: it is closed, or not connected.
        """
        self._check()
        if self._max_message is None:
            raise base.VerbsError(f"queue pair {self.qp_num} is not connected")
        return self._max_message


class OpenDevice:
    """A device, with the checks before anything is made from it."""

    attributes: base.DeviceAttributes

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger(name)
        self.closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {'closed' if self.closed else 'open'}>"

    def _check(self) -> None:
        checks.check_not_closed(self.closed, "device")

    def _check_region(self, address: int, nbytes: int) -> None:
        self._check()
        checks.check_region(address, nbytes)

    def _check_completion_queue(self, depth: int) -> None:
        self._check()
        checks.check_depth(depth, self.attributes.max_cqe, "the completion queue's depth", "max_cqe")

    def _check_shared_receive_queue(self, depth: int) -> None:
        self._check()
        checks.check_depth(depth, self.attributes.max_srq_wr, "the shared receive queue's depth", "max_srq_wr")

    def _check_queue_pair(self, max_send_wr: int) -> None:
        self._check()
        checks.check_depth(max_send_wr, self.attributes.max_qp_wr, "max_send_wr", "max_qp_wr")

    def _own(self, cls: type[_C], child: object) -> _C:
        """`child`, if it is open on this device.

        Raises:
            VerbsError: it is closed, or of another device.
        """
        if not isinstance(child, cls) or child not in self.ledger:
            raise base.VerbsError(f"the {cls.kind.words} is closed, or of another device")
        return child


class DriverDevice(OpenDevice, ABC):
    """A device of libibverbs, by a binding's objects that have ``close``."""

    async_fd: int | None = None
    _context: Any
    _pd: Any

    def async_events(self) -> list[int]:
        self._check()
        found: list[int] = []
        if self.async_fd is None:
            return found
        poller = select.poll()
        poller.register(self.async_fd, select.POLLIN)
        while poller.poll(0):  # asked first: a binding may not say that there was none
            try:
                with self.closing("ibv_get_async_event"):
                    found.append(self._take_event())
            except BlockingIOError:
                break
        return found

    def _watch_events(self, fd: int | None) -> None:
        """`fd` is the descriptor of the device's events."""
        if fd is not None:
            os.set_blocking(fd, False)
        self.async_fd = fd

    @abstractmethod
    def _take_event(self) -> int:
        """The kind of the next event, which is acknowledged: destroying what it is of waits for that."""

    def gids(self, port: int) -> list[base.Gid]:
        self._check()
        return gid_table(self.name, port)

    def closing(self, what: str) -> AbstractContextManager[None]:
        """Around `what`, a verb: `OSError` is all that leaves it. As it is here, it serves a binding that raises
        nothing else."""
        del what
        return nullcontext()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        refused = self.ledger.close()
        for what, handle in (("ibv_dealloc_pd", self._pd), ("ibv_close_device", self._context)):
            try:
                with self.closing(what):
                    handle.close()
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]


class DriverRegion(Child):
    """Satisfies `MemoryRegion`."""

    kind = Kind.MEMORY_REGION

    def __init__(self, device: DriverDevice, region: Any, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lkey = int(region.lkey)
        self.rkey = int(region.rkey)
        self._device = device
        self._region = region
        super().__init__(device.ledger)

    def _release(self) -> None:
        with self._device.closing("ibv_dereg_mr"):
            self._region.close()


class DriverCompletionQueue(Child):
    """A completion queue with a channel of its own: its descriptor is to stand for this queue only."""

    kind = Kind.COMPLETION_QUEUE

    def __init__(self, device: DriverDevice, depth: int, cq: Any, channel: Any) -> None:
        self.depth = depth
        self.cq = cq
        self._channel = channel
        self._device = device
        super().__init__(device.ledger)

    def _release(self) -> None:
        with self._device.closing("ibv_destroy_cq"):
            try:
                self.cq.close()
            finally:
                self._channel.close()


def device_attributes(found: Any, max_qp_init_rd_atom: int) -> base.DeviceAttributes:
    """From a binding's answer, which has the fields of ``struct ibv_device_attr``."""
    return base.DeviceAttributes(
        ports=found.phys_port_cnt,
        max_qp_rd_atom=found.max_qp_rd_atom,
        max_qp_init_rd_atom=max_qp_init_rd_atom,
        max_qp_wr=found.max_qp_wr,
        max_srq_wr=found.max_srq_wr,
        max_cqe=found.max_cqe,
    )


def port_attributes(number: int, found: Any) -> base.PortAttributes:
    """From a binding's answer, which has the fields of ``struct ibv_port_attr``."""
    return base.PortAttributes(
        number, int(found.state), int(found.active_mtu), found.max_msg_sz, found.lid, int(found.link_layer)
    )
