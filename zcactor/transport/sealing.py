"""Sealed frames: what is encrypted between two processes, and how the keys for it come about.

Both ends make a fresh X25519 key (RFC 7748); the handshake's proofs cover both public keys, so nobody in between can
put in his own. HKDF-SHA256 (RFC 5869) makes keys of the shared secret, each under a label of its own: one for each
direction's frames, and one of which others are made (`Exporter`). It is salted with what only holders of the token can
compute of this very handshake. Recorded bytes stay closed to those who learn the token later, because the private keys
are gone by then.

A nonce counts what its key was used for and is raised before the use, so an error repeats none. In a forked child no
key can be used (`Secret`).

What a connection sends at once becomes one *record*, sealed with AES-256-GCM (NIST SP 800-38D)::

    nbytes (u32, little-endian)   ciphertext (nbytes)   tag (16)

The length is authenticated too. The nonce is not sent: it counts a direction's records (SP 800-38D, 8.2.1), so a record
that comes twice, in another order, from the other direction or from another connection does not open. Records do not
follow the bounds of frames. What an attacker can still do is end the connection, and see how much is sent and when.

The package ``cryptography`` is imported when the first connection is to be sealed and not before: it takes about 50 ms.
Frames' records are made by libsodium where it is there (`zcactor.transport.aes`).
"""

from __future__ import annotations

import errno
import functools
import hmac
import importlib.util
import os
import socket
import struct
import weakref
from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from zcactor.errors import ForkedProcess, ProtocolError
from zcactor.transport.aes import decryption, encryption

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

__all__ = [
    "HEADER_NBYTES",
    "KEY_NBYTES",
    "MAX_RECORD",
    "NO_KEY",
    "REMEDY",
    "TAG_NBYTES",
    "BadRecord",
    "Exporter",
    "Integrity",
    "KeyExchange",
    "Opener",
    "SealedReader",
    "SealedSocket",
    "Sealer",
    "Seals",
    "Secret",
    "can_seal",
    "derive",
    "key_exchange",
]

KEY_NBYTES: Final = 32
"""Bytes of a public key of X25519, and of a key of AES-256."""
NO_KEY: Final = bytes(KEY_NBYTES)
"""Stands for the public key of a process that cannot seal."""
TAG_NBYTES: Final = 16
MAX_RECORD: Final = 1 << 20
"""Bytes of plain text in a record. A length beyond that is refused before it is believed."""
REMEDY: Final = "pip install 'zcactor[cluster]'"

CONTROL_NBYTES: Final = 4096
"""Bytes of plain text in a record of `SealedSocket.send`: whoever receives them reads at least so much at a time, so
that nothing is left over of which the system would not tell."""
RECEIVE_NBYTES: Final = 256 << 10
"""Bytes that one system call brings."""

_LENGTH: Final = struct.Struct("<I")
HEADER_NBYTES: Final = _LENGTH.size
_NONCE: Final = struct.Struct("<4xQ")
_OVERHEAD: Final = HEADER_NBYTES + TAG_NBYTES
_SALT: Final = b"zcactor sealing\0\0\0"
_CONNECTORS_FRAMES: Final = b"zcactor 3: frames of the connector"
_ACCEPTORS_FRAMES: Final = b"zcactor 3: frames of the acceptor"
_EXPORTER: Final = b"zcactor 3: exporter"


class Integrity(IntEnum):
    """What besides frames is authenticated where frames are sealed. Of two wishes the greater one holds for both."""

    FRAMES = 0
    """Nothing, unless a pull demands it."""
    AUTO = 1
    """The bytes of arrays over TCP, and not by RDMA."""
    ARRAYS = 2
    """The bytes of arrays."""


class BadRecord(ProtocolError, OSError):
    """The peer sent a record that is none. An `OSError` as well, for readers of sockets that know only those."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EBADMSG, message)

    def __str__(self) -> str:
        return str(self.args[1])


# ---- keys


class KeyExchange:
    """This side's key of one handshake.

    Args:
        private: of X25519, fresh.
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public: Final = private.public_key().public_bytes_raw()
        """What the other side is told, 32 bytes."""

    def shared(self, public: bytes) -> bytes:
        """The secret that only the holders of the two private keys can compute, 32 bytes.

        Raises:
            ProtocolError: `public`, the other side's key, makes a secret that anybody knows (RFC 7748, 6.1).
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ProtocolError("the peer's key for sealing is of low order, so its secret would be none") from error


@functools.cache
def can_seal() -> bool:
    """Whether ``cryptography`` is installed. It is not imported."""
    return importlib.util.find_spec("cryptography") is not None


def key_exchange() -> KeyExchange | None:
    """A fresh one; None where ``cryptography`` is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError:
        return None
    return KeyExchange(X25519PrivateKey.generate())


_secrets: weakref.WeakSet[Secret] = weakref.WeakSet()


