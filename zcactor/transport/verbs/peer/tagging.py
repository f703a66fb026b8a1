"""Tags of bytes that were read by RDMA: the owner takes no part in a READ, so the reader asks for tags afterwards.

A READ passes both processors, so a change on its way is not noticed. Where bytes have to be authenticated, the reader
asks, over the encrypted socket, for a tag of each MiB. It makes the tags of the received bytes and compares them,
before the bytes are used. A tag is that of AES-256-GCM (NIST SP 800-38D): the bytes are its associated data, its plain
text is their place, and its ciphertext is not used. The nonce is a counter of the owner, which the answer carries.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Final

from zcactor.transport.stream.record_layer import TAG_NBYTES

if TYPE_CHECKING:
    from zcactor.transport.stream.record_layer import Exporter

__all__ = ["CHUNK_NBYTES", "REACH_NBYTES", "ReadTags", "tags_nbytes"]

CHUNK_NBYTES: Final = 1 << 20
"""Bytes under one tag. They stay in a core's cache while it is made."""
REACH_NBYTES: Final = 128 * CHUNK_NBYTES
"""The most bytes of one question. Its answer has 2 KiB."""

_USES: Final = 26
"""Bits of the number of tags under one key, which are 64 TiB at most. After that the next key is used."""
_NONCE: Final = struct.Struct("<4xQ")
_EPOCH: Final = struct.Struct("<Q")
_CHUNK: Final = struct.Struct("<QQQQ")
"""Object id, offset in the arena, the chunk's number in its answer, bytes."""
_CONNECTOR: Final = b"zcactor 3: bytes of the connector that are read by RDMA"
_ACCEPTOR: Final = b"zcactor 3: bytes of the acceptor that are read by RDMA"


def tags_nbytes(nbytes: int) -> int:
    """Return the bytes of all tags for so many bytes."""
    return TAG_NBYTES * -(-nbytes // CHUNK_NBYTES)


class ReadTags:
    """The tags of both ends of one connection. `begin` runs on the loop's thread, and any thread may call the other
    methods. A forked child cannot make tags, as the exporter has dropped its secret.

    Args:
        exporter: the exporter of the connection over which the ends met, which leads to one connection by RDMA only.
        leads: whether this end is the connector.
    """

    __slots__ = ("_count", "_exporter", "_labels")

    def __init__(self, exporter: Exporter, *, leads: bool) -> None:
        self._exporter = exporter
        self._labels = (_CONNECTOR, _ACCEPTOR) if leads else (_ACCEPTOR, _CONNECTOR)
        self._count = 0

    def begin(self, nbytes: int) -> int:
        """Reserve the counts of the tags of so many bytes of ours. Returns the first one."""
        first = self._count
        self._count += tags_nbytes(nbytes) // TAG_NBYTES  # before the use, so that an error does not repeat a nonce
        return first

    def of_ours(self, first: int, object_id: int, offset: int, address: int, nbytes: int) -> bytes:
        """Make the tags of bytes of ours.

        Args:
            first: the result of `begin`.
            object_id: the id of their object.
            offset: their offset in the arena.
            address: their address in this process.
            nbytes: their number, at most `REACH_NBYTES`.

        Raises:
            ForkedProcess: this is a forked child.
        """
        return self._make(self._labels[0], first, object_id, offset, address, nbytes)

    def of_theirs(self, first: int, object_id: int, offset: int, address: int, nbytes: int) -> bytes:
        """Make the tags that the peer has made if its bytes are those at `address` here. Arguments as for `of_ours`."""
        return self._make(self._labels[1], first, object_id, offset, address, nbytes)

    def _make(self, label: bytes, first: int, object_id: int, offset: int, address: int, nbytes: int) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        (key,) = self._exporter.keys(_EPOCH.pack(first >> _USES), label)
        encrypt, view = AESGCM(key).encrypt, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        made = bytearray()
        for number, start in enumerate(range(0, nbytes, CHUNK_NBYTES)):
            chunk = view[start : start + CHUNK_NBYTES]
            text = _CHUNK.pack(object_id, offset + start, number, len(chunk))
            made += encrypt(_NONCE.pack(first + number), text, chunk)[-TAG_NBYTES:]
        return bytes(made)
