"""The record layer: encryption of the frames between two processes, and the derivation of its keys.

Both ends make a fresh X25519 key (RFC 7748). The handshake's proofs cover both public keys, so no process in between
can replace one. HKDF-SHA256 (RFC 5869) derives secrets from the shared one, each with a label of its own: one for the
frames of each direction, and one from which further secrets are derived (`Exporter`). Its salt is a value of this very
handshake that only holders of the token can compute. A person who learns the token later cannot decrypt recorded bytes,
because the private keys are gone by then.

A direction has one key after the other (`KeyChain`). Both ends count its records, so both take the next key at the same
record, and no message says so. A nonce counts the records of its direction, and is raised before each use, so an error
cannot repeat it. In a forked child no key can be used (`Secret`).

The bytes that a connection sends at once become one *record*, sealed with AES-256-GCM (NIST SP 800-38D)::

    nbytes (u32, little-endian)   ciphertext (nbytes)   tag (16)

The length is authenticated, too. The nonce is not sent: it counts the records of a direction (SP 800-38D, 8.2.1). So a
record that is repeated, or comes in another order, from the other direction or from another connection, does not open.
Records do not follow the bounds of frames. An attacker can still end the connection, and see how much is sent and when.

The package ``cryptography`` is imported for the first encrypted connection and not before, as the import takes about
50 ms. libsodium makes the records of frames where it is installed (`zcactor.transport.stream.aes`).
"""

from __future__ import annotations

import errno
import functools
import hmac
import importlib.util
import socket
import struct
from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from zcactor.errors import ProtocolError
from zcactor.transport.stream.aes import decryption, encryption, forgotten, hold

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from zcactor.transport.stream.aes import Apply

