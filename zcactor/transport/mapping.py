"""A peer's arena, mapped into this process piece by piece.

An arena has the capacity of its store as its size, of which most is never touched: 30 % of the host's memory, where
nothing else was asked for. An address space has room for a few hundred arenas of that size on a large host, and a
program may have a thousand peers. So `Mapping` maps *windows* of the file, where something lies that is read.

A window outlives the connection. It stays mapped until the last object over it is gone: a lease, or the `Mapped` of
bytes that are read or written for a while. The file's descriptor is kept as long, because private mappings of the same
bytes are made from it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, ref

from zcactor.errors import OutOfMemory, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["NOWHERE", "STEP_BITS", "ArenaFile", "Mapped", "Mapping", "PrivateMapping", "Window", "check_seals"]

# <linux/mman.h>: do not count the sparse arena, of which most is never touched, against the commit limit
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# <linux/falloc.h>; Python has no fallocate(2) with a mode
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap: Final = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_fallocate: Final = _libc.fallocate
_fallocate.restype = ctypes.c_int
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def check_seals(fd: int, nbytes: int) -> None:
    """Check that `fd` is a memfd of exactly `nbytes` bytes whose size is fixed by file seals.

    Without these seals a peer could truncate the file, and our next read of the mapping would end in SIGBUS.

    Raises:
        ProtocolError: `fd` is no memfd, lacks F_SEAL_SHRINK or F_SEAL_GROW (memfd_create(2)), or has another size.
    """
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's arena is not a memfd: it cannot be sealed") from error
    if seals & wanted != wanted:
        raise ProtocolError(f"the peer's arena is not sealed against resizing: its seals are {seals:#x}")
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise ProtocolError(f"the peer's arena has {size} bytes, not the {nbytes} it announced")


def _map(fd: int, offset: int, nbytes: int, access: int, kind: int, at: int | None = None) -> int:
    address = _mmap(at, nbytes, access, kind | _MAP_NORESERVE, fd, offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of an arena: {os.strerror(code)}")
    return int(address)


class ArenaFile:
    """The file of a peer's arena, which is closed with the last of its windows.

    Args:
        fd: an open file, usually a memfd. Its descriptor is duplicated; the caller closes its own.
        nbytes: bytes of the arena, more than 0.
        writable: whether it is mapped with write access; the descriptor must have it too.

    Raises:
        OSError: no descriptor is left.
    """

    __slots__ = ("__weakref__", "_windows", "fd", "nbytes", "writable")

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None:
        self.fd = -1
        self.fd = os.dup(fd)
        self.nbytes = nbytes
        self.writable = writable
        self._windows: dict[int, ref[Window]] = {}

    @property
    def windows(self) -> list[Window]:
        """The windows that are mapped."""
        return [window for each in self._windows.copy().values() if (window := each()) is not None]

    @property
    def leases(self) -> list[Any]:
        """The living leases on bytes of the arena. One that is being finalized on another thread may be among them."""
        found = [each() for window in self.windows for each in window.leases.copy().values()]
        return [lease for lease in found if lease is not None]

    def is_the_only_one(self) -> bool:
        """Whether no other process has the file open or maps it: only then the system grants a lease for writing
        (F_SETLEASE, fcntl(2)). The system counts open file descriptions, so each receiver of the descriptor is given
        one of its own.

        False also where the file is not writable, and where the system does not answer.
        """
        if not self.writable:
            return False
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def punch(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free the memory of the file except for the `kept` pages. All other bytes read as zeros from now on.

        Only for the only one that has the file open, whose owner has ended.

        Args:
            kept: offset and bytes of whole pages, in order.

        Raises:
            OSError: the system refused for some of the pages.
        """
        for low, nbytes in _others(kept, 0, self.nbytes):
            if _fallocate(self.fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, low, nbytes):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot give back {nbytes} bytes of an arena: {os.strerror(code)}")

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0 and not _is_finalizing():
            os.close(fd)


