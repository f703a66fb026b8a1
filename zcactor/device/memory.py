"""The memory of this process on its GPUs, and the blocks in it."""

from __future__ import annotations

import threading
import time
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakValueDictionary

from zcactor import ids
from zcactor.device.arena import DeviceArena
from zcactor.device.events import EventPool
from zcactor.device.work import Work, looks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.device.arena import Placed
    from zcactor.device.driver import GpuDriver, GpuFacts
    from zcactor.device.events import Moment
    from zcactor.device.tending import Tending
    from zcactor.objectstore.store import Store

__all__ = ["DeviceBlock", "GpuMemory", "gpu_number", "wait_on_host"]

_GPU_SHIFT: Final = 48
"""Bits of the offset in one GPU's memory; the GPU's index is above them. 256 TiB are never used up, as each offset is
used for one extent only."""
_lending: Final = threading.Lock()
_FIRST_PAUSE: Final = 20e-6
"""Seconds: about the time of a copy of a few KiB."""
_LAST_PAUSE: Final = 1e-3


def gpu_number(offset: int) -> int:
    """The index, in the owner's process, of the GPU with an offset among all extents."""
    return offset >> _GPU_SHIFT


def wait_on_host(moments: Iterable[Moment], seconds: float = inf) -> None:
    """Wait until the work of all moments is done, but no longer than `seconds`, and block this thread meanwhile.

    Raises:
        DeviceError, ObjectLost: see `looks`.
    """
    until = time.monotonic() + seconds
    for pause in looks(moments, _FIRST_PAUSE, _LAST_PAUSE):
        if time.monotonic() >= until:
            break
        time.sleep(pause)  # a wait of the driver's would never end where the process is gone that does the work


class _Hold:
    """The holder of a block's bytes, which frees them when it is dropped. It is apart from the block because weak
    references lead to blocks: while a ``__del__`` of the block ran, another thread could get the block back."""

    __slots__ = ("arena", "offset", "work")

    def __init__(self, arena: DeviceArena, placed: Placed) -> None:
        self.arena: Final = arena
        self.offset: Final = placed.offset
        self.work: Final = Work(placed.after)

    def __del__(self) -> None:
        self.arena.give_back(self.offset, self.work.left)


class DeviceBlock:
    """One object in the GPU memory of this process. Its bytes are free, for work after that which is queued on them,
    when the last array and the last lease are gone.

    Args:
        gpu: the memory.
        nbytes: bytes.
        given: the holder of bytes that somebody else has allocated, and their address; None to allocate bytes.

    Raises:
        OutOfMemory: the GPU has no room.
        DeviceError: the driver fails in another way.
    """

    __slots__ = (
        "__weakref__", "address", "exported", "gpu", "hold", "id", "loans", "nbytes", "path", "sealed", "store",
        "told", "version",
    )  # fmt: skip

    read_in_place: Final = True
    """As for `zcactor.objectstore.store.Block`: peers may read the bytes after their connections have ended."""
    of_numpy: Final = False

    def __init__(self, gpu: GpuMemory, nbytes: int, given: tuple[Any, int] | None = None) -> None:
        if given is None:
            placed = gpu.arena.allocate(nbytes)
            given = _Hold(gpu.arena, placed), placed.address
            gpu.blocks[placed.offset] = self
        self.hold: Final = given[0]
        self.address: Final = given[1]
        self.gpu: Final = gpu
        self.id: Final = ids.bits(62) | 1 << 62
        """Id of the object (u64), which no peer can guess."""
        self.nbytes: Final = nbytes
        self.sealed = False
        """Whether the object was shared, so that nobody may write to it."""
        self.loans: tuple[object, ...] = ()
        """The operations of groups that have yet to queue work that reads the bytes."""
        self.exported = False
        self.path: Literal["", "pulled", "gpudirect"] = ""
        """The way on which the bytes of another GPU came without host memory: a copy by this one, of a GPU that this
        process does not see, or a READ by a network card. Empty for other objects."""
        self.store: Store | None = None
        """The store of the runtime by which the object was shared."""
        self.told: Moment | None = None
        """The last write, where peers were told its event: that is not used again before the object's end."""
        self.version: object = None
        """The version of a library's elements when they were passed; see `zcactor.device.foreign.Known`."""

    @property
    def work(self) -> Work:
        """The work that is queued on the bytes."""
        return self.hold.work

    @property
    def readonly(self) -> bool:
        """Whether nobody may write to the bytes."""
        return self.sealed or bool(self.loans)

    @property
    def offset(self) -> int:
        """The place among all extents of this process, on all its GPUs."""
        return self.gpu.base + self.hold.offset

    def share(self, store: Store) -> None:
        """Let nobody write to the bytes from now on, and peers be granted leases. Idempotent.

        Raises:
            DeviceError: the driver refuses.
        """
        self.work.seal()
        self.sealed = True
        self.store = store

    def open_again(self) -> None:
        """Let the bytes be written to, as no peer has them. Later writes are told by another event."""
        if self.told is not None:
            self.work.comes_after(self.told)
            self.told = None
        self.work.unseal()
        self.sealed = False

    def lend(self, reader: object) -> None:
        """Let nobody write to the bytes until `reader` gives them back. Any thread may call this."""
        with _lending:
            self.loans = (*self.loans, reader)

    def take_back(self, reader: object) -> None:
        """Undo `lend`. Any thread may call this."""
        with _lending:
            self.loans = tuple([each for each in self.loans if each is not reader])

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Lease the object to the peer of `session`; see `zcactor.rpc.parts.Holder`."""
        store = self.store
        if store is None:
            raise RuntimeError("an object is granted that was not shared")
        if not self.exported:
            store.export(self)
        session.leases.grant(self.id, self)
        return store.process, self.id, 0


def _gone(tending: Tending, base: int, offset: int, readers: set[bytes]) -> None:
    tending.when_done([], partial(tending.tell_gone, readers, base + offset))


class GpuMemory:
    """The memory and the events of this process on one GPU.

    Args:
        driver: the driver.
        facts: the GPU.
        capacity: see `DeviceArena`.
        keep_nbytes: see `DeviceArena`.
        tending: gives memory back.
    """

    def __init__(
        self, driver: GpuDriver, facts: GpuFacts, capacity: int | None, keep_nbytes: int, tending: Tending
    ) -> None:
        self.driver: Final = driver
        self.index: Final = facts.index
        self.base: Final = facts.index << _GPU_SHIFT
        """The offset of its memory among all extents of this process."""
        self.tending: Final = tending
        self.uuid: Final = facts.uuid
        self.arena: Final = DeviceArena(driver, facts.index, capacity, keep_nbytes)
        self.events: Final = EventPool(driver, facts.index)
        self.blocks: Final[WeakValueDictionary[int, DeviceBlock]] = WeakValueDictionary()
        """The objects, by their offsets in the arena."""
        self.arena.on_freed = tending.freed
        self.arena.on_gone = partial(_gone, tending, self.base)
        tending.add(self.arena)

    def block_at(self, low: int, high: int) -> DeviceBlock | None:
        """The object whose bytes contain the addresses ``[low, high)``, or None."""
        offset = self.arena.around(low)
        block = self.blocks.get(offset) if offset >= 0 else None
        return block if block is not None and high <= block.address + block.nbytes else None
