"""Leases on GPU memory of other processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.device.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.array import DeviceArray
    from zcactor.device.imports import ImportedExtent
    from zcactor.device.memory import DeviceBlock, GpuMemory

__all__ = ["DeviceCopy", "DeviceLease", "HostCopy"]


class DeviceLease:
    """A lease on an object of another process's GPU memory, and the holder of the arrays over it.

    The lease goes back when the last array is gone and the work that was queued on the bytes here is done.

    Args:
        owner: process id of the owner, 16 bytes.
        object_id: its id of the object.
        offset: the place among the owner's extents.
        nbytes: bytes.
        release: called with the id and the bytes, on the loop, when the lease ends.
    """

    __slots__ = (
        "__weakref__", "_release", "address", "adopted", "event", "extent", "gpu", "id", "nbytes", "offset", "owner",
        "work",
    )  # fmt: skip

    gpu: GpuMemory
    """The GPU by which this process reaches the bytes; set by `place`."""
    readonly: Final = True

    def __init__(
        self, owner: bytes, object_id: int, offset: int, nbytes: int, release: Callable[[int, int], None]
    ) -> None:
        self.owner: Final = owner
        self.id: Final = object_id
        self.offset: Final = offset
        self.nbytes: Final = nbytes
        self.work = Work(sealed=True)
        """The work that is queued on the bytes here, and the owner's that comes before it."""
        self.event: bytes | None = None
        """The exported event of the owner's work, which is passed on with the array."""
        self.extent: ImportedExtent | None = None
        self.address = 0
        self.adopted: DeviceArray | None = None
        """A copy of all bytes in this process's GPU memory, which is passed on once the owner has ended."""
        self._release: Final = release

    @property
    def unread(self) -> bool:
        """See `zcactor.rpc.parts.is_unread`."""
        return self.extent is None

    def place(self, extent: ImportedExtent) -> None:
        """Set the imported extent in which the bytes lie."""
        self.extent = extent
        self.gpu = extent.gpu
        self.address = extent.address + self.offset - extent.offset
        extent.leases[id(self)] = self

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the lease on; see `zcactor.rpc.parts.Holder`. For a third process the object is pinned here until that
        process has a lease of its own."""
        if session.peer_process == self.owner:
            return self.owner, self.id, 0
        return self.owner, self.id, session.pin(self)

    def __del__(self) -> None:
        extent, release, number, nbytes = self.extent, self._release, self.id, self.nbytes
        work = self.work.left
        if extent is None or not work:
            release(number, nbytes)
            return
        self.gpu.tending.when_done(work, partial(_give_back, release, number, nbytes, extent))


def _give_back(release: Callable[[int, int], None], number: int, nbytes: int, extent: ImportedExtent) -> None:
    """Give a lease back; the extent is kept until then."""
    del extent
    release(number, nbytes)


class DeviceCopy:
    """The bytes of an array on another GPU, in GPU memory of this process, which passes them on in its own name.

    Args:
        block: the copy.
    """

    __slots__ = ("block",)

    def __init__(self, block: DeviceBlock) -> None:
        self.block: Final = block

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the peer a lease; see `zcactor.rpc.parts.Holder`."""
        return self.block.grant(session)


class HostCopy:
    """The bytes of an array on a GPU, in host memory, in a process that sees no GPU.

    Args:
        values: the bytes, read-only.
        lease: the lease on the array, which is passed on.
    """

    __slots__ = ("lease", "values")

    def __init__(self, values: Any, lease: DeviceLease) -> None:
        self.values = values
        self.lease = lease

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Grant the lease on; see `zcactor.rpc.parts.Holder`."""
        return self.lease.grant(session)
