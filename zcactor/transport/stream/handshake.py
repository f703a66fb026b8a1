"""The handshake: before any frame, two processes prove to each other that they hold the same token.

The module does no I/O. `Handshake` says how many bytes it needs next and which bytes to send, and any ordered stream
can carry them. All messages have a fixed size, so a stranger cannot decide how much is read. In order::

    connector -> acceptor   preamble (8)  hello (72)
    acceptor  -> connector  preamble (8)  status (1)  hello (72)  key (32)    the latter two only where the status is OK
    connector -> acceptor   key (32)  proof (32)
    acceptor  -> connector  status (1)  proof (32)                            the proof only where the status is OK

A proof is HMAC-SHA256 (RFC 2104) keyed by the token, over a label of the prover's role and the transcript. The
transcript is both preambles, both hellos and both keys. Inside TLS it also has the hashes of both certificates as this
end sees them: a relay with a certificate of its own makes the ends see different ones. The hellos have fresh nonces, so
a recorded proof is of no use, and the label keeps a proof from being sent back to its maker (Bellare and Rogaway,
"Entity Authentication and Key Distribution", CRYPTO 1993). The preamble and the status after it have the same form in
all protocol versions, so processes of different versions can report the mismatch to each other.

Frames are encrypted (`zcactor.transport.stream.record_layer`) where either hello asks for it. The keys are public keys
of X25519 then, and zeros where nothing is encrypted or a process cannot encrypt. The connector sends its key with its
proof and not with its hello: only then it knows whether the acceptor wants a key, and making one takes an import that
other processes need not pay for. A hello or a key that is changed on its way makes the proofs wrong, so a process in
between can neither turn encryption off nor decrypt.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.config import MAXIMUM
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch
from zcactor.token import TOKEN_NBYTES
from zcactor.transport.stream.record_layer import (
    KEY_NBYTES,
    NO_KEY,
    REMEDY,
    Exporter,
    Integrity,
    Opener,
    Sealer,
    Seals,
    derive,
    key_exchange,
)
from zcactor.transport.version import OLDEST_SERVED, PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.stream.record_layer import KeyExchange

__all__ = [
    "HELLO_NBYTES",
    "REFUSAL_NBYTES",
    "Crowded",
    "Handshake",
    "HandshakeStatus",
    "Introduction",
    "Purpose",
    "raise_refusal",
    "refusal",
]

PYTHON: Final = (sys.version_info.major, sys.version_info.minor)
MAX_EAGER_LIMIT: Final = MAXIMUM["eager_limit"]
"""Bytes: the limit of a peer's announcement, so that it cannot decide about the size of our receive buffers."""
MAX_RECV_DEPTH: Final = MAXIMUM["recv_depth"]
"""Frames: far above any useful window, and small enough that no product of it overflows."""
MAX_ARENA_NBYTES: Final = 1 << 47
"""Bytes: the user half of an x86-64 address space, which no arena can exceed."""

_MAGIC: Final = b"ZCAC"
_PREAMBLE: Final = struct.Struct("<4sHBB")
_HELLO: Final = struct.Struct("<32s16sIQIIBBBB")
HELLO_NBYTES: Final = _HELLO.size
REFUSAL_NBYTES: Final = _PREAMBLE.size + 1
"""Bytes of a `refusal`."""
_PROOF_NBYTES: Final = 32
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a TLS handshake (RFC 8446, 5.1)."""
_CONNECTOR: Final = b"zcactor connector\0"
_ACCEPTOR: Final = b"zcactor acceptor\0\0"


class Crowded(ConnectionLost):
    """The acceptor has too many handshakes under way; the same attempt may succeed later."""


class Purpose(IntEnum):
    """The purpose of a connection."""

    PEER = 0
    """To exchange frames and to read each other's arenas."""
    WRITABLE_ARENA = 1
    """To get the acceptor's arena with write access. The connection ends after that."""
    DATA = 2
    """To read bytes of the acceptor's arena through a socket of their own (`zcactor.transport.tcp.data`)."""
    NAME = 3
    """To learn the acceptor's name (`zcactor.transport.stream.probe`). The connection ends after the handshake."""
    DEVICE_EXTENTS = 4
    """To get extents of the acceptor's GPU memory (`zcactor.transport.local.extents`). The connection ends after
    that."""
    SUMMONS = 5
    """To say where the cluster's head is (`zcactor.transport.stream.summons`). The connection ends after that."""
    OFFER = 6
    """To let the acceptor read bytes of the connector's arena, which the acceptor cannot dial
    (`zcactor.transport.tcp.pull`)."""


_PURPOSES: Final = frozenset(Purpose)
_INTEGRITIES: Final = frozenset(Integrity)


