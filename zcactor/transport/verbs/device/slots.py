"""Slots: registered buffers of one size, and the header of the message in each.

A message of the control queue pair is one slot: a header, and whole frames behind it. Frames are encoded in the memory
that the device sends from, and parsed in the memory that it wrote to.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import Device

__all__ = ["BYE", "CREDIT", "DATA", "HEADER_NBYTES", "PROBE", "SLOT_UNIT", "SlotArea", "pack_header", "read_header"]

_HEADER: Final = struct.Struct("<BBHIQ")
HEADER_NBYTES: Final = _HEADER.size
"""Bytes of the header: magic, kind, returned credits, bytes of the frames, and the number of the message. They are a
multiple of 8, so frames stay aligned."""
SLOT_UNIT: Final = 64
"""Bytes. The size of a slot is a multiple of it, so that two slots never share a cache line."""
_MAGIC: Final = 0x5A
DATA: Final = 0
"""Kind of a message with whole frames, which takes a credit."""
CREDIT: Final = 1
"""Kind of a message that only returns credits."""
BYE: Final = 2
"""Kind of the last message of a sender."""
PROBE: Final = 3
"""Kind of the first message, which proves the path and takes a credit."""
_KINDS: Final = (DATA, CREDIT, BYE, PROBE)


def pack_header(view: memoryview, kind: int, credits: int, nbytes: int, sequence: int) -> None:
    """Write a header to the start of `view`, of a message with `nbytes` behind it."""
    _HEADER.pack_into(view, 0, _MAGIC, kind, credits, nbytes, sequence)


def read_header(view: memoryview, received: int, expected: int) -> tuple[int, int, int]:
    """Check the header of a message of `received` bytes in all.

    Args:
        view: the slot.
        received: bytes of the message, as counted by the device.
        expected: the number of the next message.

    Returns:
        The kind, the returned credits, and the bytes behind the header.

    Raises:
        ProtocolError: the bytes are no message, or not the next one.
    """
    if received < HEADER_NBYTES:
        raise ProtocolError(f"the peer sent a message of {received} bytes; a header alone has {HEADER_NBYTES}")
    magic, kind, credits, nbytes, sequence = _HEADER.unpack_from(view)
    if magic != _MAGIC or kind not in _KINDS or nbytes != received - HEADER_NBYTES:
        raise ProtocolError(
            f"the peer sent a message of {received} bytes that begins with {bytes(view[:HEADER_NBYTES])!r}, which is "
            "no header of its length"
        )
    if sequence != expected:
        raise ProtocolError(f"the peer sent message {sequence}, and {expected} comes next")
    return kind, credits, nbytes


class SlotArea:
    """Equal slots in one block of registered memory, which no peer can read.

    Args:
        device: the device that registers it.
        count: number of slots.
        nbytes: bytes of each; rounded up to a multiple of `SLOT_UNIT`.

    Raises:
        OSError: the memory cannot be allocated, or cannot be registered (RLIMIT_MEMLOCK).
    """

    def __init__(self, device: Device, count: int, nbytes: int) -> None:
        self.count: Final = count
        self.nbytes: Final = (nbytes + SLOT_UNIT - 1) & -SLOT_UNIT
        memory = mmap.mmap(-1, count * self.nbytes)
        view = memoryview(memory)
        self.views: Final = [view[i * self.nbytes : (i + 1) * self.nbytes] for i in range(count)]
        """The bytes of each slot."""
        anchor = ctypes.c_char.from_buffer(memory)
        self._address: Final = ctypes.addressof(anchor)
        self._anchor: ctypes.c_char | None = anchor  # keeps the mapping
        self._region = device.register(self._address, count * self.nbytes, remote_read=False)
        self.lkey: Final = self._region.lkey

    def address(self, index: int) -> int:
        """Return the address of slot `index`."""
        return self._address + index * self.nbytes

    def close(self) -> None:
        """Unregister the memory and free it. A connection that has ended is in a cycle of references, and the garbage
        collector counts objects and not bytes, so it would keep the memory of hundreds of connections. Idempotent.

        Raises:
            OSError: the device refused.
        """
        self._region.close()
        self.views.clear()
        self._anchor = None