class Secret(ABC):
    """Something that a forked child must not have: with the parent's key it would repeat the parent's nonces."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        _secrets.add(self)

    @staticmethod
    def refuse() -> NoReturn:
        """Raise `ForkedProcess`: the key that is needed was forgotten."""
        _forgotten()

    @abstractmethod
    def forget(self) -> None:
        """Let go of all keys. What would need one raises from here on."""


def _forked() -> None:
    for secret in list(_secrets):
        secret.forget()


os.register_at_fork(after_in_child=_forked)


def _forgotten(*_: object) -> NoReturn:
    raise ForkedProcess("this connection belongs to the process that forked this one: its keys cannot be used here")


def _expand(secret: bytes | bytearray, label: bytes) -> bytes:
    """The first 32 bytes of HKDF-Expand (RFC 5869, 2.3)."""
    return hmac.digest(secret, label + b"\x01", "sha256")


class Exporter(Secret):
    """Keys of one connection for whatever else belongs to it, known to its two ends only.

    A connection whose frames are sealed holds it (`SealedSocket.seals`). Each use has a label of its own, so no key
    serves two purposes.

    Args:
        secret: 32 bytes, of `derive`.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret: bytearray | None = bytearray(secret)

    def keys(self, salt: bytes, *labels: bytes) -> tuple[bytes, ...]:
        """A key of 32 bytes for each label, by HKDF of the exporter's secret.

        Args:
            salt: what both ends know of the occasion; other keys come of each. Empty where there is one occasion only.
            labels: name the purposes; all labels of the package are different.

        Raises:
            ForkedProcess: this is a forked child.
        """
        secret = _forgotten() if self._secret is None else self._secret
        extracted = hmac.digest(salt or bytes(KEY_NBYTES), secret, "sha256")
        return tuple(_expand(extracted, label) for label in labels)

    def forget(self) -> None:
        """See `Secret.forget`. The bytes are overwritten."""
        if self._secret is not None:
            self._secret[:] = bytes(KEY_NBYTES)
            self._secret = None


def derive(shared: bytes, token: bytes, transcript: bytes) -> tuple[bytes, bytes, bytes]:
    """The keys for the connector's frames and for the acceptor's, and the secret of their `Exporter`.

    Args:
        shared: of `KeyExchange`.
        token: the cluster's secret.
        transcript: what the proofs of the handshake cover.
    """
    extracted = hmac.digest(hmac.digest(token, _SALT + transcript, "sha256"), shared, "sha256")
    return (
        _expand(extracted, _CONNECTORS_FRAMES), _expand(extracted, _ACCEPTORS_FRAMES), _expand(extracted, _EXPORTER),
    )  # fmt: skip


class Sealer(Secret):
    """Makes the records of one direction of one connection. Not to be called by two threads at once.

    Args:
        key: 32 bytes that nothing else was ever sealed with.
    """

    __slots__ = ("_count", "_encrypt", "_key")

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__()
        self._encrypt: Callable[..., bytes] = AESGCM(key).encrypt
        self._key = key
        self._count = 0

    def hand_over(self) -> tuple[Callable[[bytes, bytes, bytes], bytes], int]:
        """For the native part, which makes the records from here: encrypt, and how many there are already."""
        return encryption(self._key), self._count

    def seal(self, plain: bytes | bytearray | memoryview) -> bytes:
        """The next record, of `plain`, which has 1 to `MAX_RECORD` bytes."""
        header = _LENGTH.pack(len(plain))
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return header + self._encrypt(nonce, plain, header)

    def forget(self) -> None:
        """See `Secret.forget`."""
        self._encrypt, self._key = _forgotten, b""


class Opener(Secret):
    """Opens the records of one direction of one connection.

    Args:
        key: the other end's `Sealer`'s.
    """

    __slots__ = ("_count", "_decrypt", "_invalid", "_key")

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__()
        self._decrypt: Callable[..., bytes] = AESGCM(key).decrypt
        self._key = key
        self._invalid = InvalidTag
        self._count = 0

    def hand_over(self) -> tuple[Callable[[bytes, bytes, bytes], bytes], int, type[Exception]]:
        """For the native part, which opens the records from here: decrypt, how many there were, and what it raises."""
        return decryption(self._key), self._count, self._invalid

    @staticmethod
    def nbytes(header: bytes | bytearray | memoryview, at: int = 0) -> int:
        """Bytes that follow the header at `at`.

        Raises:
            ProtocolError: it names a length that no record has.
        """
        nbytes: int = _LENGTH.unpack_from(header, at)[0]
        if not 0 < nbytes <= MAX_RECORD:
            raise BadRecord(f"the peer announced a record of {nbytes} bytes; 1 to {MAX_RECORD} are allowed")
        return nbytes + TAG_NBYTES

    def open(self, header: bytes | bytearray | memoryview, body: bytes | bytearray | memoryview) -> bytes:
        """The plain text of the next record. After a failure nothing can be opened any more.

        Raises:
            ProtocolError: it was not sealed by the peer as its next one.
        """
        nonce = _NONCE.pack(self._count)
        try:
            plain = self._decrypt(nonce, body, header)
        except self._invalid:
            raise BadRecord(
                f"record {self._count} from the peer does not open: somebody forged, changed, repeated or dropped one"
            ) from None
        self._count += 1
        return plain

    def forget(self) -> None:
        """See `Secret.forget`."""
        self._decrypt, self._key = _forgotten, b""


