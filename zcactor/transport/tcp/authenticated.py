"""Data sockets of an encrypted connection: requests, answers and the bytes themselves are authenticated.

The keys come from the connection's exporter and from the transcript of the data socket's own handshake. So they differ
for each socket, only the two ends of the connection know them, and they take no key exchange. Each direction has one
key after the other (`zcactor.transport.stream.record_layer.KeyChain`), and a nonce counts its tags. So bytes cannot be
changed, inserted, repeated, or moved to another socket. In order::

    puller -> owner   object id (u64)  offset (u64)  length (u64, its top bit: tags are demanded, the next: none are)
                      tag (16)
    owner  -> puller  answer (1)  tag (16)    and where the bytes follow, after padding if it says so,
                      for each chunk of at most 1 MiB: its bytes, and where they are authenticated a tag (16)

A tag is that of AES-256-GCM (NIST SP 800-38D). The bytes of a chunk are its associated data, which is not encrypted.
Its plain text is the place of the chunk (object, offset, number and length). The ciphertext is not sent, because the
other end knows the text. Bytes are authenticated where both ends have agreed on that for all arrays
(`zcactor.transport.stream.record_layer.Integrity`), and where the request demands it. They are not where the request
says that they are ciphertext, which the puller checks when it decrypts. The owner tags a chunk just before sendfile(2)
takes it, and the puller checks it right after its arrival: both find the bytes in the cache.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.transport.stream.record_layer import TAG_NBYTES, Integrity, KeyChain, Secret
from zcactor.transport.tcp.data import ANSWER_US, REQUEST, Answer, Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.transport.stream.record_layer import Exporter, Seals

__all__ = ["CHUNK_NBYTES", "DataSeal", "SealedChannel", "Tags"]

CHUNK_NBYTES: Final = 1 << 20
"""Bytes under one tag. They stay in a core's cache from their arrival to the check, and 16 more bytes do not count."""

_NONCE: Final = struct.Struct("<4xQ")
_CHUNK: Final = struct.Struct("<QQQQ")
"""Object id, offset in the arena, the chunk's number in its answer, bytes."""
_DEMANDED: Final = 1 << 63
_SEALED: Final = 1 << 62
_REQUESTS: Final = b"zcactor 3: requests on a data socket"
_ANSWERS: Final = b"zcactor 3: answers on a data socket"


class Tags(Secret):
    """The tags of one direction. One end makes them and the other checks them, in the same order, each in one thread at
    a time.

    Args:
        secret: 32 bytes for this purpose only.

    Attributes:
        uses: number of tags that were made or checked.
    """

    __slots__ = ("_encrypt", "_keys", "uses")

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._keys = KeyChain(secret)
        self._encrypt: Callable[..., bytes] | None = self._under_next_key()
        self.uses = 0

    def _under_next_key(self) -> Callable[..., bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._keys.take()).encrypt

    def make(self, text: bytes, data: memoryview | None = None) -> bytes:
        """Make the next tag, 16 bytes, of a short text and of the bytes that it describes.

        Raises:
            ForkedProcess: this is a forked child.
        """
        encrypt = self._encrypt
        if encrypt is None:
            self.refuse()
        if self.uses == self._keys.until:
            encrypt = self._encrypt = self._under_next_key()
        nonce = _NONCE.pack(self.uses)
        self.uses += 1  # before the use, so that an error does not repeat the nonce
        return encrypt(nonce, text, data)[-TAG_NBYTES:]

    def check(self, tag: bytes | bytearray, text: bytes, data: memoryview | None = None) -> bool:
        """Whether `tag` is the next one, and fits `text` and `data`."""
        return hmac.compare_digest(tag, self.make(text, data))

    def forget(self) -> None:
        """See `Secret.forget`."""
        self._encrypt = None


class DataSeal:
    """The keys of a data socket, the same at both ends.

    Args:
        exporter: the exporter of the connection that the data socket belongs to.
        occasion: the transcript of the data socket's handshake, and the bytes after it.
        arrays: whether the bytes of all arrays are authenticated, also where the request does not demand it.
    """

    def __init__(self, exporter: Exporter, occasion: bytes, *, arrays: bool) -> None:
        requests, answers = exporter.keys(occasion, _REQUESTS, _ANSWERS)
        self.requests = Tags(requests)
        self.answers = Tags(answers)
        self.arrays = arrays

    @classmethod
    def of(cls, seals: Seals, occasion: bytes) -> DataSeal:
        """Make the keys of a data socket, from the `seals` of its connection."""
        return cls(seals.exporter, occasion, arrays=seals.integrity >= Integrity.AUTO)


