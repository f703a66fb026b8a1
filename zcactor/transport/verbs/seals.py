"""The table of seals: what stands at the owner about each object that peers may read, where they can read it.

A READ moves bytes whether or not they are still those of the object that the reader means. So a reader, behind the last
piece of the object, READs the object's *seal* through the same queue pair, which keeps the order, and compares: bytes
that were freed and used again cannot pass for the object. (The idea is the version word of one-sided key-value stores:
Mitchell, Geng and Li, "Using One-Sided RDMA Reads to Build a Fast, CPU-Efficient Key-Value Store", USENIX ATC 2013.)

An entry is zeroed when its object is gone, before the object's bytes are free.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
import threading
from typing import TYPE_CHECKING, Final
from weakref import ref

if TYPE_CHECKING:
    from zcactor.transport.verbs.base import Device

__all__ = ["SEALS_NBYTES", "SEAL_NBYTES", "Seals", "read_seal"]

logger = logging.getLogger("zcactor")

_SEAL: Final = struct.Struct("<QQQ8x")
SEAL_NBYTES: Final = _SEAL.size
"""Bytes of an entry: object id, offset in the arena, bytes; never across two cache lines."""
_COUNT: Final = 1 << 16
SEALS_NBYTES: Final = _COUNT * SEAL_NBYTES
"""Bytes of a table."""


def read_seal(seal: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """The object's id, its offset in the arena, and its bytes; all 0 when there is no such object any more."""
    object_id, offset, nbytes = _SEAL.unpack_from(seal)
    return object_id, offset, nbytes


class Seals:
    """One process's table. Any thread may call any method. It lies in memory that forked children share, because a
    device goes on using the pages that it pinned; a private one would be another's after a fork and a write.

    Args:
        device: registers it.

    Raises:
        OSError: it cannot be registered.
    """

    def __init__(self, device: Device) -> None:
        self.count: Final = _COUNT
        self._memory = mmap.mmap(-1, _COUNT * SEAL_NBYTES)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self._region = device.register(ctypes.addressof(self._anchor), len(self._memory), remote_read=True)
        self.address: Final = self._region.address
        self.rkey: Final = self._region.rkey
        # Re-entrant: an object may be collected, which clears its entry, while another one's is being made.
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._fresh = 1  # entry 0 means none
        self._of: dict[int, tuple[int, ref[object]]] = {}  # entry and object by its id
        self._abandoned = False
        self.without = 0
        """References to objects for which there was no entry."""

    @property
    def shortage(self) -> str:
        """That the table was full, for people; empty where it never was."""
        if not self.without:
            return ""
        many = f"{self.without} references" if self.without > 1 else "1 reference"
        return (
            f"{many} went without a seal, as {self.count - 1} objects have one: readers cannot tell if they are freed"
        )

    def find(self, object_id: int) -> int:
        """The entry of an object; 0 when it has none."""
        entry, _ = self._of.get(object_id, (0, None))
        return entry

    def seal(self, object_id: int, offset: int, nbytes: int, holder: object) -> int:
        """The entry of an object, made if need be; 0 when the table is full, and the object goes without.

        Args:
            object_id: the object's id.
            offset: bytes from the start of the arena.
            nbytes: bytes.
            holder: lives as long as the object does; the entry is zeroed when it is lost, before the memory that only
                it keeps is free.
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
        """The object is about to be gone. Nothing happens when it has no entry."""
        if self._abandoned:
            return
        with self._lock:
            entry, _ = self._of.pop(object_id, (0, None))
            if entry:
                _SEAL.pack_into(self._memory, entry * SEAL_NBYTES, 0, 0, 0)
                self._free.append(entry)

    def abandon(self) -> None:
        """In a forked child: write to the table no more. It is shared with the parent, whose objects live on when the
        child's copies of them end. Takes no lock, as a thread that is not here may hold it."""
        self._abandoned = True

    def close(self) -> None:
        """Unregister it. Idempotent.

        Raises:
            OSError: the device refused.
        """
        self._region.close()
