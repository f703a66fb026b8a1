"""The table of seals: the owner's entries about objects that peers read, in memory that peers can READ.

A READ moves bytes, also when they are not those of the wanted object any more. So a reader READs the object's *seal*
when its last piece has arrived, and compares it. Bytes that were freed and used again cannot pass for the object. The
owner's card keeps no order between READs that are under way together, so the queue pair holds the READ of the seal back
until then (IBV_SEND_FENCE of ibv_post_send(3)). (The idea is the version word of one-sided key-value stores: Mitchell,
Geng and Li, "Using One-Sided RDMA Reads to Build a Fast, CPU-Efficient Key-Value Store", USENIX ATC 2013.)

An entry is zeroed when its object is freed, before the object's bytes are used again.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
from typing import TYPE_CHECKING, Final
from weakref import ref

from zcactor.logs import logger

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import Device

__all__ = ["SEALS_NBYTES", "SEAL_NBYTES", "SealTable", "read_seal"]

_SEAL: Final = struct.Struct("<QQQ8x")
SEAL_NBYTES: Final = _SEAL.size
"""Bytes of an entry: object id, offset in the arena, bytes; never across two cache lines."""
_COUNT: Final = 1 << 16
SEALS_NBYTES: Final = _COUNT * SEAL_NBYTES
"""Bytes of a table."""


def read_seal(seal: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return the object's id, its offset in the arena, and its bytes; all 0 when the object was freed."""
    object_id, offset, nbytes = _SEAL.unpack_from(seal)
    return object_id, offset, nbytes


class SealTable:
    """The table of one process. Any thread may call any method. Its memory is shared with forked children, because the
    device continues to use the pages that it has pinned. Private pages would be copied at a write after a fork.

    Args:
        device: the device that registers it.

    Raises:
        OSError: the memory cannot be registered.
    """

    def __init__(self, device: Device) -> None:
        self.count: Final = _COUNT
        self._memory = mmap.mmap(-1, _COUNT * SEAL_NBYTES)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self._region = device.register(ctypes.addressof(self._anchor), len(self._memory), remote_read=True)
        self.address: Final = self._region.address
        self.rkey: Final = self._region.rkey
        # Re-entrant: while an entry is made, another object may be collected, which clears its entry.
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._fresh = 1  # entry 0 means none
        self._of: dict[int, tuple[int, ref[object]]] = {}  # entry and object by its id
        self._abandoned = False
        self.without = 0
        """References to objects for which there was no entry."""

    @property
    def shortage(self) -> str:
        """A text about a full table; empty where it never was full."""
        if not self.without:
            return ""
        many = f"{self.without} references" if self.without > 1 else "1 reference"
        return (
            f"{many} went without a seal, as {self.count - 1} objects have one: readers cannot tell if they are freed"
        )

    def find(self, object_id: int) -> int:
        """Return the entry of an object; 0 without an entry."""
        entry, _ = self._of.get(object_id, (0, None))
        return entry

    def seal(self, object_id: int, offset: int, nbytes: int, holder: object) -> int:
        """Return the entry of an object, which is made if it is missing; 0 when the table is full.

        Args:
            object_id: the object's id.
            offset: bytes from the start of the arena.
            nbytes: bytes.
            holder: lives as long as the object. The entry is zeroed when the holder is freed, before the memory that it
                keeps.
        """
        if self._abandoned:
            return 0
        with self._lock:
            if object_id in self._of:
                return self._of[object_id][0]
            if self._free:
                entry = self._free.pop()
            elif self._fresh < _COUNT:
                entry = self._fresh
                self._fresh += 1
            else:
                self.without += 1
                if self.without == 1:
                    logger.warning(
                        "%d objects are shared by RDMA, and the table of seals is full: of further ones readers cannot "
                        "tell whether they were freed meanwhile; share fewer and larger arrays",
                        self.count - 1,
                    )
                return 0
            self._of[object_id] = entry, ref(holder, lambda _: self.clear(object_id))
            _SEAL.pack_into(self._memory, entry * SEAL_NBYTES, object_id, offset, nbytes)
            return entry

    def clear(self, object_id: int) -> None:
        """Zero the entry of an object that is about to be freed. Nothing happens without an entry."""
        if self._abandoned:
            return
        with self._lock:
            entry, _ = self._of.pop(object_id, (0, None))
            if entry:
                _SEAL.pack_into(self._memory, entry * SEAL_NBYTES, 0, 0, 0)
                self._free.append(entry)

    def abandon(self) -> None:
        """Never write to the table again, in a forked child. The parent shares it, and its objects live on when the
        child's copies end. Takes no lock, as a thread of the parent may hold it."""
        self._abandoned = True

    def close(self) -> None:
        """Unregister the table. Idempotent.

        Raises:
            OSError: the device refused.
        """
        self._region.close()
