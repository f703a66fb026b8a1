"""The seam between messages and the wires that carry them.

A transport moves whole frames in order between two processes and gives access to the peer's bytes in place. It knows
nothing of calls, credits or actors: those are `zcactor.rpc`'s. Everything above this module works on any object that
has these shapes; ``tests/conformance`` holds the suite that each implementation joins.

Frames travel *in batches*: the sender encodes each frame straight into the connection's send buffer (`reserve`,
`commit`) and hands over all of a loop turn's frames by one `flush`. The receiver gets them by one callback with a view
into the receive buffer, which is valid during the callback only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Awaitable, Callable

    from zcactor.transport.mapping import Mapping
    from zcactor.transport.os_process import OsProcess

__all__ = ["LENGTH_PREFIX", "PROTOCOL_VERSION", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]

PROTOCOL_VERSION: Final = 3
"""Goes up with every change of the handshake, of the schema or of a field's meaning; peers of another version are
refused."""

LENGTH_PREFIX = 4
"""Bytes before each frame: its length, little-endian u32, not counting the prefix (FlatBuffers' size prefix)."""


class PeerInfo(msgspec.Struct, frozen=True):
    """What the handshake established about the process at the other end."""

    process: bytes
    """16 random bytes that name the process."""
    pid: int
    uid: int
    arena_nbytes: int
    """Bytes of the peer's arena; every reference to it is checked against this."""


class RemoteRegion(msgspec.Struct, frozen=True):
    """Bytes of the peer's arena, and all that it takes to bring them here. The caller holds a lease on them."""

    object_id: int
    """Key of the object that they are part of, in the peer's table."""
    offset: int
    """Bytes from the start of the peer's arena."""
    nbytes: int
    """More than 0."""
    seal: int = 0
    """What `Connection.export` gave at the peer; 0: nothing."""
    rkey: int = 0
    authenticate: bool = False
    """Whether the bytes belong to a pickle, so that they are authenticated whatever the peers agreed for arrays."""
    sealed: bool = False
    """Whether the bytes are ciphertext that the reader checks when it opens it, so that they need no tags on their way,
    whatever the peers agreed for arrays."""


class Receiver(Protocol):
    """What a connection calls, always on the event loop's thread."""

    def frames_received(self, data: memoryview) -> None:
        """One or more whole frames, each led by its length prefix. `data` is valid until this returns.

        Raising `ProtocolError` closes this connection, and only this one.
        """

    def connection_lost(self, cause: Exception | None) -> None:
        """The connection is gone; called exactly once. `cause` is None when `aclose` was called here."""


@runtime_checkable
class Connection(Protocol):
    """One authenticated peer: ordered frames, and the peer's arena in place where the hosts are the same.

    `reserve`, `commit` and `flush` are called under the caller's lock, from any thread; everything else on the loop's
    thread.
    """

    kind: str
    """``"local"``, ``"loopback"``, ``"verbs"`` or ``"tcp"``."""
    eager_limit: int
    """Largest payload of a frame in bytes; larger ones go by reference."""
    max_frame: int
    """Largest frame in bytes, prefix not counted; `reserve` refuses more."""
    recv_depth: int
    """Frames the peer may have outstanding towards us; both ends use the same number. Flow control is the caller's."""
    peer: PeerInfo
    maps: bool
    """Whether the peer's arena is mapped, so that `map` gives addresses. Where it is not, `pull` brings the bytes."""
    mapping: Mapping | None
    """The peer's arena, read-only; None where it cannot be mapped. An array inside it keeps this."""
    writable_mapping: Mapping | None
    """The same with write access, once `open_writable` has succeeded."""
    reader: OsProcess | None
    """The peer's process, where it maps our arena; None where it does not, or is this process."""

    @property
    def sealed(self) -> bool:
        """Whether nobody on the way can read or change the frames."""

    @property
    def integrity(self) -> str:
        """What holds for the peer's bytes: ``"arrays"`` (each pull is authenticated), ``"frames"`` (those are for which
        the region says so), ``"none"``, ``"tls"`` (encrypted as well) or ``"mapped"`` (they do not travel)."""

    @property
    def heard(self) -> int | None:
        """Changes whenever something has come from the peer; None where it is on this host, whose processes need no
        sign of life."""

    rejected: abc.Mapping[str, str]
    """Transports that were tried for this peer before this one, each with the reason against it."""
    export: Callable[[int, int, int], tuple[int, int]] | None
    """``export(object_id, offset, nbytes)``: the seal and the rkey of bytes of our own arena, which a reference carries
    so that the peer's `pull` can do without asking. From any thread. None where `pull` needs neither."""

    @property
    def seals_payloads(self) -> bool:
        """Whether its frames are sealed and what is pulled besides may be changed on the way: then a payload above the
        eager limit must be ciphertext."""

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver. Called once, before anything is sent."""

    def reserve(self, nbytes: int) -> tuple[bytearray | memoryview, int]:
        """Room for one frame with its prefix: a writable buffer and the offset in it. Touches no system call.

        Raises:
            ValueError: `nbytes` is larger than ``max_frame + LENGTH_PREFIX``.
            ConnectionLost: the connection is closed.
        """

    def commit(self, nbytes: int) -> None:
        """The last reserved room holds `nbytes` of frame, prefix included. From here they belong to the connection
        until the peer has them, even when the task that wrote them is cancelled."""

    def flush(self) -> None:
        """Hand over what is committed. Never blocks: what the system does not take now goes when it can.

        A broken connection is not reported here but by `Receiver.connection_lost`.
        """

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> int:
        """The local address of `nbytes` of the peer's arena at `offset`; 0 where it cannot be mapped.

        Raises:
            ProtocolError: the range does not lie inside the peer's arena.
            LookupError: writable access was asked for and `open_writable` has not succeeded yet.
        """

    async def open_writable(self) -> None:
        """Get write access to the peer's arena (moved arrays). Idempotent.

        Raises:
            ConnectionLost: the peer is gone.
        """

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """Bring bytes of the peer's arena to `address` in this process. Only where `maps` is False.

        Args:
            region: which bytes.
            address: where they go.
            keep: what keeps the memory at `address`; held until nothing can be written there any more, which may be
                after this has raised or was cancelled.

        Raises:
            ConnectionLost: the peer is gone.
            ObjectLost: the peer does not have them any more.
            ProtocolError: the range does not lie inside the peer's arena.
        """

    async def aclose(self) -> None:
        """Send what is committed, then close. Idempotent; closes even when it is cancelled."""

    def abort(self) -> None:
        """Close at once, dropping what was not sent. Idempotent; any thread may call it after a fork."""


class Endpoint(Protocol):
    """One listener that peers connect to, and the means to connect to theirs. An async context manager."""

    kind: str
    address: str
    """What a peer passes to `connect`."""

    @property
    def seals_payloads(self) -> bool:
        """Whether its connections may be such, see `Connection.seals_payloads`."""

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen; `accepted` is called on the loop with each authenticated connection, not yet started."""

    async def connect(self, address: str) -> Connection:
        """Connect and authenticate.

        Raises:
            ConnectionLost: nobody listens there or the peer went away meanwhile.
            AuthenticationError: the peer refused us, or is not who it should be.
            VersionMismatch: the peer speaks another protocol or Python version.
        """

    @property
    def far_address(self) -> str:
        """Where peers on other hosts find this process; empty where they cannot."""

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """Ask ``find(name)`` for the address of a process on another host; it raises ConnectionLost where there is
        none."""

    def viability(self) -> str | None:
        """None when this endpoint can work here, else the reason and the remedy."""

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's. Nothing else may be called after that."""

    async def aclose(self) -> None:
        """Stop listening and remove what listening left in the file system. Connections stay open. Idempotent."""

    def dispose(self) -> None:
        """Free what the connections share, once all are closed. Idempotent."""