class SealedChannel(Channel):
    """A data socket with authenticated requests, answers and bytes.

    Args:
        sock: as for `Channel`.
        seal: the keys, which no other object may use.
        arena: the bytes of the owner's arena; None at the puller.
    """

    def __init__(self, sock: socket.socket, seal: DataSeal, arena: memoryview | None = None) -> None:
        super().__init__(sock)
        self._seal = seal
        self._arena = arena
        self._request = b""  # the one that is answered
        self._unanswered: deque[bytes] = deque()  # the puller's later ones
        self._object_id = 0
        self._tagged = False

    def is_bare(self, *, authenticate: bool, sealed: bool) -> bool:
        """See `Channel.is_bare`: tagged bytes are used when their tag has been checked."""
        return not (authenticate or (self._seal.arrays and not sealed))

    def _remember(self, request: bytes) -> None:
        self._request = request
        self._object_id, self._offset, nbytes = REQUEST.unpack(request)
        self._tagged = bool(nbytes & _DEMANDED) or (self._seal.arrays and not nbytes & _SEALED)
        self._nbytes = nbytes & ~(_DEMANDED | _SEALED)

    # ---- the puller

    def ask(self, object_id: int, offset: int, nbytes: int, *, authenticate: bool, sealed: bool = False) -> None:
        """See `Channel.ask`."""
        how = _DEMANDED if authenticate else _SEALED if sealed else 0
        request = REQUEST.pack(object_id, offset, nbytes | how)
        self._unanswered.append(request)
        self.send(request + self._seal.requests.make(request))

    def answered(self) -> bool:
        """See `Channel.answered`.

        Raises:
            ProtocolError: the answer was not made by the owner.
        """
        self._remember(self._unanswered.popleft())
        answer = bytearray(1 + TAG_NBYTES)
        self.receive_whole(memoryview(answer), ANSWER_US)
        if not self._seal.answers.check(answer[1:], self._request + answer[:1]):
            raise ProtocolError(f"the answer about object {self._object_id:x} is not the owner's: it was changed")
        return self._follow(answer[0])

    def take(self, view: memoryview) -> None:
        """See `Channel.take`.

        Raises:
            ProtocolError: the bytes were not sent by the owner. They may be in `view`, and must not be used.
        """
        if not self._tagged:
            self.receive_whole(view)
            return
        tag = bytearray(TAG_NBYTES)
        for number, start in enumerate(range(0, len(view), CHUNK_NBYTES)):
            chunk = view[start : start + CHUNK_NBYTES]
            self.receive_whole(chunk)
            self.receive_whole(memoryview(tag))
            text = _CHUNK.pack(self._object_id, self._offset + start, number, len(chunk))
            if not self._seal.answers.check(tag, text, chunk):
                raise ProtocolError(
                    f"{len(chunk)} bytes at {start} of what was asked of object {self._object_id:x} are not the "
                    "owner's: they were changed on their way, or written to there while they were sent"
                )

    # ---- the owner

    def asked(self) -> tuple[int, int, int] | None:
        """See `Channel.asked`.

        Raises:
            ProtocolError: the request was not made by the puller.
        """
        request = bytearray(REQUEST.size + TAG_NBYTES)
        if not self.receive(memoryview(request)):
            return None
        wanted = bytes(request[: REQUEST.size])
        if not self._seal.requests.check(request[REQUEST.size :], wanted):
            raise ProtocolError("a request on a data socket is not the peer's: forged, changed, repeated or moved here")
        self._remember(wanted)
        return self._object_id, self._offset, self._nbytes

    def _answer(self, answer: Answer, *, more: bool = False) -> None:
        said = bytes((answer,))
        self.send(said + self._seal.answers.make(self._request + said), more=more)

    def give(self, fd: int, mapped: memoryview | None = None) -> None:
        """See `Channel.give`. Chunks that are tagged go from the file: at their size nothing is faster."""
        if not self._tagged:
            super().give(fd, mapped)
            return
        self._answer(Answer.OK, more=True)
        offset, end = self._offset, self._offset + self._nbytes
        assert self._arena is not None
        number = 0
        while offset < end:
            nbytes = min(CHUNK_NBYTES, end - offset)
            text = _CHUNK.pack(self._object_id, offset, number, nbytes)
            tag = self._seal.answers.make(text, self._arena[offset : offset + nbytes])
            self.send_file(fd, offset, nbytes)
            offset += nbytes
            number += 1
            self.send(tag, more=offset < end)
