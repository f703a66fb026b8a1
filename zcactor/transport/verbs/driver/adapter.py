"""The common part of all implementations of the verbs: checks, and the record of open objects of a device.

An implementation derives its device from `OpenDevice`, its queue pairs from `OpenQueuePair`, and all other objects of a
device from `OwnedObject`. Implementations on libibverbs share more: `DriverDevice`, `DriverRegion` and
`DriverCompletionQueue`. The contracts are those of the protocols in `base`.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from zcactor.transport.verbs.driver import base, checks
from zcactor.transport.verbs.driver.device_resources import DeviceResources, ResourceKind
from zcactor.transport.verbs.driver.sysfs import gid_table, partition_key, speaks_iwarp

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "DriverCompletionQueue",
    "DriverDevice",
    "DriverRegion",
    "OpenDevice",
    "OpenQueuePair",
    "OwnedObject",
    "device_attributes",
    "port_attributes",
]

_C = TypeVar("_C", bound="OwnedObject")


class OwnedObject(ABC):
    """An object that is made from a device and closed once. A subclass calls this ``__init__`` at the end of its own,
    when there is something to close.

    Args:
        ledger: the open objects of the device.
        uses: other objects of the device that have to stay open as long as this one.
    """

    kind: ClassVar[ResourceKind]

    def __init__(self, ledger: DeviceResources, *uses: object) -> None:
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
        """Free the driver's object. Called once."""


class OpenQueuePair(OwnedObject):
    """A queue pair, with the limit of its messages while it is connected."""

    kind = ResourceKind.QUEUE_PAIR
    qp_num: int
    _max_message: int | None = None
    """Bytes of the longest message of its port."""

    def _limit(self) -> int:
        """Return the bytes of the longest message.

        Raises:
            VerbsError: the queue pair is closed, or not connected.
        """
        self._check()
        if self._max_message is None:
            raise base.VerbsError(f"queue pair {self.qp_num} is not connected")
        return self._max_message


class OpenDevice:
    """A device, with the checks that come before an object is made from it."""

    attributes: base.DeviceAttributes

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = DeviceResources(name)
        self.closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {'closed' if self.closed else 'open'}>"

    def _check(self) -> None:
        checks.check_not_closed(self.closed, "device")

    def _check_region(self, address: int, nbytes: int) -> None:
        self._check()
        checks.check_region(address, nbytes)

    def _check_dma_buf(self, nbytes: int) -> None:
        self._check()
        checks.check_dma_buf(nbytes)

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
        """Return `child`, if it is open on this device.

        Raises:
            VerbsError: `child` is closed, or belongs to another device.
        """
        if not isinstance(child, cls) or child not in self.ledger:
            raise base.VerbsError(f"the {cls.kind.words} is closed, or of another device")
        return child


class DriverDevice(OpenDevice, ABC):
    """A device of libibverbs. The objects of its binding have a method ``close``."""

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
        while poller.poll(0):  # poll first: a binding may not report that there was no event
            try:
                with self.closing("ibv_get_async_event"):
                    found.append(self._take_event())
            except BlockingIOError:
                break
        return found

    def _watch_events(self, fd: int | None) -> None:
        """Watch the descriptor `fd` of the device's events."""
        if fd is not None:
            os.set_blocking(fd, False)
        self.async_fd = fd

    @abstractmethod
    def _take_event(self) -> int:
        """Take and acknowledge the next event, and return its kind. Destroying the event's object waits for that."""

    def gids(self, port: int) -> list[base.Gid]:
        self._check()
        return gid_table(self.name, port)

    @property
    def iwarp(self) -> bool:
        """See `Device`."""
        return speaks_iwarp(self.name)

    def partition_key(self, port: int, index: int) -> int:
        self._check()
        return partition_key(self.name, port, index)

    def closing(self, what: str) -> AbstractContextManager[None]:
        """Return a context for the verb `what`, which raises `OSError` only. This one is for bindings that raise
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


class DriverRegion(OwnedObject):
    """Satisfies `MemoryRegion`."""

    kind = ResourceKind.MEMORY_REGION

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


class DriverCompletionQueue(OwnedObject):
    """A completion queue with a channel of its own, so that the descriptor reports this queue only."""

    kind = ResourceKind.COMPLETION_QUEUE

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
    """Convert a binding's answer, which has the fields of ``struct ibv_device_attr``."""
    return base.DeviceAttributes(
        ports=found.phys_port_cnt,
        max_qp_rd_atom=found.max_qp_rd_atom,
        max_qp_init_rd_atom=max_qp_init_rd_atom,
        max_qp_wr=found.max_qp_wr,
        max_srq_wr=found.max_srq_wr,
        max_cqe=found.max_cqe,
    )


def port_attributes(number: int, found: Any) -> base.PortAttributes:
    """Convert a binding's answer, which has the fields of ``struct ibv_port_attr``."""
    return base.PortAttributes(
        number, int(found.state), int(found.active_mtu), found.max_msg_sz, found.lid, int(found.link_layer)
    )