class Seals(msgspec.Struct, frozen=True):
    """Both directions of one connection, as one of its ends has them, and what else is to be protected."""

    sealer: Sealer
    opener: Opener
    exporter: Exporter
    integrity: Integrity
    """What both ends hold to."""


# ---- a socket whose bytes are sealed


class SealedSocket(socket.socket):
    """A connected, non-blocking socket on which `send` seals and `recv` opens.

    For the messages before the first frame, and whatever goes on by messages. A connection for frames takes the seals
    over: the native part, or in its absence `SealedReader` and a `SendBuffer` on `send_record`.

    Args:
        sock: connected and non-blocking; its descriptor belongs to this one from here.
        seals: nobody else may use them meanwhile.
    """

    raw_send = socket.socket.send
    raw_recv_into = socket.socket.recv_into

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.setblocking(False)
        self.seals: Final = seals
        self._unsent = memoryview(b"")  # of a record that the system did not take as a whole
        self._unsent_plain = 0  # bytes of its plain text
        self._record = bytearray()  # the beginning of one
        self._plain = memoryview(b"")  # opened and not asked for

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Seal up to 4 KiB of `data` and send the record.

        Returns:
            How many bytes of `data` that were.

        Raises:
            BlockingIOError: the system takes no more now. The record may have left in part: the next call must be with
                the same bytes, and more may follow them.
            OSError: the system reports the connection broken.
        """
        return self._send_record(data, CONTROL_NBYTES, flags)

    def send_record(self, data: memoryview) -> int:
        """As `send`, with up to `MAX_RECORD` bytes."""
        return self._send_record(data, MAX_RECORD, 0)

    def _send_record(self, data: Any, most: int, flags: int) -> int:
        if not self._unsent:
            with memoryview(data) as view:
                plain = view[:most]
                self._unsent_plain = len(plain)
                self._unsent = memoryview(self.seals.sealer.seal(plain) if plain else b"")
                plain.release()
        while self._unsent:
            self._unsent = self._unsent[self.raw_send(self._unsent, flags) :]
        return self._unsent_plain

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Up to `bufsize` bytes of what a record holds. Reads no byte beyond that record.

        Returns:
            Nothing when the stream has ended, even inside a record.

        Raises:
            BlockingIOError: the rest of the record is not there yet.
            ProtocolError: there is no such record; it is an `OSError` as well.
            OSError: the system reports the connection broken.
        """
        while not self._plain:
            wanted = HEADER_NBYTES
            if len(self._record) >= HEADER_NBYTES:
                wanted += Opener.nbytes(self._record)
            if len(self._record) < wanted or wanted == HEADER_NBYTES:
                part = super().recv(wanted - len(self._record), flags)
                if not part:
                    return b""
                self._record += part
                continue
            record = bytes(self._record)
            self._record.clear()
            self._plain = memoryview(self.seals.opener.open(record[:HEADER_NBYTES], record[HEADER_NBYTES:]))
        part, self._plain = bytes(self._plain[:bufsize]), self._plain[bufsize:]
        return part

    def check_drained(self) -> None:
        """Make sure that what is received from here on begins with a record.

        Raises:
            ProtocolError: the peer has sent more than was asked for.
        """
        if self._plain or self._record:
            raise ProtocolError("the peer sent more than a message where one was due")


# ---- frames


class SealedReader:
    """What comes in on a sealed connection, in Python. On the loop's thread.

    Args:
        sock: whose seals it uses and from which it reads.
        feed: takes in the plain text of a record; False when nothing more may come.
        ended: ``ended(error, from_receiver)``: called once, when nothing can be read any more. The error is None at the
            end of the stream; a `ProtocolError` counts as the receiver's.
    """

    def __init__(
        self, sock: SealedSocket, feed: Callable[[bytes], bool], ended: Callable[[BaseException | None, bool], object]
    ) -> None:
        self._recv_into = sock.raw_recv_into
        self._opener = sock.seals.opener
        self._feed = feed
        self._ended = ended
        self._view = memoryview(bytearray(MAX_RECORD + _OVERHEAD))  # pages that no record reaches are never made
        self._filled = 0  # the beginning of a record

    def readable(self) -> bool:
        """Read once, and hand on what the whole records hold. False when there was nothing to read, or it ended."""
        view, filled = self._view, self._filled
        try:
            received = self._recv_into(view[filled:] if filled else view, min(RECEIVE_NBYTES, len(view) - filled))
        except BlockingIOError:
            return False
        except OSError as error:
            self._ended(error, False)
            return False
        if received == 0:
            self._ended(None, False)
            return False
        at, end = 0, filled + received
        try:
            while end - at >= HEADER_NBYTES:
                body = at + HEADER_NBYTES
                following = body + self._opener.nbytes(view, at)
                if following > end:
                    break
                plain = self._opener.open(view[at:body], view[body:following])
                at = following
                if not self._feed(plain):
                    return False
        except ProtocolError as error:
            self._ended(error, True)
            return False
        if at:
            view[: end - at] = view[at:end]
        self._filled = end - at
        return True
