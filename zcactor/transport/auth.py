"""The handshake: two processes prove to each other that they hold one token, before any frame.

The module does no I/O: `Handshake` says how many bytes it wants next and which to send, and any ordered byte stream
may carry them. All messages have a fixed size, so nothing a stranger sends decides how much is read. In order::

    connector -> acceptor   preamble (8)  hello (69)
    acceptor  -> connector  preamble (8)  status (1)  hello (69)          the hello only where the status is OK
    connector -> acceptor   proof (32)
    acceptor  -> connector  status (1)  proof (32)                        the proof only where the status is OK

A proof is HMAC-SHA256 (RFC 2104) keyed by the token, over a label of the prover's role and both hellos. Both hold a
fresh nonce, so a recorded proof is worth nothing, and the label keeps a proof from being sent back to its maker
(Bellare and Rogaway, "Entity Authentication and Key Distribution", CRYPTO 1993). The preamble and the status after it
keep their form in every protocol version, so processes of different versions can still tell each other so.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError, VersionMismatch

__all__ = ["PROTOCOL_VERSION", "TOKEN_NBYTES", "Handshake", "Hello", "Purpose", "Status", "refusal"]

PROTOCOL_VERSION: Final = 1
"""Raised with every change of the bytes on the wire that an older process would misread."""
TOKEN_NBYTES: Final = 32
"""Bytes of a cluster's token; as many as the HMAC's digest, beyond which a key adds no strength (RFC 2104, 3)."""
PYTHON: Final = (sys.version_info.major, sys.version_info.minor)
MAX_EAGER_LIMIT: Final = 1 << 20
"""Bytes; a peer that announces more would make us hold receive buffers of its choosing."""
MAX_RECV_DEPTH: Final = 1 << 20
"""Frames; far above any window that helps, and small enough that no product of it overflows anything."""
MAX_ARENA_NBYTES: Final = 1 << 47
"""Bytes; the user half of an x86-64 address space, which no arena can exceed."""

_MAGIC: Final = b"ZCAC"
_PREAMBLE: Final = struct.Struct("<4sHBB")
_HELLO: Final = struct.Struct("<32s16sIQIIB")
_PROOF_NBYTES: Final = 32
_CONNECTOR: Final = b"zcactor connector\0"
_ACCEPTOR: Final = b"zcactor acceptor\0\0"


class Purpose(IntEnum):
    """Why a process connects."""

    PEER = 0
    """To exchange frames, each side reading the other's arena."""
    WRITABLE_ARENA = 1
    """To be handed the acceptor's arena with write access; the connection ends after that."""
    DATA = 2
    """To read bytes of the acceptor's arena through a socket of their own (`zcactor.transport.tcp_data`)."""


_PURPOSES: Final = frozenset(Purpose)


class Status(IntEnum):
    """What the acceptor answers."""

    OK = 0
    AUTH = 1
    """The connector is another user's process or does not hold the token."""
    VERSION = 2
    """The connector's protocol or Python version is another one."""
    FULL = 3
    """Too many handshakes are pending; the same attempt may succeed later."""


@dataclass(frozen=True, slots=True)
class Hello:
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
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def encode(self) -> bytes:
        """The 69 bytes of the hello."""
        return _HELLO.pack(
            self.nonce, self.process, self.pid, self.arena_nbytes, self.recv_depth, self.eager_limit, self.purpose
        )

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """The hello in `data`, 69 bytes.

        Raises:
            ProtocolError: a number in it lies outside its limits.
        """
        nonce, process, pid, arena_nbytes, recv_depth, eager_limit, purpose = _HELLO.unpack(data)
        if not (
            arena_nbytes <= MAX_ARENA_NBYTES
            and 0 < recv_depth <= MAX_RECV_DEPTH
            and eager_limit <= MAX_EAGER_LIMIT
            and purpose in _PURPOSES
        ):
            raise ProtocolError(
                f"the peer's hello is out of bounds: arena of {arena_nbytes} bytes (at most {MAX_ARENA_NBYTES}), "
                f"receive depth {recv_depth} (1 to {MAX_RECV_DEPTH}), eager limit {eager_limit} "
                f"(at most {MAX_EAGER_LIMIT}), purpose {purpose}"
            )
        return cls(process, pid, arena_nbytes, recv_depth, eager_limit, Purpose(purpose), nonce)


