"""The store: arrays that are born in shared memory, and freed with the last Python object that refers to them.

A `Block` is one allocation, and the base object of every array over it. NumPy gets its bytes by the array interface and
not by the buffer protocol: with a base that exports no buffer, an array whose ``flags.writeable`` was cleared cannot be
made writable again, and neither can any view of it.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import threading
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, SupportsIndex
from weakref import WeakMethod, ref

from zcactor import ids
from zcactor.errors import DeviceUnavailable, NotInitialized, OutOfMemory
from zcactor.lazy_numpy import np
from zcactor.native import hot
from zcactor.objectstore import forks
from zcactor.objectstore.arena import EXTENT_NBYTES, Arena
from zcactor.objectstore.fields import disown, layout_is_known
from zcactor.objectstore.groups import bound_by_file_limit
from zcactor.objectstore.lease import close_array
from zcactor.objectstore.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import DTypeLike, NDArray

    from zcactor.objectstore.heap import Hold

__all__ = ["Block", "Store", "StoreStats", "footprint"]

_CACHE_LINE: Final = 64
"""Alignment of small objects in bytes, which also suits AVX-512 loads."""
_OWN_PAGES_NBYTES: Final = 4 * mmap.PAGESIZE
"""Bytes from which a block shares no page with others: it can stay shared at a fork, which makes pages private."""
_COMPARED: Final = 1 << 20
"""Bytes of the file of an arena that are compared with memory at once."""
_UNKNOWN: Final = (-1, -1)
"""The key in `Block.digests` of bytes that a peer may have copied, without a digest of theirs."""
_MOST_DIGESTS: Final = 4096
"""Digests of one block, at most."""
_MIN_KNOWN: Final = 256
"""Number of entries of `Store._known` from which on entries are removed whose memory has been freed."""


def _alignment(nbytes: int) -> int:
    return mmap.PAGESIZE if nbytes >= _OWN_PAGES_NBYTES else _CACHE_LINE


def footprint(nbytes: int) -> int:
    """Bytes of the store that a block of `nbytes` from `Store.allocate_apart` takes."""
    return -(-(nbytes or 1) // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The contents of a store at one moment."""

    used: int
    """Bytes allocated, each block rounded up to its alignment."""
    capacity: int
    """Bytes that the arena can hold."""
    blocks: int
    """Number of allocations."""
    largest_free: int
    """Bytes of the largest block that could still be allocated."""
    of_numpy: int
    """Bytes of `used` that NumPy allocated for arrays of its own."""
    committed: int
    """Bytes of memory taken from the system: used, or kept ready."""


