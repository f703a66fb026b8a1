"""Encrypted messages: each SEND is one record, which is encrypted into its slot and decrypted into memory of its own.

A record is like those of `zcactor.transport.stream.record_layer`: the number of bytes (u32), the ciphertext by
AES-256-GCM, and the tag. The plain text is the message with its header, which is the slot's content without encryption.
The nonce counts the records of a direction, and each has a `KeyChain`, which comes from the exporter of the connection
over which the two ends met, with a label of its own.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import ForkedProcess, ProtocolError
from zcactor.transport.stream.aes import decryption, encryption
from zcactor.transport.stream.record_layer import HEADER_NBYTES, RECORD_NBYTES, KeyChain, Secret

if TYPE_CHECKING:
    from zcactor.transport.stream.aes import Apply
    from zcactor.transport.stream.record_layer import Exporter

__all__ = ["Records"]

_CONNECTOR: Final = b"zcactor 3: RDMA messages of the connector"
_ACCEPTOR: Final = b"zcactor 3: RDMA messages of the acceptor"
_LENGTH: Final = struct.Struct("<I")
_NONCE: Final = struct.Struct("<4xQ")
_FORKED: Final = "this connection belongs to the process that forked this one: its keys cannot be used here"


class Records(Secret):
    """The encryption of one control queue pair, in both directions.

    Args:
        exporter: the exporter of the connection over which the ends met, which leads to one connection by RDMA only.
        leads: whether this end is the connector.
    """

    __slots__ = ("_decrypt", "_encrypt", "_invalid", "_keys", "_opened", "_sealed")

    def __init__(self, exporter: Exporter, *, leads: bool) -> None:
        from cryptography.exceptions import InvalidTag

        super().__init__()
        connectors, acceptors = exporter.keys(b"", _CONNECTOR, _ACCEPTOR)
        ours, theirs = (connectors, acceptors) if leads else (acceptors, connectors)
        self._keys = KeyChain(ours), KeyChain(theirs)
        self._encrypt: Apply | None = encryption(self._keys[0].take())
        self._decrypt: Apply | None = decryption(self._keys[1].take())
        self._invalid = InvalidTag
        self._sealed = self._opened = 0

    def seal_into(self, slot: memoryview, message: memoryview) -> int:
        """Write the next record to the start of `slot`. Returns its bytes. Two threads must not call it at the same
        time.

        Args:
            slot: memory, at least `RECORD_NBYTES` longer than the message.
            message: the plain text, not empty.

        Raises:
            ForkedProcess: this is a forked child.
        """
        if self._encrypt is None:
            raise ForkedProcess(_FORKED)
        if self._sealed == self._keys[0].until:
            self._encrypt = encryption(self._keys[0].take())
        header, nonce = _LENGTH.pack(len(message)), _NONCE.pack(self._sealed)
        self._sealed += 1  # before the use, so that an error does not repeat the nonce
        body = self._encrypt(nonce, bytes(message), header)
        end = HEADER_NBYTES + len(body)
        slot[:HEADER_NBYTES] = header
        slot[HEADER_NBYTES:end] = body
        return end

    def open(self, slot: memoryview, received: int) -> memoryview:
        """Decrypt the next record into memory of its own.

        Args:
            slot: the slot of the received record.
            received: bytes of the record, as counted by the device.

        Raises:
            ProtocolError: it is not the peer's next record. No further record can be decrypted after that.
            ForkedProcess: this is a forked child.
        """
        if self._decrypt is None:
            raise ForkedProcess(_FORKED)
        nbytes = received - RECORD_NBYTES
        record = bytes(slot[:received])
        if nbytes <= 0 or _LENGTH.unpack_from(record)[0] != nbytes:
            raise ProtocolError(f"the peer sent a message of {received} bytes that is no sealed record of its length")
        if self._opened == self._keys[1].until:
            self._decrypt = decryption(self._keys[1].take())
        try:
            message = self._decrypt(_NONCE.pack(self._opened), record[HEADER_NBYTES:], record[:HEADER_NBYTES])
        except self._invalid:
            raise ProtocolError(
                f"message {self._opened} from the peer does not open: somebody forged, changed, repeated or dropped one"
            ) from None
        self._opened += 1
        return memoryview(message)

    def forget(self) -> None:
        """See `zcactor.transport.stream.record_layer.Secret.forget`."""
        self._encrypt = self._decrypt = None