def preamble(version: int = PROTOCOL_VERSION, python: tuple[int, int] = PYTHON) -> bytes:
    """The 8 bytes each side begins with, the same in every version of the protocol."""
    return _PREAMBLE.pack(_MAGIC, version, *python)


def refusal(status: Status) -> bytes:
    """What an acceptor sends before it closes a connection that it does not even read from."""
    return preamble() + bytes((status,))


def _check_preamble(data: bytes) -> None:
    magic, version, major, minor = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the other end does not speak zcactor's protocol: it began with {data!r}")
    if version != PROTOCOL_VERSION or (major, minor) != PYTHON:
        raise VersionMismatch(
            f"the peer speaks protocol {version} on Python {major}.{minor}, this process protocol {PROTOCOL_VERSION} "
            f"on Python {PYTHON[0]}.{PYTHON[1]}; run the same zcactor and Python minor version everywhere"
        )


def _check_status(value: int) -> None:
    if value == Status.AUTH:
        raise AuthenticationError("the peer refused this process: it runs as another user or holds another token")
    if value == Status.VERSION:
        raise VersionMismatch(
            f"the peer refused protocol {PROTOCOL_VERSION} on Python {PYTHON[0]}.{PYTHON[1]} and did not say why"
        )
    if value == Status.FULL:
        raise ConnectionLost("the peer has too many pending handshakes and refused this one; try again")
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

    Raises:
        ValueError: the token has another length.
    """

    def __init__(self, token: bytes, ours: Hello, *, accepting: bool) -> None:
        if len(token) != TOKEN_NBYTES:
            raise ValueError(f"a token has {TOKEN_NBYTES} bytes, this one has {len(token)}")
        self._token = token
        self._hello = ours.encode()
        self._accepting = accepting
        self._peer: Hello | None = None
        self._transcript = b""
        self._step = self._connector_began if accepting else self._acceptor_began
        self.opening = b"" if accepting else preamble() + self._hello
        """What to send before anything is read."""
        self.wants = _PREAMBLE.size + (0 if accepting else 1)
        """Bytes that `receive` must be given next; 0 when the handshake is done."""
        self.farewell = b""
        """What to send before closing, after `receive` raised: the refused side learns the reason from it."""

    @property
    def peer(self) -> Hello:
        """The other side's hello.

        Raises:
            LookupError: the handshake is not done, so nothing about the peer is known yet.
        """
        if self.wants or self._peer is None:
            raise LookupError("the handshake is not done: the peer is not authenticated yet")
        return self._peer

    def receive(self, data: bytes) -> bytes:
        """Take the next `wants` bytes from the peer and return what to send, possibly nothing.

        Raises:
            AuthenticationError: the peer's proof is wrong, or the peer refused ours or our user.
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

    def _connector_began(self, data: bytes) -> bytes:
        try:
            _check_preamble(data)
        except VersionMismatch:
            self.farewell = refusal(Status.VERSION)
            raise
        self.wants, self._step = _HELLO.size, self._connector_said_hello
        return b""

    def _connector_said_hello(self, data: bytes) -> bytes:
        self._peer = Hello.decode(data)
        self._transcript = data + self._hello
        self.wants, self._step = _PROOF_NBYTES, self._connector_proved
        return refusal(Status.OK) + self._hello

    def _connector_proved(self, data: bytes) -> bytes:
        self.farewell = bytes((Status.AUTH,))
        self._check_proof(data, _CONNECTOR)
        self.farewell, self.wants = b"", 0
        return bytes((Status.OK,)) + self._prove(_ACCEPTOR)

    def _acceptor_began(self, data: bytes) -> bytes:
        _check_preamble(data[: _PREAMBLE.size])
        _check_status(data[_PREAMBLE.size])
        self.wants, self._step = _HELLO.size, self._acceptor_said_hello
        return b""

    def _acceptor_said_hello(self, data: bytes) -> bytes:
        self._peer = Hello.decode(data)
        self._transcript = self._hello + data
        self.wants, self._step = 1, self._acceptor_judged
        return self._prove(_CONNECTOR)

    def _acceptor_judged(self, data: bytes) -> bytes:
        _check_status(data[0])
        self.wants, self._step = _PROOF_NBYTES, self._acceptor_proved
        return b""

    def _acceptor_proved(self, data: bytes) -> bytes:
        self._check_proof(data, _ACCEPTOR)
        self.wants = 0
        return b""