class Block:
    """One allocation of a `Store`, and the base object of the arrays over it. `Store.allocate` makes blocks;
    `Store.block_at` makes a block as a further holder of memory that NumPy has allocated in the store for an array of
    its own.

    ``np.asarray(block)`` is its *root*, a one-dimensional uint8 array; views are made of the root, so NumPy keeps the
    root as their base. The bytes are freed when the last array and the last lease are gone.
    """

    __slots__ = (
        "__weakref__", "address", "array", "closer", "digests", "entry", "exported", "hold", "id", "nbytes", "of_numpy",
        "offset", "private", "sealed", "store", "successor", "written",
    )  # fmt: skip

    read_in_place: Final = True
    """Whether peers may read the bytes after their connections have ended."""

    def __init__(self, store: Store, hold: Hold, nbytes: int, block_id: int | None = None) -> None:
        self.store: Final = store
        self.id: Final = hold.id if block_id is None else block_id
        """Id of the block (u64); see `Store.allocate`."""
        self.offset: Final = hold.offset
        """Offset in bytes from the start of the arena."""
        self.nbytes: Final = nbytes
        """Bytes that were requested."""
        self.address: Final = store.arena.address + hold.offset
        """Address of the bytes in this process."""
        self.sealed = False
        """False: a draft, which the owner may write to. True: sealed, so that nobody may write to it, and leases may be
        granted."""
        self.exported = False
        """Whether `Store.lookup` finds the block."""
        self.private = False
        """Whether this package alone has written to the bytes: nobody else has an object over them that can write."""
        self.written = False
        """Whether members of a group write to the bytes by their address, sealed or not. A fork leaves them shared."""
        self.closer: object = None
        """The token of the message that has sealed the block; None where others rely on the seal, too."""
        self.digests: dict[tuple[int, int], int] = {}
        """The digests of the bytes that peers may have copies of under the id, by offset and length."""
        self.successor: Block | None = None
        """The latest object in the same memory, once its bytes have changed after peers knew them; see `as_sent`."""
        self.of_numpy = False
        """Whether NumPy allocated the memory for an array of its own."""
        self.array: ref[NDArray[Any]] | None = None
        """The array that `Store.empty` made, or that was made of bytes moved back to this process. Sealing the block by
        way of a view makes this array read-only as well."""
        self.entry: Final = _Entry(self, store._forget)
        """The reference by which the store finds the block."""
        self.entry.offset, self.entry.id = self.offset, self.id
        # The hold is apart from the block because weak references lead to blocks: while a ``__del__`` of the block ran,
        # another thread could get the block back, with its bytes already free.
        self.hold: Final = hold
        """The holder in the heap, which frees the bytes when it is dropped."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3: the bytes in place, read-only once the block is sealed."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, self.sealed), "version": 3}

    def __repr__(self) -> str:
        state = "SEALED" if self.sealed else "DRAFT"
        return f"<Block {self.id:#018x} {state} {self.nbytes} bytes at {self.offset}>"

    @property
    def is_forked(self) -> bool:
        """Whether a fork has made the memory private, so that peers do not see what is written to it. A block that was
        sealed before the fork can be read by peers all the same."""
        return self.store.heap.is_private(self.offset)

    @property
    def is_seen(self) -> bool:
        """Whether peers see the bytes as this process does. Bytes that were sealed before a fork are as they were then,
        unless somebody has opened their array since, or has written by a view from before."""
        return not self.is_forked or (self.sealed and (self.private or self.store.is_in_file(self)))

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        """Lease the block to the peer of `session`. From now on its id can be looked up.

        Returns:
            This process's id, the block's id, and 0: the owner itself has granted the lease, nothing is pinned.
        """
        if not self.exported:
            self.store.export(self)
        if not session.connection.maps:
            if self.of_numpy:
                self.store.take_over(self.offset)
            if not self.digests:  # a third process has passed the id on: the bytes that the peer copies are not known
                self.digests[_UNKNOWN] = 0
        session.leases.grant(self.id, self)
        return self.store.process, self.id, 0

    def as_sent(self, offset: int, nbytes: int) -> Block:
        """The object as which bytes of the block go to a peer that keeps copies by id: the block, or another one with
        another id, where the bytes are others than when peers copied them.

        A view that was made before the memory was closed can still write to it, and so can a buffer.

        Args:
            offset: offset of the first byte in the arena.
            nbytes: bytes, which lie in the block.
        """
        if self.private or not nbytes:
            return self
        block = self.successor or self
        digest = hot.digest(self.store.arena.address + offset, nbytes)
        digests, key = block.digests, (offset, nbytes)
        known = digests.get(key)
        if known is None and _UNKNOWN not in digests and len(digests) < _MOST_DIGESTS:
            digests[key] = known = digest
        if known == digest:
            return block
        made = self.store.block_over(self.hold, self.nbytes)
        made.of_numpy, made.sealed, made.digests[key] = self.of_numpy, True, digest
        self.successor = made
        self.store.succeed(block, made)
        return made


class Exportable(Protocol):
    """A block of another kind of memory."""

    exported: bool

    @property
    def id(self) -> int:
        """Id of the block, as `Block.id`."""


def _with_remedy(error: OutOfMemory) -> OutOfMemory:
    """The error of a store that is full, which names ``ulimit -f`` where that limit bounds the store."""
    if not bound_by_file_limit(error.capacity):
        return error
    return OutOfMemory(error.requested, error.used, error.capacity, error.largest_free, error.note, "ulimit -f")


def _given_up(givers: Sequence[WeakMethod[Callable[[], bool]]]) -> bool:
    """Call all functions that give memory up. Returns whether one did."""
    found = False
    for giver in givers:
        method = giver()
        found = (method is not None and method()) or found
    return found


class _Entry(ref[Any]):
    """A weak reference to a block, with its keys in the store's tables; a block outside the arena has the offset -1.

    It does what `weakref.WeakValueDictionary` does, in a fraction of the time: the class has no code of its own to run.
    """

    __slots__ = ("id", "offset")
    id: int
    offset: int


def _flags(array: NDArray[Any]) -> Any:
    """The flags that NumPy knows: a subclass may answer anything."""
    return np.ndarray.flags.__get__(array)


def _forgetting(blocks: dict[int, _Entry], exported: dict[int, _Entry]) -> Callable[[_Entry], None]:
    """The function that takes the entry of a block that is no more out of the tables of a store."""

    def forget(entry: _Entry) -> None:
        if blocks.get(entry.offset) is entry:  # it may be that of a later block of the same memory
            del blocks[entry.offset]
        if exported.get(entry.id) is entry:
            del exported[entry.id]

    return forget


class Store:
    """The objects of one process, in one arena. Any thread may call any method.

    Args:
        capacity: bytes, rounded up to whole pages. Memory is taken from the system only as it is used.
        process: the 16-byte id of this process.
        extent_nbytes: least number of bytes by which the part of the arena in use grows.
        arena: the arena, when the caller has made it; None makes one.

    Raises:
        OutOfMemory: the system refuses an arena of that size.
        ValueError: `capacity` is not positive.
    """

    def __init__(
        self, capacity: int, process: bytes, *, extent_nbytes: int = EXTENT_NBYTES, arena: Arena | None = None
    ) -> None:
        self.arena: Final = Arena(capacity, extent_nbytes) if arena is None else arena
        self.capacity: Final = self.arena.nbytes
        self.process: Final = process
        self.heap: Final = self.arena.heap
        self.parking: Final = Parking()
        """The blocks that peers may read after their connections have ended."""
        self._lock = threading.RLock()  # a finalizer that passes arrays may run inside it
        self._closed = False
        self._givers: list[WeakMethod[Callable[[], bool]]] = []
        """Functions that give memory up."""
        self._blocks: Final[dict[int, _Entry]] = {}  # by offset
        self._exported: Final[dict[int, _Entry]] = {}  # by id
        self._forget: Final = _forgetting(self._blocks, self._exported)
        self._kept: Final[dict[int, tuple[ref[NDArray[Any]], Block]]] = {}  # by offset; see `keep`
        self._known_limit = _MIN_KNOWN
        self._known: Final[dict[int, int]] = {}  # memory of NumPy's that peers know: its id, its offset
        key = id(self)
        forks.stores[key] = ref(self, lambda _: forks.stores.pop(key, None))
        self._devices: Any = None
        self.open_devices: Callable[[], Any] | None = None
        """The function that opens the GPUs of the process, for `devices`."""

    def allocate(self, nbytes: int, alignment: int | None = None, *, commit: bool = True) -> Block:
        """Allocate a block of `nbytes` of shared memory. Its contents are undefined.

        The block's id is 32 bits of a counter and 32 random bits: a peer cannot guess the id of an object that it was
        not sent, and an id comes again only after 2**32 objects, and then with a probability of 2**-32.

        Args:
            nbytes: bytes, 0 allowed.
            alignment: bytes, a power of two; by default 64, and a page from four pages on.
            commit: whether to take memory from the system now, which takes 0.3 s for each GiB. Otherwise nobody touches
                the bytes before `commit`.

        Raises:
            OutOfMemory: the store is full, or the system is out of memory.
            NotInitialized: the store is closed.
            ValueError: `nbytes` is negative, or `alignment` is not a power of two.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        if alignment is None:
            alignment = _alignment(nbytes)
        if self._closed:
            raise NotInitialized("the store is closed: zcactor was shut down; use `async with zc.init():` again")
        hold = self._take(nbytes or 1, alignment)  # from here on the hold frees the bytes
        if commit:
            refused: tuple[str, BaseException | None] | None = None
            try:
                self.commit(hold.offset, 0, nbytes)
            except OutOfMemory as error:
                refused = error.note, error.__cause__
            if refused is not None:  # outside of the handler, as in `_take`
                del hold
                stats = self.stats()
                raise OutOfMemory(nbytes, stats.used, stats.capacity, stats.largest_free, refused[0]) from refused[1]
        block = Block(self, hold, nbytes)
        self._blocks[hold.offset] = block.entry
        return block

    def _take(self, nbytes: int, alignment: int) -> Hold:
        """Take bytes of the heap, after others have given memory up where it is full. The error is raised outside of
        the handlers: an object that keeps an error would also keep the traceback of its context, whose frames have the
        arrays of all callers."""
        try:
            return self.heap.take(nbytes, alignment)
        except OutOfMemory as error:
            full = error.with_traceback(None)
        if _given_up(self._givers):
            try:
                return self.heap.take(nbytes, alignment)
            except OutOfMemory as error:
                full = error.with_traceback(None)
        try:
            raise _with_remedy(full) from None
        finally:
            del full  # the error keeps this frame, which would keep the error

    def allocate_apart(self, nbytes: int, *, commit: bool = True) -> Block:
        """Allocate a block with pages of its own, which a fork can leave shared: others write to it, or read it, while
        it is filled. Otherwise like `allocate`."""
        return self.allocate(nbytes, mmap.PAGESIZE, commit=commit)

    def commit(self, offset: int, start: int, nbytes: int) -> None:
        """Take memory from the system for a part of the block at `offset`, which the caller holds. A part that has
        memory costs nothing. Any thread may call it; the event loop's thread leaves large parts to others.

        Args:
            offset: `Block.offset`.
            start, nbytes: the part.

        Raises:
            OutOfMemory: the system has no memory left.
        """
        try:
            self.arena.commit(offset + start, nbytes)
        except OutOfMemory:
            if not _given_up(self._givers):
                raise
        else:
            return
        self.arena.commit(offset + start, nbytes)

    @property
    def devices_in_use(self) -> Any:
        """The `zcactor.device.store.DeviceStore` of the process; None before anything has used a GPU."""
        return self._devices

    def devices(self) -> Any:
        """The `zcactor.device.store.DeviceStore` of the process, which is opened when it is first needed.

        Raises:
            DeviceUnavailable: GPUs are switched off, or the process has no runtime for them.
            ValueError: the options of fake GPUs in the setting ``gpu`` are malformed.
        """
        with self._lock:
            if self._devices is None:
                if self.open_devices is None:
                    raise DeviceUnavailable("this process has no GPUs: its store was made without a runtime")
                self._devices = self.open_devices()
            return self._devices

    def supply_extents(self, reader: bytes, places: Collection[int]) -> Any:
        """The extents of GPU memory around places, for a peer; see `zcactor.transport.local.extents`."""
        return None if self._devices is None else self._devices.supply(reader, places)

    def when_full(self, give_up: Callable[[], bool]) -> None:
        """Call `give_up`, a bound method, too, when an allocation does not fit. The function frees memory that is kept
        for later, and returns whether there was any. It is called on any thread, also for NumPy's own arrays. The store
        does not keep its object alive."""
        self._givers.append(WeakMethod(give_up))
        self.heap.when_full(partial(_given_up, self._givers))

    def empty(
        self,
        shape: SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex],
        dtype: DTypeLike = float,
        order: Literal["C", "F"] = "C",
        strides: Sequence[int] | None = None,
    ) -> NDArray[Any]:
        """Make an array in the store. Its elements are undefined, and its base is the root of a block of its own.

        Args:
            shape: elements along each axis; ``()`` is zero-d.
            dtype: any type whose elements are plain bytes: structured, datetime64, ml_dtypes and so on.
            order: row-major or column-major, unless `strides` are given.
            strides: bytes from one element to the next along each axis; may be negative.

        Raises:
            TypeError: `dtype` holds Python objects.
            ValueError: a length in `shape` is negative, or `strides` do not match `shape`.
            OutOfMemory: the store is full.
            NotInitialized: the store is closed.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(
                f"dtype {dtype} holds Python objects, which cannot lie in shared memory; pass such values as they are "
                "(they are pickled), or use a fixed-size dtype"
            )
        axes = tuple(map(operator.index, shape)) if isinstance(shape, tuple | list) else (operator.index(shape),)
        if axes and min(axes) < 0:
            raise ValueError(f"shape {axes} has a negative length")
        nbytes = prod(axes) * dtype.itemsize
        first = 0
        if strides is not None:
            if len(strides) != len(axes):
                raise ValueError(f"strides {tuple(strides)} do not match shape {axes}: one number of bytes per axis")
            if nbytes:
                reach = [(length - 1) * stride for length, stride in zip(axes, strides, strict=True)]
                first = -sum(distance for distance in reach if distance < 0)
                nbytes = first + sum(distance for distance in reach if distance > 0) + dtype.itemsize
        block = self.allocate(nbytes)
        array: NDArray[Any] = np.ndarray(axes, dtype, np.asarray(block), first, strides, order)
        block.array = ref(array)
        return array

    def block_over(self, hold: Hold, nbytes: int) -> Block:
        """Make a new object in memory that is already allocated, and in which no other object lives any more.

        The object has a new id, so that a reader of the former object can tell the two apart.
        """
        block = Block(self, hold, nbytes, ids.bits(62) | 1 << 62)
        self._blocks[hold.offset] = block.entry
        return block

    def block_of(self, array: object) -> tuple[Block, NDArray[np.uint8]] | None:
        """Return the block that `array` is a view of, and its root; None when `array` is not an array of this store.

        Only the chain of bases is searched, which finds every view that NumPy makes, of any shape and strides.
        `block_at` finds other libraries' views, and memory that is not owned through a block.
        """
        if not isinstance(array, np.ndarray):
            return None
        root = array
        while True:
            base: object = root.base
            if type(base) is Block:
                return (base, root) if base.store is self else None
            if isinstance(base, memoryview):
                base = base.obj
            if not isinstance(base, np.ndarray):
                return None
            root = base

    def block_at(self, low: int, high: int) -> Block | None:
        """Return the living block whose bytes contain the addresses ``[low, high)``, or None.

        Memory that NumPy has allocated in the store gets a block at the first request. Its bytes then stay as long as
        the array or the block does. All blocks of the same memory have the same id until a peer learns the id. A peer
        may keep a copy under that id. So the bytes become another object, with another id, once somebody could write to
        them again: after the block was dropped, or after the array's flags were set back.

        Memory that a fork has made private counts as outside the store, unless it was sealed before, and is unchanged.
        """
        offset = low - self.arena.address
        start = self.heap.around(offset) if 0 <= offset < self.capacity else -1
        if start < 0:
            return None
        block = self._living(self._blocks.get(start))
        if block is None:
            with self._lock:  # two threads that pass one array make one block
                block = self._living(self._blocks.get(start))
                if block is None:
                    hold = self.heap.adopt(start)
                    if hold is None:
                        return None
                    if hold.id in self._known:
                        block = self.block_over(hold, hold.nbytes)
                    else:
                        block = Block(self, hold, hold.nbytes)
                        self._blocks[start] = block.entry
                    block.of_numpy = True
        elif block.sealed and (kept := self._kept.get(start)) is not None:
            array = kept[0]()
            if array is not None and _flags(array).writeable:
                block = self.block_over(block.hold, block.nbytes)
                block.of_numpy = True
        if not block.is_seen:
            return None
        return block if high <= block.address + block.nbytes else None

    @staticmethod
    def _living(entry: _Entry | None) -> Block | None:
        return None if entry is None else entry()

    def keep(self, block: Block, array: NDArray[Any]) -> None:
        """Keep `block` for as long as `array`, which NumPy allocated, lives. The block need not be made again when the
        array is passed again, and leases that have ended in between change nothing."""
        if _flags(array).owndata:
            kept, offset = self._kept, block.offset
            # Runs before the array gives its memory back, so no other allocation can begin at that offset yet.
            kept[offset] = ref(array, lambda _: kept.pop(offset, None)), block

    def succeed(self, block: Block, made: Block) -> None:
        """Let `made` take the place of `block`, which lies in the same memory, for arrays that NumPy allocated."""
        kept = self._kept.get(block.offset)
        if kept is not None and kept[1] is block:
            self._kept[block.offset] = kept[0], made

    def take_over(self, offset: int) -> None:
        """Make NumPy's own array at `offset` a read-only view of its block for good, like a sealed array of `empty`.

        This is for a peer that does not map the arena and keeps a copy under the block's id. An array that owns its
        memory can be made writable by its flags and read-only again, which leaves no trace. An array that was moved
        since has other memory and stays as it is: nobody can write to its former memory.
        """
        kept = self._kept.get(offset)
        array = None if kept is None else kept[0]()
        if kept is None or array is None or not layout_is_known():
            return
        if _flags(array).owndata and hot.address(array) == kept[1].address:
            disown(array, kept[1])
            self._kept.pop(offset, None)  # the array keeps the block itself

    def contains(self, low: int, high: int) -> bool:
        """Whether the addresses ``[low, high)`` lie in one allocation of this store, which peers can read."""
        offset = low - self.arena.address
        start = self.heap.around(offset) if 0 <= offset < self.capacity else -1
        if start < 0 or self.heap.around(max(high - 1, low) - self.arena.address) != start:
            return False
        if not self.heap.is_private(start):
            return True
        block = self._living(self._blocks.get(start))
        return block is not None and block.is_seen

    def seal(self, block: Block, root: NDArray[Any] | None = None) -> None:
        """Turn a draft into a sealed block: nobody may write to it from now on. Idempotent.

        Args:
            block: a block of this store.
            root: its root array, if it has one, which becomes read-only for good, like `Block.array`. Other views keep
                their own flag, which the caller clears.
        """
        if not block.sealed and block.is_forked:
            self.write_back(block)
        block.sealed = True
        close_array(block.array)
        if root is not None:
            root.setflags(write=False)

    def write_back(self, block: Block) -> None:
        """Write the bytes of a block that a fork has made private to the arena's file, where peers read them. No array
        of a forked child lies over it: it was made by this package, and the fork came while it was filled."""
        view = memoryview((ctypes.c_char * block.nbytes).from_address(block.address))
        done = 0
        while done < block.nbytes:
            done += os.pwrite(self.arena.fd, view[done:], block.offset + done)

    def is_in_file(self, block: Block) -> bool:
        """Whether the arena's file has the same bytes as the memory of `block`, which a fork has made private."""
        part = bytearray(min(block.nbytes, _COMPARED))
        seen = memoryview((ctypes.c_char * block.nbytes).from_address(block.address)).cast("B")
        for at in range(0, block.nbytes, _COMPARED):
            there = memoryview(part)[: min(_COMPARED, block.nbytes - at)]
            if os.preadv(self.arena.fd, [there], block.offset + at) < len(there) or there != seen[at : at + len(there)]:
                return False
        return True

    def read_back(self, block: Block) -> None:
        """Read what a peer has written to the bytes of `block`, which was moved there, after a fork has made the memory
        private to this process."""
        view = memoryview((ctypes.c_char * block.nbytes).from_address(block.address))
        done = 0
        while done < block.nbytes:
            done += os.preadv(self.arena.fd, [view[done:]], block.offset + done)

    def show_blocks(self) -> None:
        """Tell the heap, before a fork, which blocks the program has arrays over. Others stay shared."""
        for entry in list(self._blocks.values()):
            block = entry()
            if block is not None:  # NumPy may have given its hold back: see `take_over`
                self.heap.show(block.offset, not block.written and (block.sealed or block.array is not None))

    def export(self, block: Block | Exportable) -> int:
        """Make `lookup` find the block for as long as it lives. Idempotent. Returns the block's id."""
        if not isinstance(block, Block):
            entry = self._exported[block.id] = _Entry(block, self._forget)
            entry.offset, entry.id = -1, block.id
            block.exported = True
            return block.id
        self._exported[block.id] = block.entry
        if block.of_numpy:
            self._known[block.hold.id] = block.offset
            if len(self._known) > self._known_limit:
                self._forget_known()
        block.exported = True
        return block.id

    def _forget_known(self) -> None:
        """Forget memory that has been given back. This runs whenever the entries have doubled since the last time, so
        its cost per export stays constant."""
        known = self._known.copy()
        latest = {offset: memory for memory, offset in known.items()}
        for memory, offset in known.items():
            if latest[offset] != memory or self.heap.around(offset) != offset:
                self._known.pop(memory, None)
        self._known_limit = max(_MIN_KNOWN, 2 * len(self._known))

    def lookup(self, block_id: int) -> Any:
        """The living exported block with that id, or None: a `Block`, or a `zcactor.device.memory.DeviceBlock`."""
        return self._living(self._exported.get(block_id))

    def stats(self) -> StoreStats:
        """The exact contents of the store at this moment."""
        heap = self.heap
        return StoreStats(heap.used, self.capacity, len(heap), heap.largest_free, heap.of_numpy, heap.committed)

    def close(self) -> None:
        """Refuse further allocations and give free memory back. Idempotent.

        Arrays stay valid, here and at peers that map them: blocks that are parked for such peers are neither freed nor
        punched. With the last array the memory is unmapped and the arena's descriptor closed.
        """
        self._closed = True
        self.parking.sweep()
        self.arena.close()
