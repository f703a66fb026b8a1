"""Tags of bytes that are read by RDMA, which the owner takes no part in: the reader asks for them afterwards.

A READ brings bytes past both processors, so nothing on its way can be told from what the owner has. Where bytes are to
be authenticated the reader asks, over the sealed socket, for a tag of each MiB of them, makes the same of what has come
and compares, before anybody gets to see it. A tag is that of AES-256-GCM (NIST SP 800-38D): the bytes are its
associated data, its plain text says of what they are part, and its ciphertext is not used. The nonce is a count of the
owner's, which its answer names.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Final

from zcactor.transport.sealing import TAG_NBYTES

if TYPE_CHECKING:
    from zcactor.transport.sealing import Exporter

__all__ = ["CHUNK_NBYTES", "REACH_NBYTES", "ReadTags", "tags_nbytes"]

CHUNK_NBYTES: Final = 1 << 20
"""Bytes under one tag: they stay in a core's cache while it is made."""
REACH_NBYTES: Final = 128 * CHUNK_NBYTES
"""Bytes that one question is about: its answer has 2 KiB."""

_USES: Final = 26
"""Bits of the tags by one key, which are 64 TiB at most; then comes the next one."""
_NONCE: Final = struct.Struct("<4xQ")
_EPOCH: Final = struct.Struct("<Q")
_CHUNK: Final = struct.Struct("<QQQQ")
"""Object id, offset in the arena, the chunk's number in its answer, bytes."""
_CONNECTOR: Final = b"zcactor 3: bytes of the connector that are read by RDMA"
_ACCEPTOR: Final = b"zcactor 3: bytes of the acceptor that are read by RDMA"


def tags_nbytes(nbytes: int) -> int:
    """Bytes of all tags of so many bytes."""
    return TAG_NBYTES * -(-nbytes // CHUNK_NBYTES)


class ReadTags:
    """Tags of both ends of one connection. `begin` is for the loop's thread, and the others for any. In a forked child
    there are none, as the exporter has forgotten its secret.

    Args:
        exporter: of the connection over which the ends met, which makes one connection by RDMA and no more.
        leads: whether this end is the connector.
    """

    __slots__ = ("_count", "_exporter", "_labels")

    def __init__(self, exporter: Exporter, *, leads: bool) -> None:
        self._exporter = exporter
        self._labels = (_CONNECTOR, _ACCEPTOR) if leads else (_ACCEPTOR, _CONNECTOR)
        self._count = 0

    def begin(self, nbytes: int) -> int:
        """The count of the first tag of so many bytes of ours; it and those behind it belong to these."""
        first = self._count
        self._count += tags_nbytes(nbytes) // TAG_NBYTES  # before the use: whatever happens in it, they are gone
        return first

    def of_ours(self, first: int, object_id: int, offset: int, address: int, nbytes: int) -> bytes:
        """The tags of bytes of ours.

        Args:
            first: from `begin`.
            object_id: of the object that they are part of.
            offset: from the start of the arena.
            address: where they are.
            nbytes: at most `REACH_NBYTES`.

        Raises:
            ForkedProcess: this is a forked child.
        """
        return self._make(self._labels[0], first, object_id, offset, address, nbytes)

    def of_theirs(self, first: int, object_id: int, offset: int, address: int, nbytes: int) -> bytes:
        """The tags that the peer made, if its bytes are those at `address` here. Arguments as of `of_ours`."""
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
