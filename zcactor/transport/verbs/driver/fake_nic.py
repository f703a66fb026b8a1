"""One adapter of a fake fabric: port, addresses and limits, and the descriptors of its events."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zcactor.transport.verbs.driver.base import DeviceAttributes, Gid, PortAttributes
from zcactor.transport.verbs.driver.codes import DEFAULT_PARTITION, EventType, PortState

__all__ = ["ATTRIBUTES", "INLINE_LIMITS", "OVERTAKING", "DmaBuf", "EventFd", "FakeNic"]

ATTRIBUTES: Final = DeviceAttributes(
    ports=1, max_qp_rd_atom=128, max_qp_init_rd_atom=128, max_qp_wr=16384, max_srq_wr=32768, max_cqe=32767
)
"""Default limits of an adapter, about those of rdma_rxe."""
INLINE_LIMITS: Final = (0, 48, 64, 101, 216, 512)
"""Bytes of inline data that the drivers of real adapters take at most: irdma and bnxt_re fewer than 256, rdma_rxe 512.
Each of them answers EINVAL to a queue pair that asks for more."""
OVERTAKING: Final = 4096
"""Bytes of a READ that may overtake others: those of a page come back from memory at once."""


class EventFd:
    """An eventfd that is closed with its owner, so that a test that drops a device leaves no descriptor."""

    def __init__(self, count: int) -> None:
        self.fd = os.eventfd(count, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        """Close the descriptor, once."""


class DmaBuf:
    """The mapping by which a fake adapter reaches memory of a fake GPU, which is shared memory behind a descriptor.

    Raises:
        OSError: the descriptor is of other things, or of less memory.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        if fd < 0:  # that would be other memory
            raise OSError(errno.EBADF, f"{fd} is no descriptor")
        try:
            self._memory = mmap.mmap(fd, nbytes)
        except ValueError as error:  # it has fewer bytes
            raise OSError(errno.EINVAL, f"the descriptor is not of {nbytes} bytes") from error
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self._anchor = None
        self._memory.close()


@dataclass(slots=True)
class FakeNic:
    """One adapter. Tests may change its fields while it is in use: a port goes down, or pinned memory runs out."""

    name: str
    port: PortAttributes
    gids: tuple[Gid, ...]
    attributes: DeviceAttributes = ATTRIBUTES
    pin_limit: int | None = None
    """Bytes that all its devices together may register; None for any number."""
    takes_dma_bufs: bool = True
    """Whether it registers memory of GPUs."""
    max_inline: int = INLINE_LIMITS[-1]
    """The most bytes of inline data that a queue pair may ask for. One that asks for more is refused."""
    partitions: tuple[int, ...] = (DEFAULT_PARTITION,)
    """The keys of its port's table."""
    reorders_reads: bool = True
    """Whether it serves a short READ, of at most `OVERTAKING` bytes, before the earlier ones of a peer that are under
    way, as real adapters may."""
    iwarp: bool = False
    """Whether it speaks iWARP."""
    network: str = ""
    """The network of its port. It reaches adapters of the same network only."""
    requests_left: int | None = None
    """The requests of its own that it still tries; then it loses its port, and tells its users. None for any number."""
    pinned: int = 0
    devices: list[Any] = field(default_factory=list, repr=False)
    """The opened devices of processes; see `zcactor.transport.verbs.driver.fake.FakeDevice`."""

    def tell(self, kind: int) -> None:
        """Raise an asynchronous event at all opened devices. By itself an adapter raises one only where it loses its
        port, so tests can leave events out."""
        for device in self.devices:
            device.tell(kind)

    @property
    def active(self) -> bool:
        """Whether the port sends and receives packets."""
        return self.port.state == PortState.ACTIVE

    def count_request(self) -> None:
        """Count a request that it is about to try, and lose the port where none is left."""
        if self.requests_left is not None:
            self.requests_left -= 1
            if self.requests_left < 0:
                self.requests_left = None
                self.set_active(False)
                self.tell(EventType.PORT_ERR)

    def set_active(self, active: bool) -> None:
        """Connect or disconnect the cable."""
        self.port = replace(self.port, state=PortState.ACTIVE if active else PortState.DOWN)