__all__ = [
    "HEADER_NBYTES",
    "KEY_NBYTES",
    "MAX_RECORD",
    "NO_KEY",
    "RECORD_NBYTES",
    "REMEDY",
    "TAG_NBYTES",
    "BadRecord",
    "Exporter",
    "Integrity",
    "KeyChain",
    "KeyExchange",
    "Opener",
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
"""Value in place of the public key of a process that cannot encrypt."""
TAG_NBYTES: Final = 16
MAX_RECORD: Final = 1 << 20
"""The most bytes of plain text in a record. A greater length is refused before memory is allocated."""
USES_PER_KEY: Final = 1 << 18
"""Records, or tags, under one key. With records of `MAX_RECORD` these are 2^34 blocks of 16 bytes, or 256 GiB; 2^34.5
blocks are allowed under one key of AES-GCM (RFC 8446, 5.5). Both ends must have the same number. With small records a
new key, which takes some 20 µs, comes every few seconds."""
REMEDY: Final = "pip install 'zcactor[cluster]'"

CONTROL_NBYTES: Final = 4096
"""Bytes of plain text in a record of `SealedSocket.send`. Receivers read at least so many bytes at a time, so that no
decrypted bytes are left, which the system would not report."""

_LENGTH: Final = struct.Struct("<I")
HEADER_NBYTES: Final = _LENGTH.size
_NONCE: Final = struct.Struct("<4xQ")
RECORD_NBYTES: Final = HEADER_NBYTES + TAG_NBYTES
"""Bytes of a record beside its plain text."""
_SALT: Final = b"zcactor sealing\0\0\0"
_CONNECTORS_FRAMES: Final = b"zcactor 3: frames of the connector"
_ACCEPTORS_FRAMES: Final = b"zcactor 3: frames of the acceptor"
_EXPORTER: Final = b"zcactor 3: exporter"
_KEY: Final = b"zcactor 16: key"
_NEXT_SECRET: Final = b"zcactor 16: next secret"


class Integrity(IntEnum):
    """The bytes besides frames that are authenticated where frames are encrypted. The greater wish of two ends
    holds."""

    FRAMES = 0
    """No bytes, unless a pull asks for it."""
    AUTO = 1
    """The bytes of arrays over TCP, but not by RDMA."""
    ARRAYS = 2
    """The bytes of all arrays."""


class BadRecord(ProtocolError, OSError):
    """Bytes of the peer that are no valid record. An `OSError` as well, for code that expects errors of sockets."""

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
        """The public key for the other side, 32 bytes."""

    def shared(self, public: bytes) -> bytes:
        """Compute the secret of both private keys, 32 bytes.

        Args:
            public: the other side's public key.

        Raises:
            ProtocolError: `public` leads to a secret that everybody knows (RFC 7748, 6.1).
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
    """Make a fresh `KeyExchange`; None where ``cryptography`` is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError:
        return None
    return KeyExchange(X25519PrivateKey.generate())


class Secret(ABC):
    """A holder of keys, which are dropped in a forked child: with them it would repeat the parent's nonces."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        hold(self)

    @staticmethod
    def refuse() -> NoReturn:
        """Raise `ForkedProcess`: the keys were dropped."""
        forgotten()

    @abstractmethod
    def forget(self) -> None:
        """Drop all keys. Methods that need a key raise from here on."""


def _expand(secret: bytes | bytearray, label: bytes) -> bytes:
    """Compute the first 32 bytes of HKDF-Expand (RFC 5869, 2.3)."""
    return hmac.digest(secret, label + b"\x01", "sha256")


class Exporter(Secret):
    """A source of further keys of one connection, which only its two ends know.

    An encrypted connection has one (`SealedSocket.seals`). Each purpose has a label of its own, so no key serves two
    purposes.

    Args:
        secret: 32 bytes, from `derive`.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret: bytearray | None = bytearray(secret)

    def keys(self, salt: bytes, *labels: bytes) -> tuple[bytes, ...]:
        """Derive a key of 32 bytes for each label, by HKDF from the exporter's secret.

        Args:
            salt: bytes that both ends know and that differ for each set of keys, for instance of a data socket. Empty
                where there is one set only.
            labels: the purposes of the keys. All labels of the package are different.

        Raises:
            ForkedProcess: this is a forked child.
        """
        secret = forgotten() if self._secret is None else self._secret
        extracted = hmac.digest(salt or bytes(KEY_NBYTES), secret, "sha256")
        return tuple(_expand(extracted, label) for label in labels)

    def forget(self) -> None:
        """See `Secret.forget`. The bytes are overwritten."""
        if self._secret is not None:
            self._secret[:] = bytes(KEY_NBYTES)
            self._secret = None


def derive(shared: bytes, token: bytes, transcript: bytes) -> tuple[bytes, bytes, bytes]:
    """Derive the secrets of the connector's frames and of the acceptor's, and that of their `Exporter`.

    Args:
        shared: the secret from `KeyExchange`.
        token: the cluster's secret.
        transcript: the bytes that the proofs of the handshake cover.
    """
    extracted = hmac.digest(hmac.digest(token, _SALT + transcript, "sha256"), shared, "sha256")
    return (
        _expand(extracted, _CONNECTORS_FRAMES), _expand(extracted, _ACCEPTORS_FRAMES), _expand(extracted, _EXPORTER),
    )  # fmt: skip


class KeyChain(Secret):
    """The keys of one direction, one after the other, as by the key updates of TLS 1.3 (RFC 8446, 7.2).

    A secret leads to its key and to the next secret, and is overwritten then. So neither a key nor a later secret leads
    to the keys before. Both ends have a chain of the same secret, and count. Two threads must not call it at the same
    time.

    Args:
        secret: 32 bytes that were never used before.

    Attributes:
        until: number of the first use, counted from 0, for which the key after the last one is due.
    """

    __slots__ = ("_secret", "until")

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret: bytearray | None = bytearray(secret)
        self.until = 0

    def take(self) -> bytes:
        """Return the next key, 32 bytes, for the uses from `until` on.

        Raises:
            ForkedProcess: this is a forked child.
        """
        secret = forgotten() if self._secret is None else self._secret
        key = _expand(secret, _KEY)
        secret[:] = _expand(secret, _NEXT_SECRET)
        self.until += USES_PER_KEY
        return key

    def forget(self) -> None:
        """See `Secret.forget`. The bytes are overwritten."""
        if self._secret is not None:
            self._secret[:] = bytes(KEY_NBYTES)
            self._secret = None


def _given(*_: object) -> NoReturn:
    raise RuntimeError("the native part has the keys of this direction")


class _Direction(Secret):
    """The keys and the count of one direction of a connection.

    Args:
        secret: 32 bytes that were never used before.
    """

    __slots__ = ("_apply", "_count", "_key", "_keys", "_until")

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._keys = KeyChain(secret)
        self._count = 0
        self._take_key()

    @abstractmethod
    def _function(self, key: bytes) -> Callable[..., bytes]:
        """Return the function of ``cryptography`` for records under a key."""

    def _take_key(self) -> None:
        """Take the next key, whose first record is the next one."""
        self._key = self._keys.take()
        self._until = self._keys.until
        self._apply: Callable[..., bytes] = self._function(self._key)

    def _give(self, make: Callable[[bytes], Apply]) -> tuple[Apply, int, int, Callable[[], tuple[Apply, int]]]:
        """Give the keys to the native part. No copy stays here: the native part drops a key when it takes the next."""
        if self._count == self._until:
            self._take_key()
        keys, apply = self._keys, make(self._key)
        self._apply, self._key = _given, b""
        return apply, self._count, keys.until, lambda: (make(keys.take()), keys.until)

    def forget(self) -> None:
        """See `Secret.forget`."""
        self._apply, self._key = forgotten, b""


class Sealer(_Direction):
    """The encryption of one direction of a connection. Two threads must not call it at the same time.

    Args:
        secret: 32 bytes that were never used before.
    """

    __slots__ = ()

    def _function(self, key: bytes) -> Callable[..., bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(key).encrypt

    def hand_over(self) -> tuple[Apply, int, int, Callable[[], tuple[Apply, int]]]:
        """Hand the records from here on over to the native part, once.

        Returns:
            The function that encrypts, the number of records so far, the number of the first record under the next key,
            and ``turn()``, which takes that key: it returns the function for it and the first record after it.
        """
        return self._give(encryption)

    def seal(self, plain: bytes | bytearray | memoryview) -> bytes:
        """Make the next record from `plain`, 1 to `MAX_RECORD` bytes.

        Raises:
            ForkedProcess: this is a forked child.
        """
        if self._count == self._until:
            self._take_key()
        header = _LENGTH.pack(len(plain))
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return header + self._apply(nonce, plain, header)


class Opener(_Direction):
    """The decryption of one direction of a connection.

    Args:
        secret: the secret of the other end's `Sealer`.
    """

    __slots__ = ("_invalid",)

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag

        super().__init__(secret)
        self._invalid = InvalidTag

    def _function(self, key: bytes) -> Callable[..., bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(key).decrypt

    def hand_over(self) -> tuple[Apply, int, int, Callable[[], tuple[Apply, int]], type[Exception]]:
        """As `Sealer.hand_over`, with the function that decrypts, and with the exception that it raises."""
        return *self._give(decryption), self._invalid

    @staticmethod
    def nbytes(header: bytes | bytearray | memoryview, at: int = 0) -> int:
        """Return the number of bytes behind the header at `at`.

        Raises:
            ProtocolError: the header has a length that no record has.
        """
        nbytes: int = _LENGTH.unpack_from(header, at)[0]
        if not 0 < nbytes <= MAX_RECORD:
            raise BadRecord(f"the peer announced a record of {nbytes} bytes; 1 to {MAX_RECORD} are allowed")
        return nbytes + TAG_NBYTES

    def open(self, header: bytes | bytearray | memoryview, body: bytes | bytearray | memoryview) -> bytes:
        """Decrypt the next record. After a failure no record can be opened.

        Raises:
            ProtocolError: the record is not the peer's next one.
            ForkedProcess: this is a forked child.
        """
        if self._count == self._until:
            self._take_key()
        nonce = _NONCE.pack(self._count)
        try:
            plain = self._apply(nonce, body, header)
        except self._invalid:
            raise BadRecord(
                f"record {self._count} from the peer does not open: somebody forged, changed, repeated or dropped one"
            ) from None
        self._count += 1
        return plain


class Seals(msgspec.Struct, frozen=True):
    """The encryption of one end of a connection, in both directions, and the protection of other bytes."""

    sealer: Sealer
    opener: Opener
    exporter: Exporter
    integrity: Integrity
    """The protection of other bytes that both ends have agreed on."""


# ---- a socket with encrypted bytes


class SealedSocket(socket.socket):
    """A connected, non-blocking socket: `send` encrypts and `recv` decrypts.

    It is for messages before the first frame, and for connections that send messages only. On a connection for frames
    the native part takes `seals` over.

    Args:
        sock: connected and non-blocking; its descriptor belongs to this socket from here.
        seals: keys that no other object may use meanwhile.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.setblocking(False)
        self.seals: Final = seals
        self._unsent = memoryview(b"")  # the rest of a record of which the system took a part
        self._unsent_plain = 0  # bytes of that record's plain text
        self._record = bytearray()  # the beginning of a received record
        self._plain = memoryview(b"")  # decrypted bytes that `recv` has not returned yet

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Encrypt up to 4 KiB of `data` and send the record.

        Returns:
            Number of bytes of `data` in the record.

        Raises:
            BlockingIOError: the system takes no more bytes now. A part of the record may have been sent: the next call
                must begin with the same bytes, and more may follow them.
            OSError: the system reports the connection broken.
        """
        if not self._unsent:
            with memoryview(data) as view:
                plain = view[:CONTROL_NBYTES]
                self._unsent_plain = len(plain)
                self._unsent = memoryview(self.seals.sealer.seal(plain) if plain else b"")
                plain.release()
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent, flags) :]
        return self._unsent_plain

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Return up to `bufsize` bytes of the plain text of a record. Reads no byte beyond that record.

        Returns:
            Empty bytes when the stream has ended, also within a record.

        Raises:
            BlockingIOError: the rest of the record has not arrived yet.
            ProtocolError: the bytes are no valid record; the error is an `OSError` as well.
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
        """Make sure that the next bytes of the stream are the beginning of a record.

        Raises:
            ProtocolError: the peer has sent more bytes than the handshake has.
        """
        if self._plain or self._record:
            raise ProtocolError("the peer sent more than a message where one was due")