class HandshakeStatus(IntEnum):
    """The answer of the acceptor."""

    OK = 0
    AUTH = 1
    """The connector is another user's process, or does not hold the token."""
    VERSION = 2
    """The connector has another protocol or Python version."""
    FULL = 3
    """Too many handshakes are pending; the same attempt may succeed later."""
    SEALING = 4
    """Frames have to be encrypted and one side cannot do that. Before the acceptor's hello this is the acceptor, after
    it the connector."""
    TLS = 5
    """One side has `tls` set, and the other has not. The acceptor sends it without TLS in both cases."""


class Introduction(msgspec.Struct, frozen=True):
    """The hello of one side. It is authenticated once the handshake is done, because the proofs cover it."""

    process: bytes
    """16 random bytes that name the process."""
    pid: int
    arena_nbytes: int
    """Bytes of its arena; 0 without one."""
    recv_depth: int
    """Frames that it can receive before it returns credits."""
    eager_limit: int
    """Bytes of the largest payload of a frame that it accepts."""
    purpose: Purpose = Purpose.PEER
    seals: bool = False
    """Whether it asks for encrypted frames. They are encrypted where one side asks for it."""
    integrity: Integrity = Integrity.AUTO
    """The bytes besides frames that it wants authenticated, where frames are encrypted. The greater wish holds."""
    rdma: bool = False
    """Whether it may use RDMA. Neither side offers RDMA unless both may use it."""
    nonce: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(32))

    def encode(self) -> bytes:
        """Encode the hello, 72 bytes."""
        return _HELLO.pack(
            self.nonce, self.process, self.pid, self.arena_nbytes, self.recv_depth, self.eager_limit, self.purpose,
            self.seals, self.integrity, self.rdma,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Decode a hello of 72 bytes.

        Raises:
            ProtocolError: one of its numbers lies outside its limits.
        """
        nonce, process, pid, arena_nbytes, recv_depth, eager_limit, purpose, seals, integrity, rdma = _HELLO.unpack(
            data
        )
        if not (
            arena_nbytes <= MAX_ARENA_NBYTES
            and 0 < recv_depth <= MAX_RECV_DEPTH
            and eager_limit <= MAX_EAGER_LIMIT
            and purpose in _PURPOSES
            and seals <= 1
            and integrity in _INTEGRITIES
            and rdma <= 1
        ):
            raise ProtocolError(
                f"the peer's hello is out of bounds: arena of {arena_nbytes} bytes (at most {MAX_ARENA_NBYTES}), "
                f"receive depth {recv_depth} (1 to {MAX_RECV_DEPTH}), eager limit {eager_limit} "
                f"(at most {MAX_EAGER_LIMIT}), purpose {purpose}, sealing {seals}, integrity {integrity}, RDMA {rdma}"
            )
        return cls(
            process, pid, arena_nbytes, recv_depth, eager_limit, Purpose(purpose), bool(seals), Integrity(integrity),
            bool(rdma), nonce,
        )  # fmt: skip


def preamble(version: int = PROTOCOL_VERSION, python: tuple[int, int] = PYTHON) -> bytes:
    """Make the first 8 bytes of each side. Their form is the same in all versions of the protocol."""
    return _PREAMBLE.pack(_MAGIC, version, *python)


def refusal(status: HandshakeStatus) -> bytes:
    """Make the bytes that an acceptor sends before it closes a connection that it has not read from."""
    return preamble() + bytes((status,))


def raise_refusal(data: bytes) -> None:
    """Raise the error of a `refusal` that an acceptor sent without TLS to a connector that uses TLS.

    Args:
        data: the first bytes that were received; nothing happens where they are no refusal.

    Raises:
        ProtocolError: the acceptor does not have `tls` set.
        VersionMismatch, ConnectionLost: as `Handshake.receive`.
    """
    if len(data) < REFUSAL_NBYTES or not data.startswith(_MAGIC):
        return
    _check_preamble(data[: _PREAMBLE.size])
    status = data[_PREAMBLE.size]
    if status == HandshakeStatus.TLS:
        raise ProtocolError(
            "the peer speaks no TLS, which is demanded here; set security='tls:FOLDER' (ZCACTOR_SECURITY) there as "
            "well, with a certificate of the same CA in the folder"
        )
    _check_status(status)


def _check_preamble(data: bytes) -> None:
    magic, version, major, minor = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the other end does not speak zcactor's protocol: it began with {data!r}")
    if version < OLDEST_SERVED or (major, minor) != PYTHON:  # a newer peer decides whether it serves this process
        raise VersionMismatch(
            f"the peer speaks protocol {version} on Python {major}.{minor}, this process protocol {PROTOCOL_VERSION} "
            f"on Python {PYTHON[0]}.{PYTHON[1]}, and it serves protocol {OLDEST_SERVED} and later; run the same "
            "zcactor and Python minor version everywhere"
        )


def _cannot_seal(who: str, where: str) -> AuthenticationError:
    return AuthenticationError(
        f"these frames are to be sealed, and {who} cannot: cryptography is not installed {where}; {REMEDY} {where}"
    )


def _check_status(value: int) -> None:
    if value == HandshakeStatus.AUTH:
        raise AuthenticationError("the peer refused this process: it runs as another user or holds another token")
    if value == HandshakeStatus.VERSION:
        raise VersionMismatch(
            f"the peer refused protocol {PROTOCOL_VERSION} on Python {PYTHON[0]}.{PYTHON[1]}: its zcactor is newer, "
            "and does not serve that version; run the same zcactor everywhere"
        )
    if value == HandshakeStatus.FULL:
        raise Crowded("the peer has too many pending handshakes and refused this one; try again")
    if value == HandshakeStatus.SEALING:
        raise _cannot_seal("the peer", "there")
    if value == HandshakeStatus.TLS:
        raise ProtocolError(
            "the peer takes connections by TLS only; set security='tls:FOLDER' (ZCACTOR_SECURITY) here, with ca.pem, "
            "cert.pem and key.pem in the folder"
        )
    if value != HandshakeStatus.OK:
        raise ProtocolError(f"the peer answered the handshake with the unknown status {value}")


class Handshake:
    """One side of a handshake.

    Send `opening`. While `wants` is not 0, read exactly that many bytes, pass them to `receive`, and send the bytes
    that it returns. When it raises, send as much of `farewell` as goes without waiting, and close. When `wants` is 0,
    `peer` is authenticated.

    Args:
        token: the cluster's secret, 32 bytes.
        ours: the hello of this side.
        accepting: whether this side listened.
        exchange: makes this side's key, and is called only where frames are to be encrypted. It returns None where this
            process cannot encrypt.
        binding: identifies the TLS stream below (`zcactor.transport.stream.tls.TlsSocket.binding`): the same at both
            ends, unless a relay is in between. Empty without TLS.

    Raises:
        ValueError: the token has not 32 bytes.
    """

    def __init__(
        self, token: bytes, ours: Introduction, *, accepting: bool,
        exchange: Callable[[], KeyExchange | None] = key_exchange, binding: bytes = b"",
    ) -> None:  # fmt: skip
        if len(token) != TOKEN_NBYTES:
            raise ValueError(f"a token has {TOKEN_NBYTES} bytes, this one has {len(token)}")
        self._token = token
        self._ours = ours
        self._hello = ours.encode()
        self._accepting = accepting
        self._make_exchange = exchange
        self._exchange: KeyExchange | None = None
        self._peer: Introduction | None = None
        self._peer_key = NO_KEY
        self._binding = binding
        self._preambles = preamble()  # that of the connector, and later that of the acceptor, too
        self._transcript = b""
        self._step = self._connector_began if accepting else self._acceptor_began
        self.opening = b"" if accepting else preamble() + self._hello
        """Bytes to send before anything is read."""
        self.wants = _PREAMBLE.size + (0 if accepting else 1)
        """Number of bytes that `receive` needs next; 0 when the handshake is done."""
        self.farewell = b""
        """Bytes to send before closing, after `receive` has raised: the reason for the refused side."""
        self.seals: Seals | None = None
        """Encryption of the frames, once the handshake is done; None where they are not encrypted."""

    @property
    def peer(self) -> Introduction:
        """The hello of the other side.

        Raises:
            LookupError: the handshake is not done, so the hello is not authenticated yet.
        """
        if self.wants or self._peer is None:
            raise LookupError("the handshake is not done: the peer is not authenticated yet")
        return self._peer

    @property
    def transcript(self) -> bytes:
        """The bytes that both ends have proved to have seen alike. They differ in each handshake.

        Raises:
            LookupError: the handshake is not done.
        """
        if self.wants:
            raise LookupError("the handshake is not done: nothing has been proved yet")
        return self._transcript

    def receive(self, data: bytes) -> bytes:
        """Take the next `wants` bytes of the peer, and return the bytes to send, which may be empty.

        Raises:
            AuthenticationError: the peer's proof is wrong, the peer refused ours or our user, or frames have to be
                encrypted and one side cannot do that.
            VersionMismatch: the peer speaks another protocol or Python version.
            ConnectionLost: the acceptor has too many pending handshakes.
            ProtocolError: the bytes are no handshake.
        """
        return self._step(data)

    def _prove(self, role: bytes) -> bytes:
        return hmac.digest(self._token, role + self._transcript, "sha256")

    def _check_proof(self, proof: bytes, role: bytes) -> None:
        if not hmac.compare_digest(proof, self._prove(role)):
            raise AuthenticationError("the peer does not hold this cluster's token")

    def _sealing(self, peer: Introduction, purpose: Purpose) -> bool:
        return (self._ours.seals or peer.seals) and purpose is Purpose.PEER

    def _own_key(self) -> bytes:
        return NO_KEY if self._exchange is None else self._exchange.public

    def _finish(self) -> None:
        """Derive the keys of the frames: both proofs are right. The private key is dropped."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            assert self._peer is not None
            connectors, acceptors, secret = derive(exchange.shared(self._peer_key), self._token, self._transcript)
            ours, theirs = (acceptors, connectors) if self._accepting else (connectors, acceptors)
            integrity = max(self._ours.integrity, self._peer.integrity)
            self.seals = Seals(Sealer(ours), Opener(theirs), Exporter(secret), integrity)
        self.farewell, self.wants = b"", 0

    # ---- the acceptor

    def _connector_began(self, data: bytes) -> bytes:
        if data.startswith(_TLS_HANDSHAKE):
            self.farewell = refusal(HandshakeStatus.TLS)
            raise ProtocolError(
                f"the peer began with TLS ({data!r}), which is not set here; if it is a process of this cluster, set "
                "security='tls:FOLDER' (ZCACTOR_SECURITY) on this host as well"
            )
        try:
            _check_preamble(data)
        except VersionMismatch:
            self.farewell = refusal(HandshakeStatus.VERSION)
            raise
        self._preambles = data + self._preambles
        self.wants, self._step = HELLO_NBYTES, self._connector_said_hello
        return b""

    def _connector_said_hello(self, data: bytes) -> bytes:
        peer = self._peer = Introduction.decode(data)
        if self._sealing(peer, peer.purpose):
            self._exchange = self._make_exchange()
            if self._exchange is None:
                self.farewell = refusal(HandshakeStatus.SEALING)
                raise _cannot_seal("this process", "here")
        key = self._own_key()
        self._transcript = self._preambles + self._binding + data + self._hello + key
        self.wants, self._step = KEY_NBYTES + _PROOF_NBYTES, self._connector_proved
        return refusal(HandshakeStatus.OK) + self._hello + key

    def _connector_proved(self, data: bytes) -> bytes:
        self._peer_key, proof = data[:KEY_NBYTES], data[KEY_NBYTES:]
        self._transcript += self._peer_key
        self.farewell = bytes((HandshakeStatus.AUTH,))
        self._check_proof(proof, _CONNECTOR)
        if self._exchange is not None and self._peer_key == NO_KEY:
            self.farewell = bytes((HandshakeStatus.SEALING,))
            raise _cannot_seal("the peer", "there")
        self._finish()
        return bytes((HandshakeStatus.OK,)) + self._prove(_ACCEPTOR)

    # ---- the connector

    def _acceptor_began(self, data: bytes) -> bytes:
        _check_preamble(data[: _PREAMBLE.size])
        _check_status(data[_PREAMBLE.size])
        self._preambles += data[: _PREAMBLE.size]
        self.wants, self._step = HELLO_NBYTES + KEY_NBYTES, self._acceptor_said_hello
        return b""

    def _acceptor_said_hello(self, data: bytes) -> bytes:
        hello, self._peer_key = data[:HELLO_NBYTES], data[HELLO_NBYTES:]
        peer = self._peer = Introduction.decode(hello)
        if self._sealing(peer, self._ours.purpose):
            if self._peer_key == NO_KEY:
                raise _cannot_seal("the peer", "there")
            self._exchange = self._make_exchange()
        key = self._own_key()
        self._transcript = self._preambles + self._binding + self._hello + data + key
        self.wants, self._step = 1, self._acceptor_judged
        return key + self._prove(_CONNECTOR)

    def _acceptor_judged(self, data: bytes) -> bytes:
        if data[0] == HandshakeStatus.SEALING:
            raise _cannot_seal("this process", "here")
        _check_status(data[0])
        self.wants, self._step = _PROOF_NBYTES, self._acceptor_proved
        return b""

    def _acceptor_proved(self, data: bytes) -> bytes:
        self._check_proof(data, _ACCEPTOR)
        if self._exchange is None and self._peer is not None and self._sealing(self._peer, self._ours.purpose):
            # An honest acceptor would have refused. Frames must not be sent in the clear because this one did not.
            raise _cannot_seal("this process", "here")
        self._finish()
        return b""
