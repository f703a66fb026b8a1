"""The handshake: two processes prove to each other that they hold one token, before any frame.

The module does no I/O: `Handshake` says how many bytes it wants next and which to send, and any ordered byte stream
may carry them. All messages have a fixed size, so nothing a stranger sends decides how much is read. In order::

    connector -> acceptor   preamble (8)  hello (72)
    acceptor  -> connector  preamble (8)  status (1)  hello (72)  key (32)    the latter two only where the status is OK
    connector -> acceptor   key (32)  proof (32)
    acceptor  -> connector  status (1)  proof (32)                            the proof only where the status is OK

A proof is HMAC-SHA256 (RFC 2104) keyed by the token, over a label of the prover's role and the transcript: both
preambles, both hellos, both keys, and what binds the handshake to the TLS that it runs in, if it does: the hashes of
both certificates as this end sees them. A relay with a certificate of its own makes the ends see different ones. The
hellos hold fresh nonces, so a recorded proof is worth nothing, and the label keeps a proof from being sent back to
its maker (Bellare and Rogaway, "Entity Authentication and Key Distribution", CRYPTO 1993). The preamble and the status
after it keep their form in every protocol version, so processes of different versions can still tell each other so.

Frames are sealed (`zcactor.transport.sealing`) where either hello wants that. The keys are then public keys of X25519,
and zeros where nothing is to be sealed or a process cannot. The connector's comes with its proof and not with its
hello: it knows only then whether the acceptor wants one, and making one takes an import that others are to be spared.
Changing a hello or a key on its way makes the proofs wrong, so nobody in between can turn sealing off or read along.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch
from zcactor.token import TOKEN_NBYTES
from zcactor.transport.base import PROTOCOL_VERSION
from zcactor.transport.sealing import (
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.sealing import KeyExchange

__all__ = [
    "HELLO_NBYTES",
    "REFUSAL_NBYTES",
    "Crowded",
    "Handshake",
    "Hello",
    "Purpose",
    "Status",
    "raise_refusal",
    "refusal",
]

PYTHON: Final = (sys.version_info.major, sys.version_info.minor)
MAX_EAGER_LIMIT: Final = 1 << 20
"""Bytes; a peer that announces more would make us hold receive buffers of its choosing."""
MAX_RECV_DEPTH: Final = 1 << 20
"""Frames; far above any window that helps, and small enough that no product of it overflows anything."""
MAX_ARENA_NBYTES: Final = 1 << 47
"""Bytes; the user half of an x86-64 address space, which no arena can exceed."""

_MAGIC: Final = b"ZCAC"
_PREAMBLE: Final = struct.Struct("<4sHBB")
_HELLO: Final = struct.Struct("<32s16sIQIIBBBB")
HELLO_NBYTES: Final = _HELLO.size
REFUSAL_NBYTES: Final = _PREAMBLE.size + 1
"""Bytes of a `refusal`."""
_PROOF_NBYTES: Final = 32
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""What a TLS handshake begins with (RFC 8446, 5.1)."""
_CONNECTOR: Final = b"zcactor connector\0"
_ACCEPTOR: Final = b"zcactor acceptor\0\0"


class Crowded(ConnectionLost):
    """The acceptor has no place for another handshake; the same attempt may succeed later."""


class Purpose(IntEnum):
    """Why a process connects."""

    PEER = 0
    """To exchange frames, each side reading the other's arena."""
    WRITABLE_ARENA = 1
    """To be handed the acceptor's arena with write access; the connection ends after that."""
    DATA = 2
    """To read bytes of the acceptor's arena through a socket of their own (`zcactor.transport.tcp_data`)."""
    NAME = 3
    """To learn the acceptor's name (`zcactor.transport.identify`); the connection ends after the handshake."""


_PURPOSES: Final = frozenset(Purpose)
_INTEGRITIES: Final = frozenset(Integrity)


class Status(IntEnum):
    """What the acceptor answers."""

    OK = 0
    AUTH = 1
    """The connector is another user's process or does not hold the token."""
    VERSION = 2
    """The connector's protocol or Python version is another one."""
    FULL = 3
    """Too many handshakes are pending; the same attempt may succeed later."""
    SEALING = 4
    """Frames are to be sealed and one side cannot: before the acceptor's hello that is the acceptor, after it the
    connector."""
    TLS = 5
    """One side has `tls` set and the other has not. Sent without TLS by the acceptor, whichever of the two it is."""


