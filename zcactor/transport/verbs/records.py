"""Sealed messages: each SEND is one record, encrypted into its slot and opened into memory of its own.

A record is as those of `zcactor.transport.sealing`: the bytes of the message (u32), its ciphertext by AES-256-GCM, and
the tag. The message is what would be the slot's content otherwise, its header included; the nonce counts the records of
a direction. The keys come from the exporter of the connection over which the two ends met, under labels of their own.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ForkedProcess, ProtocolError
from zcactor.transport.aes import decryption, encryption
from zcactor.transport.sealing import HEADER_NBYTES, TAG_NBYTES, Secret

if TYPE_CHECKING:
    from zcactor.transport.aes import Apply
    from zcactor.transport.sealing import Exporter

__all__ = ["RECORD_NBYTES", "Records"]

RECORD_NBYTES: Final = HEADER_NBYTES + TAG_NBYTES
"""Bytes of a record beside the message."""
_CONNECTOR: Final = b"zcactor 3: RDMA messages of the connector"
_ACCEPTOR: Final = b"zcactor 3: RDMA messages of the acceptor"
_LENGTH: Final = struct.Struct("<I")
_NONCE: Final = struct.Struct("<4xQ")
_FORKED: Final = "this connection belongs to the process that forked this one: its keys cannot be used here"


class Records(Secret):
    """Both directions of one control queue pair.

    Args:
        exporter: of the connection over which the ends met, which makes one connection by RDMA and no more.
        leads: whether this end is the connector.
    """

    __slots__ = ("_decrypt", "_encrypt", "_invalid", "_opened", "_sealed")

    def __init__(self, exporter: Exporter, *, leads: bool) -> None:
        from cryptography.exceptions import InvalidTag

        super().__init__()
        connectors, acceptors = exporter.keys(b"", _CONNECTOR, _ACCEPTOR)
        ours, theirs = (connectors, acceptors) if leads else (acceptors, connectors)
        self._encrypt: Apply | None = encryption(ours)
        self._decrypt: Apply | None = decryption(theirs)
        self._invalid = InvalidTag
        self._sealed = self._opened = 0

    def seal_into(self, slot: memoryview, message: memoryview) -> int:
        """Write the next record to the start of `slot`; returns its bytes. Not for two threads at once.

        Args:
            slot: at least `RECORD_NBYTES` longer than the message.
            message: not empty.

        Raises:
            ForkedProcess: this is a forked child.
        """
        if self._encrypt is None:
            raise ForkedProcess(_FORKED)
        header, nonce = _LENGTH.pack(len(message)), _NONCE.pack(self._sealed)
        self._sealed += 1  # before the use: whatever happens in it, the nonce is gone
        body = self._encrypt(nonce, bytes(message), header)
        end = HEADER_NBYTES + len(body)
        slot[:HEADER_NBYTES] = header
        slot[HEADER_NBYTES:end] = body
        return end

    def open(self, slot: memoryview, received: int) -> memoryview:
        """The message of the next record, in memory of its own.

        Args:
            slot: what was received.
            received: bytes, as the device counted them.

        Raises:
            ProtocolError: the peer did not seal it as its next one. Nothing can be opened after that.
            ForkedProcess: this is a forked child.
        """
        if self._decrypt is None:
            raise ForkedProcess(_FORKED)
        nbytes = received - RECORD_NBYTES
        record = bytes(slot[:received])
        if nbytes <= 0 or _LENGTH.unpack_from(record)[0] != nbytes:
            raise ProtocolError(f"the peer sent a message of {received} bytes that is no sealed record of its length")
        try:
            message = self._decrypt(_NONCE.pack(self._opened), record[HEADER_NBYTES:], record[:HEADER_NBYTES])
        except self._invalid:
            raise ProtocolError(
                f"message {self._opened} from the peer does not open: somebody forged, changed, repeated or dropped one"
            ) from None
        self._opened += 1
        return memoryview(message)

    def forget(self) -> None:
        """See `zcactor.transport.sealing.Secret.forget`."""
        self._encrypt = self._decrypt = None
