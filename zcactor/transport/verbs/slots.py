"""Registered buffers of one size, and what stands at the head of the message in each.

A message of the control queue pair is one slot: a header and whole frames behind it. Frames are encoded where the
device sends them from, and parsed where it put them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from zcactor.transport.verbs.base import Device

__all__ = ["BYE", "CREDIT", "DATA", "HEADER_NBYTES", "PROBE", "SLOT_UNIT", "SlotArea", "pack_header", "read_header"]

_HEADER: Final = struct.Struct("<BBHIQ")
HEADER_NBYTES: Final = _HEADER.size
"""Bytes: magic, kind, credits returned, bytes that follow, number of the message. A multiple of 8, so frames stay
aligned."""
SLOT_UNIT: Final = 64
"""Bytes; slots have a multiple of it, so that no two share a cache line."""
_MAGIC: Final = 0x5A
DATA: Final = 0
"""Whole frames; takes a credit."""
CREDIT: Final = 1
"""Only returns credits."""
BYE: Final = 2
"""The last message of its sender."""
PROBE: Final = 3
"""The first message of a pair, which proves the path; takes a credit."""
_KINDS: Final = (DATA, CREDIT, BYE, PROBE)


def pack_header(view: memoryview, kind: int, credits: int, nbytes: int, sequence: int) -> None:
    """Write the header of a message of `nbytes` behind it at the start of `view`."""
    _HEADER.pack_into(view, 0, _MAGIC, kind, credits, nbytes, sequence)


def read_header(view: memoryview, received: int, expected: int) -> tuple[int, int, int]:
    """Check the header of a message of `received` bytes in all.

    Args:
        view: the slot.
        received: bytes, as the device counted them.
        expected: the number that comes next.

    Returns:
        Its kind, the credits that it returns, and the bytes behind the header.

    Raises:
        ProtocolError: it is no message of ours, or not the next one.
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
    """Equal slots in one piece of registered memory, which no peer can read.

    Args:
        device: registers it.
        count: slots.
        nbytes: bytes of each; rounded up to a multiple of `SLOT_UNIT`.

    Raises:
        OSError: the memory cannot be had, or not be registered (RLIMIT_MEMLOCK).
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
        self._anchor: ctypes.c_char | None = anchor  # the mapping cannot go while this exists
        self._region = device.register(self._address, count * self.nbytes, remote_read=False)
        self.lkey: Final = self._region.lkey

    def address(self, index: int) -> int:
        """Where slot `index` lies."""
        return self._address + index * self.nbytes

    def close(self) -> None:
        """Unregister it, and let go of the memory: a connection that has ended is in a cycle of references, and the
        collector, which counts objects and not bytes, would leave it there for hundreds of connections. Idempotent.

        Raises:
            OSError: the device refused.
        """
        self._region.close()
        self.views.clear()
        self._anchor = None