class _Use:
    """The use of a window by computations, which lasts as long as one of them holds this."""

    __slots__ = ("__weakref__", "window")

    def __init__(self, window: Window) -> None:
        self.window = window


class Mapped:
    """Bytes of a peer's arena at an address of this process. The address is valid as long as this object lives, also
    after the end of the connection and of the peer's process.

    Args:
        address: of the first byte; 0 where nothing is mapped.
        nbytes: number of bytes.
        owner: the object that owns the mapping, which a lease on the bytes keeps in the place of this one.
        use: the object that keeps everything where it is, as long as somebody reads or writes at the address.
    """

    __slots__ = ("address", "nbytes", "owner", "use")

    def __init__(self, address: int, nbytes: int, owner: object, use: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self.use = use


NOWHERE: Final = Mapped(0, 0, None, None)
"""The bytes of an arena that is not mapped, or is empty."""


_windows: Final[dict[int, ref[Window]]] = {}


def all_windows() -> list[Window]:
    """The windows of this process. Any thread may call it, also while another one makes windows."""
    return [window for each in _windows.copy().values() if (window := each()) is not None]


class Window:
    """A part of a peer's arena that is mapped, read-only unless its file is writable.

    Args:
        file: of the arena.
        low: bytes from the start of the arena to the window, whole pages.
        nbytes: bytes of the window, more than 0.

    Raises:
        OSError: the system refused (EACCES: the descriptor is read-only; ENOMEM: no address space).
    """

    __slots__ = ("__weakref__", "_use", "address", "base", "cache", "end", "file", "leases", "low", "nbytes")

    def __init__(self, file: ArenaFile, low: int, nbytes: int) -> None:
        self.address = 0
        """The address of the first byte in this process; 0 once unmapped."""
        self.file: ArenaFile | None = file
        """None once the file was given up."""
        self.low = low
        self.nbytes = nbytes
        self.end = low + nbytes
        """Offset of the byte behind the window in the arena."""
        self.leases: dict[int, ref[Any]] = {}
        """Leases on bytes of the window, by ``id``. The memory of all other bytes may be given up."""
        self.cache: ref[Mapping] | None = None
        """The mapping that takes further bytes from the window."""
        self._use: ref[_Use] | None = None
        access = mmap.PROT_READ | mmap.PROT_WRITE if file.writable else mmap.PROT_READ
        self.address = _map(file.fd, low, nbytes, access, mmap.MAP_SHARED)
        self.base = self.address - low
        """The address that offset 0 of the arena would have: that of each byte is this and its offset."""
        file._windows[id(self)] = ref(self)
        key = id(self)
        _windows[key] = ref(self, lambda _: _windows.pop(key, None))

    def make_private(self, low: int, nbytes: int) -> None:
        """Make whole pages of a writable window private, for a fork: other processes see no later writes to them, nor
        does this one see theirs. Arrays that the peer moves here from now on are mapped by another window.
        Any thread may call it.

        Args:
            low: bytes from the start of the arena, of any alignment.
            nbytes: bytes, more than 0.

        Raises:
            OSError: the system refused; the pages stay shared.
        """
        if self.file is None:
            return
        first = low - low % mmap.PAGESIZE
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        _map(self.file.fd, first, low + nbytes - first, access, kind, self.base + first)
        mapping = None if self.cache is None else self.cache()
        if mapping is not None:
            mapping.forget(self)

    @property
    def in_use(self) -> bool:
        """Whether somebody has a `Mapped` of its bytes. Everything has to stay where it is then."""
        return self._use is not None and self._use() is not None

    def map(self, offset: int, nbytes: int) -> Mapped:
        """Return bytes of the window. Called on the loop's thread.

        Args:
            offset: bytes from the start of the arena.
            nbytes: number of bytes. They lie in the window.
        """
        use = None if self._use is None else self._use()
        if use is None:
            use = _Use(self)
            self._use = ref(use)
        return Mapped(self.base + offset, nbytes, self, use)

    def private(self, offset: int, nbytes: int, keep: object) -> PrivateMapping | None:
        """Map bytes of the window again, private and writable. Any thread may call it.

        Args:
            offset: bytes from the start of the arena, of any alignment.
            nbytes: bytes, more than 0.
            keep: see `PrivateMapping`.

        Returns:
            None when the system has no address space left, or the file was given up.
        """
        file = self.file
        if file is None or nbytes <= 0 or not self.low <= offset <= self.end - nbytes:
            return None
        try:
            return PrivateMapping.of(file.fd, offset, nbytes, keep)
        except OSError:
            return None

    def replace(self, low: int, nbytes: int, fd: int, offset: int) -> None:
        """Replace pages of the window by those of another file, read-only, in one step.

        Args:
            low: bytes from the start of the arena, whole pages.
            nbytes: whole pages.
            fd: a file with the same bytes; stays the caller's.
            offset: the position of the bytes in that file.

        Raises:
            OSError: the system refused; the old pages stay.
        """
        _map(fd, offset, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, self.base + low)

    def give_up(self, kept: Iterable[tuple[int, int]]) -> None:
        """Unmap the file except for replaced pages, and let go of its descriptor. An access to any other byte faults
        from now on.

        The addresses stay reserved until the window is closed, so that nothing else is mapped there.

        Args:
            kept: offset in the arena and bytes of the replaced pages, in order.

        Raises:
            OSError: the system refused for some of the pages.
        """
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        for low, nbytes in _others(kept, self.low, self.end):
            _map(-1, 0, nbytes, _PROT_NONE, nothing, self.base + low)
        self._let_go()

    def close(self) -> None:
        """Unmap. Idempotent. No array may point into the window then: an access would fault."""
        address, self.address = self.address, 0
        if address:
            _munmap(address, self.nbytes)
        self._let_go()

    def _let_go(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file._windows.pop(id(self), None)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the kernel unmaps in a safe order. Before that, another finalizer may still read an array of the same
        # reference cycle.
        if not _is_finalizing():
            self.close()


def _others(kept: Iterable[tuple[int, int]], at: int, end: int) -> Iterator[tuple[int, int]]:
    """The gaps between the `kept` pages from `at` to `end`: offset and bytes of each."""
    for low, nbytes in (*kept, (-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, 0)):
        if low > at:
            yield at, low - at
        at = low + nbytes


STEP_BITS: Final = 29
"""Windows begin at multiples of a step and are two steps long, so that bytes which are no more than a step lie in the
window that their first byte names. A step has at least 512 MiB, which is 2 to this power: all that a process reads lies
in a few windows then, whose page tables stay; and a thousand peers with one window each take 1 TiB of the 128 TiB that
an address space of 47 bits has."""
_MOST_NBYTES: Final = 8 << 40
"""Bytes of windows in a process. Beyond them those are unmapped that nothing points into: 8 of the 128 TiB leave room
for the process's own arena and for all else."""


class Mapping:
    """The windows through which a connection sees its peer's arena. Used on the loop's thread.

    Each window that was made is kept, because most programs use the same bytes again, until windows of this process
    take much address space, or the system has none left. Then those are dropped that nothing points into.

    Args:
        fd, nbytes, writable: as for `ArenaFile`.

    Raises:
        OSError: no descriptor is left.
    """

    __slots__ = ("__weakref__", "file", "windows")

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None:
        self.file = ArenaFile(fd, nbytes, writable=writable)
        self.windows: dict[int | tuple[int, int], Window] = {}
        """Windows of two smallest steps by the number of their first step; others by the bits of their steps too."""
        _space.mappings.add(self)

    def window(self, offset: int, nbytes: int) -> Window:
        """Return the window that has bytes of the arena, which is mapped where it was not.

        Args:
            offset: bytes from the start of the arena.
            nbytes: number of bytes. They lie in the arena.

        Raises:
            OutOfMemory: there is no address space for it, or no mapping is left to this process.
        """
        size = self.file.nbytes
        bits = max(STEP_BITS, (nbytes - 1).bit_length())
        step = min(offset, size - 1) >> bits
        key = step if bits == STEP_BITS else (bits, step)
        found = self.windows.get(key)
        if found is None:
            low = step << bits
            found = _space.made(self.file, low, min(2 << bits, size - low))
            if found is None:  # no room for all of it, but perhaps for the bytes alone
                low = offset - offset % mmap.PAGESIZE
                return _space.alone(self.file, low, max(offset + nbytes - low, 1))
            found.cache = ref(self)
            self.windows[key] = found
        return found

    def map(self, offset: int, nbytes: int) -> Mapped:
        """Return bytes of the arena, see `window`.

        Raises:
            OutOfMemory: as for `window`.
        """
        window = self.windows.get(offset >> STEP_BITS)
        if window is None or offset + nbytes > window.end:
            window = self.window(offset, nbytes)
        return window.map(offset, nbytes)

    def forget(self, window: Window) -> None:
        """Map no further bytes by `window`. Any thread may call it."""
        for key, found in self.windows.copy().items():
            if found is window:
                self.windows.pop(key, None)

    def drop_unused(self) -> int:
        """Drop the windows that nothing points into. Returns the bytes of the other ones."""
        used = 0
        for key, window in list(self.windows.items()):
            if window.leases or window.in_use:
                used += window.nbytes
            else:
                self.windows.pop(key, None)
        return used


class _Space:
    """The address space that the windows of this process take."""

    def __init__(self) -> None:
        self.mappings: WeakSet[Mapping] = WeakSet()
        self._nbytes = 0
        self._limit = _MOST_NBYTES

    def made(self, file: ArenaFile, low: int, nbytes: int) -> Window | None:
        """Map a window; None where there is no room for it."""
        if self._nbytes + nbytes > self._limit:
            self._drop_unused()
        self._nbytes += nbytes
        for again in (True, False):
            try:
                return Window(file, low, nbytes)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                if again:
                    self._drop_unused()
        return None

    @staticmethod
    def alone(file: ArenaFile, low: int, nbytes: int) -> Window:
        """Map a window for single bytes, after `made` has found no room.

        Raises:
            OutOfMemory: there is none for them either.
        """
        try:
            return Window(file, low, nbytes)
        except OSError as error:
            note = f"{error.strerror}; raise the limit of address space (ulimit -v) or of mappings (vm.max_map_count)"
            raise OutOfMemory(nbytes, 0, 0, 0, note) from error

    def _drop_unused(self) -> None:
        self._nbytes = sum([mapping.drop_unused() for mapping in list(self.mappings)])
        self._limit = max(_MOST_NBYTES, 2 * self._nbytes)  # so that few windows need a look at all of them


_space: Final = _Space()


class PrivateMapping:
    """Bytes of a file, writable and private: no other process sees what is written (mmap(2), MAP_PRIVATE).

    The system copies only pages that are written to. All others show the file, so the caller makes sure that no other
    process changes those bytes meanwhile. The object is the base of an array, by NumPy's array interface, and unmaps
    when it is gone.

    Args:
        address: where whole pages are mapped.
        length: bytes of these pages.
        inside: bytes before the first byte of the array.
        nbytes: bytes of the array.
        keep: an object that keeps other processes from changing the bytes.
    """

    __slots__ = ("__array_interface__", "_address", "_keep", "_length")

    def __init__(self, address: int, length: int, inside: int, nbytes: int, keep: object) -> None:
        self._address = address
        self._length = length
        self._keep = keep
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + inside, False),
            "version": 3,
        }

    @classmethod
    def of(cls, fd: int, offset: int, nbytes: int, keep: object) -> PrivateMapping:
        """Map `nbytes` of `fd` at `offset`, of any alignment. The descriptor may be read-only, and stays the caller's.

        Raises:
            OSError: the system refused.
        """
        inside = offset % mmap.PAGESIZE
        length = inside + nbytes
        address = _map(fd, offset - inside, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
        return cls(address, length, inside, nbytes, keep)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():
            _munmap(self._address, self._length)