class Hello(msgspec.Struct, frozen=True):
    """What one side says about itself. Authenticated once the handshake is done, because the proofs cover it."""

    process: bytes
    """16 random bytes that name the process."""
    pid: int
    arena_nbytes: int
    """Bytes of its arena; 0 where it has none."""
    recv_depth: int
    """Frames it can take in."""
    eager_limit: int
    """Bytes of the largest payload it takes inside a frame."""
    purpose: Purpose = Purpose.PEER
    seals: bool = False
    """Whether it wants frames to be sealed; one side's wish is enough."""
    integrity: Integrity = Integrity.AUTO
    """What it wants to be authenticated besides, where frames are sealed; the greater wish holds."""
    rdma: bool = False
    """Whether it may use RDMA; both must, before either offers it."""
    nonce: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(32))

    def encode(self) -> bytes:
        """The 72 bytes of the hello."""
        return _HELLO.pack(
            self.nonce, self.process, self.pid, self.arena_nbytes, self.recv_depth, self.eager_limit, self.purpose,
            self.seals, self.integrity, self.rdma,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """The hello in `data`, 72 bytes.

        Raises:
            ProtocolError: a number in it lies outside its limits.
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
    """The 8 bytes each side begins with, the same in every version of the protocol."""
    return _PREAMBLE.pack(_MAGIC, version, *python)


def refusal(status: Status) -> bytes:
    """What an acceptor sends before it closes a connection that it does not even read from."""
    return preamble() + bytes((status,))


def raise_refusal(data: bytes) -> None:
    """For a connector by TLS: raise what an acceptor said by `refusal` before there was any TLS.

    Args:
        data: the first bytes that came; nothing happens where they are no refusal.

    Raises:
        ProtocolError: the acceptor has no `tls` set.
        VersionMismatch, ConnectionLost: as `Handshake.receive`.
    """
    if len(data) < REFUSAL_NBYTES or not data.startswith(_MAGIC):
        return
    _check_preamble(data[: _PREAMBLE.size])
    status = data[_PREAMBLE.size]
    if status == Status.TLS:
        raise ProtocolError(
            "the peer speaks no TLS, and tls is set here; set tls (ZCACTOR_TLS) there as well, to a folder with a "
            "certificate of the same CA"
        )
    _check_status(status)


def _check_preamble(data: bytes) -> None:
    magic, version, major, minor = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the other end does not speak zcactor's protocol: it began with {data!r}")
    if version != PROTOCOL_VERSION or (major, minor) != PYTHON:
        raise VersionMismatch(
            f"the peer speaks protocol {version} on Python {major}.{minor}, this process protocol {PROTOCOL_VERSION} "
            f"on Python {PYTHON[0]}.{PYTHON[1]}; run the same zcactor and Python minor version everywhere"
        )


def _cannot_seal(who: str, where: str) -> AuthenticationError:
    return AuthenticationError(
        f"these frames are to be sealed, and {who} cannot: cryptography is not installed {where}; {REMEDY} {where}"
    )


def _check_status(value: int) -> None:
    if value == Status.AUTH:
        raise AuthenticationError("the peer refused this process: it runs as another user or holds another token")
    if value == Status.VERSION:
        raise VersionMismatch(
            f"the peer refused protocol {PROTOCOL_VERSION} on Python {PYTHON[0]}.{PYTHON[1]} and did not say why"
        )
    if value == Status.FULL:
        raise Crowded("the peer has too many pending handshakes and refused this one; try again")
    if value == Status.SEALING:
        raise _cannot_seal("the peer", "there")
    if value == Status.TLS:
        raise ProtocolError(
            "the peer takes connections by TLS only, and tls is not set here; set tls (ZCACTOR_TLS) to a folder with "
            "ca.pem, cert.pem and key.pem"
        )
    if value != Status.OK:
        raise ProtocolError(f"the peer answered the handshake with the unknown status {value}")


class Handshake:
    """One side of one handshake.

    Send `opening`; then, while `wants` is not 0, read exactly that many bytes, give them to `receive` and send what it
    returns. When it raises, send `farewell` as far as that goes without waiting, and close. When `wants` is 0, `peer`
    is authenticated.

    Args:
        token: the cluster's secret, 32 bytes.
        ours: what this side says about itself.
        accepting: whether this side listened.
        exchange: makes this side's key for sealing, and is called only where frames are to be sealed; None from it
            means that this process cannot.
        binding: names what the stream itself is made of, the same at both ends if nobody is in between
            (`zcactor.transport.tls.TlsSocket.binding`); empty where there is no such thing.

    Raises:
        ValueError: the token has another length.
    """

    def __init__(
        self, token: bytes, ours: Hello, *, accepting: bool, exchange: Callable[[], KeyExchange | None] = key_exchange,
        binding: bytes = b"",
    ) -> None:  # fmt: skip
        if len(token) != TOKEN_NBYTES:
            raise ValueError(f"a token has {TOKEN_NBYTES} bytes, this one has {len(token)}")
        self._token = token
        self._ours = ours
        self._hello = ours.encode()
        self._accepting = accepting
        self._make_exchange = exchange
        self._exchange: KeyExchange | None = None
        self._peer: Hello | None = None
        self._peer_key = NO_KEY
        self._binding = binding
        self._preambles = preamble()  # the connector's, and then the acceptor's as well
        self._transcript = b""
        self._step = self._connector_began if accepting else self._acceptor_began
        self.opening = b"" if accepting else preamble() + self._hello
        """What to send before anything is read."""
        self.wants = _PREAMBLE.size + (0 if accepting else 1)
        """Bytes that `receive` must be given next; 0 when the handshake is done."""
        self.farewell = b""
        """What to send before closing, after `receive` raised: the refused side learns the reason from it."""
        self.seals: Seals | None = None
        """For the frames, once the handshake is done; None where they are not to be sealed."""

    @property
    def peer(self) -> Hello:
        """The other side's hello.

        Raises:
            LookupError: the handshake is not done, so nothing about the peer is known yet.
        """
        if self.wants or self._peer is None:
            raise LookupError("the handshake is not done: the peer is not authenticated yet")
        return self._peer

    @property
    def transcript(self) -> bytes:
        """What both ends have proved that they saw alike. Fresh in each handshake.

        Raises:
            LookupError: the handshake is not done.
        """
        if self.wants:
            raise LookupError("the handshake is not done: nothing has been proved yet")
        return self._transcript

    def receive(self, data: bytes) -> bytes:
        """Take the next `wants` bytes from the peer and return what to send, possibly nothing.

        Raises:
            AuthenticationError: the peer's proof is wrong, or the peer refused ours or our user; or frames are to be
                sealed, and one side cannot.
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

    def _sealing(self, peer: Hello, purpose: Purpose) -> bool:
        return (self._ours.seals or peer.seals) and purpose is Purpose.PEER

    def _own_key(self) -> bytes:
        return NO_KEY if self._exchange is None else self._exchange.public

    def _finish(self) -> None:
        """Both proofs are right. The private key is not needed any more after this."""
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
            self.farewell = refusal(Status.TLS)
            raise ProtocolError(
                f"the peer began with TLS ({data!r}), and tls is not set here; if it is a process of this cluster, set "
                "tls (ZCACTOR_TLS) on this host as well"
            )
        try:
            _check_preamble(data)
        except VersionMismatch:
            self.farewell = refusal(Status.VERSION)
            raise
        self._preambles = data + self._preambles
        self.wants, self._step = HELLO_NBYTES, self._connector_said_hello
        return b""

    def _connector_said_hello(self, data: bytes) -> bytes:
        peer = self._peer = Hello.decode(data)
        if self._sealing(peer, peer.purpose):
            self._exchange = self._make_exchange()
            if self._exchange is None:
                self.farewell = refusal(Status.SEALING)
                raise _cannot_seal("this process", "here")
        key = self._own_key()
        self._transcript = self._preambles + self._binding + data + self._hello + key
        self.wants, self._step = KEY_NBYTES + _PROOF_NBYTES, self._connector_proved
        return refusal(Status.OK) + self._hello + key

    def _connector_proved(self, data: bytes) -> bytes:
        self._peer_key, proof = data[:KEY_NBYTES], data[KEY_NBYTES:]
        self._transcript += self._peer_key
        self.farewell = bytes((Status.AUTH,))
        self._check_proof(proof, _CONNECTOR)
        if self._exchange is not None and self._peer_key == NO_KEY:
            self.farewell = bytes((Status.SEALING,))
            raise _cannot_seal("the peer", "there")
        self._finish()
        return bytes((Status.OK,)) + self._prove(_ACCEPTOR)

    # ---- the connector

    def _acceptor_began(self, data: bytes) -> bytes:
        _check_preamble(data[: _PREAMBLE.size])
        _check_status(data[_PREAMBLE.size])
        self._preambles += data[: _PREAMBLE.size]
        self.wants, self._step = HELLO_NBYTES + KEY_NBYTES, self._acceptor_said_hello
        return b""

    def _acceptor_said_hello(self, data: bytes) -> bytes:
        hello, self._peer_key = data[:HELLO_NBYTES], data[HELLO_NBYTES:]
        peer = self._peer = Hello.decode(hello)
        if self._sealing(peer, self._ours.purpose):
            if self._peer_key == NO_KEY:
                raise _cannot_seal("the peer", "there")
            self._exchange = self._make_exchange()
        key = self._own_key()
        self._transcript = self._preambles + self._binding + self._hello + data + key
        self.wants, self._step = 1, self._acceptor_judged
        return key + self._prove(_CONNECTOR)

    def _acceptor_judged(self, data: bytes) -> bytes:
        if data[0] == Status.SEALING:
            raise _cannot_seal("this process", "here")
        _check_status(data[0])
        self.wants, self._step = _PROOF_NBYTES, self._acceptor_proved
        return b""

    def _acceptor_proved(self, data: bytes) -> bytes:
        self._check_proof(data, _ACCEPTOR)
        if self._exchange is None and self._peer is not None and self._sealing(self._peer, self._ours.purpose):
            # an acceptor of ours would have refused; nothing may go on in the clear because one did not
            raise _cannot_seal("this process", "here")
        self._finish()
        return b""
