"""The interfaces of a transport: connections, their receivers, and endpoints.

A transport moves whole frames in order between two processes and gives access to the peer's bytes in place. It knows
no calls, credits or actors: `zcactor.rpc` does. All code above this module works with any object that has these
interfaces. ``tests.conformance`` has the suite that each implementation passes.

Frames travel *in batches*: the sender encodes each frame straight into the connection's send buffer (`reserve`,
`commit`) and hands over all frames of a loop turn by one `flush`. The receiver gets them by one callback with a view
into the receive buffer, which is valid during the callback only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from zcactor.native import hot
    from zcactor.transport.mapping import Mapped, Mapping
    from zcactor.transport.os_process import OsProcess

    Commit: TypeAlias = Callable[[int, int], None]

__all__ = ["LENGTH_PREFIX", "Connection", "Endpoint", "PeerInfo", "Receiver", "RemoteRegion"]

LENGTH_PREFIX = 4
"""Bytes before each frame: its length, little-endian u32, not counting the prefix (FlatBuffers' size prefix)."""


class PeerInfo(msgspec.Struct, frozen=True):
    """The facts about a peer that the handshake has proved."""

    process: bytes
    """16 random bytes that name the process."""
    pid: int
    uid: int
    arena_nbytes: int
    """Bytes of the peer's arena. Each reference to the arena is checked against this size."""


class RemoteRegion(msgspec.Struct, frozen=True):
    """A range of the peer's arena, with all that a pull of it needs. The caller holds a lease on the bytes."""

    object_id: int
    """Key, in the peer's table, of the object that the bytes are part of."""
    offset: int
    """Bytes from the start of the peer's arena."""
    nbytes: int
    """More than 0."""
    seal: int = 0
    """The seal and the rkey that the peer's `Connection.export` returned; 0 where it returned nothing."""
    rkey: int = 0
    authenticate: bool = False
    """Whether the bytes are part of a pickle. They are authenticated then, also where the peers agreed not to
    authenticate arrays."""
    sealed: bool = False
    """Whether the bytes are ciphertext. The reader checks it when it decrypts, so the bytes are pulled without tags,
    also
    where the peers agreed to authenticate arrays."""


class Receiver(Protocol):
    """The callbacks of a connection. They run on the event loop's thread."""

    def frames_received(self, data: memoryview) -> None:
        """Take one or more whole frames, each behind its length prefix. `data` is valid until this returns.

        A `ProtocolError` that this raises closes the connection, and no other.
        """

    def connection_lost(self, cause: Exception | None) -> None:
        """Take note that the connection has ended. Called exactly once. `cause` is None after an `aclose` here."""


@runtime_checkable
class Connection(Protocol):
    """A connection to one authenticated peer: frames in order, and access to the bytes of the peer's arena.

    `reserve`, `commit` and `flush` are called under the caller's lock, from any thread; everything else on the loop's
    thread.
    """

    kind: str
    """``"local"``, ``"loopback"``, ``"verbs"`` or ``"tcp"``."""
    eager_limit: int
    """Bytes of the largest payload of a frame. Larger payloads travel by reference."""
    max_frame: int
    """Bytes of the largest frame, without its prefix. `reserve` refuses more."""
    recv_depth: int
    """Frames that the peer may have outstanding towards us. Both ends use the same number. Flow control is up to the
    caller."""
    peer: PeerInfo
    maps: bool
    """Whether `map` reaches the peer's arena. Where it does not, `pull` copies the bytes."""
    one_sided: bool
    """Whether `pull` reads the peer's memory without its processor, by RDMA READ."""
    mapping: Mapping | None
    """The windows onto the peer's arena, read-only; None where it is not mapped by them, and once nothing more is
    mapped."""
    writable_mapping: Mapping | None
    """The windows with write access; None until `open_writable` has succeeded."""
    unsent: bytes | None
    """The frames that this end had written when it saw, after it had done other things for long, that the peer had hung
    up: none of them was sent. None where the connection has not ended so."""
    lies_unread: bool
    """Whether received frames lie unread while the loop of this process does other things. Then the peer may have ended
    meanwhile, for all that its last frames say."""
    reader: OsProcess | None
    """The peer's process where it maps our arena; None where it does not, and where it is this process."""

    @property
    def sealed(self) -> bool:
        """Whether the frames are encrypted and authenticated, or never leave the host."""

    def describe(self) -> str:
        """Describe the way that frames and arrays take, for people, and the problems so far."""

    @property
    def integrity(self) -> str:
        """The protection of bytes that are pulled: ``"arrays"`` (all are authenticated), ``"frames"`` (only regions
        that
        ask for it), ``"none"``, ``"tls"`` (encrypted and authenticated) or ``"mapped"`` (nothing is pulled)."""

    @property
    def heard(self) -> int | None:
        """A number that changes whenever bytes have arrived from the peer. None where the peer is on this host, as the
        system reports the ends of its processes."""

    def turns_behind(self) -> int:
        """The number of turns of the loop after which all is read that has come by now, at most; 0 where nothing, not
        the peer's end either, lies unread. The loop's thread asks."""

    def hung_up(self) -> bool:
        """Whether the peer is known to have ended the connection, although its last frames may not be read yet. Any
        thread may ask."""

    native_out: hot.SendBuffer
    """The native send buffer, which takes whole frames without `reserve`."""
    rejected: abc.Mapping[str, str]
    """Transports that were tried for this peer and failed, each with the reason."""
    export: Callable[[int, int, int], tuple[int, int]] | None
    """``export(object_id, offset, nbytes)`` returns the seal and the rkey of bytes of our own arena. A reference
    carries
    them, so that the peer's `pull` need not ask for them. Any thread may call it. None where `pull` needs neither."""

    fetch_extents: Any
    """``await fetch_extents(places)`` gets the extents around places of the peer's GPU memory; see
    `zcactor.transport.local.extents.receive_extents`. None where the peer is not on this host."""

    ask_to_dial: Callable[[], None] | None
    """Ask the peer, over the frames, to call its end's `dial`. Set before `start` by who sends the frames; None where
    nobody does."""
    gpu_reading: Any
    """The READs from GPU to GPU, a `zcactor.transport.verbs.peer.connection.GpuReading`. None where the peer is not
    reached through a network card."""

    @property
    def seals_payloads(self) -> bool:
        """Whether frames are encrypted and pulled bytes are not. Payloads above the eager limit are encrypted before
        they are stored then, as they are pulled."""

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver frames to `receiver`. Called once, before anything is sent."""

    def reserve(self, nbytes: int) -> tuple[bytearray | memoryview, int]:
        """Reserve room for one frame with its prefix. Makes no system call.

        Returns:
            A writable buffer, and the offset of the room in it.

        Raises:
            ValueError: `nbytes` is larger than ``max_frame + LENGTH_PREFIX``.
            ConnectionLost: the connection is closed.
        """

    def commit(self, nbytes: int) -> None:
        """Hand over the first `nbytes` of the last reservation, a frame with its prefix. The connection sends them even
        when the task that wrote them is cancelled."""

    def flush(self) -> None:
        """Send all committed frames. Never blocks: bytes that the system does not take now are sent later.

        A broken connection is reported by `Receiver.connection_lost`, not here.
        """

    def send_stopped(self, error: BaseException | None) -> None:
        """Note that the native part has flushed, and that the system takes no more bytes now: go on when it does again.
        With an error end the connection. Any thread may call it."""

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> Mapped:
        """Return `nbytes` of the peer's arena at `offset`, as an object that owns the validity of their address: they
        stay readable, or writable, and in place as long as it lives, also after the end of the connection and of the
        peer. The address is 0 where the arena cannot be mapped.

        Raises:
            ConnectionLost: the connection has ended, and nothing more is mapped by it.
            LookupError: `writable` is True, and `open_writable` has not succeeded yet.
            OutOfMemory: this process has no address space left.
            ProtocolError: the range does not lie inside the peer's arena.
        """

    async def open_writable(self) -> None:
        """Get write access to the peer's arena, which moved arrays need. Idempotent.

        Raises:
            ConnectionLost: the peer has ended.
        """

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Copy bytes of the peer's arena to `address` in this process. Only where `maps` is False.

        Args:
            region: the bytes.
            address: their destination.
            keep: the object that owns the memory at `address`. It is held until nothing can write there any more, which
                may be after this has raised or was cancelled.
            commit: ``commit(start, nbytes)`` takes memory from the system for a part of the destination, or raises
                OutOfMemory. It is called for each part before bytes arrive there, in a thread, because it takes 0.3 s
                for each GiB. None: the destination has its memory.

        Raises:
            ConnectionLost: the peer has ended.
            ObjectLost: the peer has freed the object.
            OutOfMemory: as `commit`.
            ProtocolError: the range does not lie inside the peer's arena.
        """

    async def flow(self, region: RemoteRegion) -> Flow | None:
        """Prepare to take bytes of the peer's arena, which are used as they arrive. The flow has to be left.

        Returns:
            None where `pull` has to be used: this connection brings bytes in another way, has to check them first, is
            busy, or has ended.

        Raises:
            ProtocolError: the range does not lie inside the peer's arena.
        """

    def dial(self) -> None:
        """Open a data socket to the peer, for its pulls: it has asked for that, as it cannot open one to this process.
        Returns at once. Without effect where pulls need no data sockets."""

    async def aclose(self) -> None:
        """Send all committed frames, then close. Idempotent. Cancelling closes at once."""

    def abort(self) -> None:
        """Close at once and drop all bytes that were not sent. Idempotent. After a fork any thread may call it."""


class Flow(Protocol):
    """The bytes of a region, which one thread asks for and takes piece by piece as they arrive."""

    def begin(self) -> None:
        """Ask for the bytes, in the thread.

        Raises:
            OSError: the bytes cannot come.
        """

    def take(self, view: memoryview) -> None:
        """Fill `view` with the next bytes, in the thread.

        Raises:
            ObjectLost: the owner refuses.
            OSError: the bytes do not come, or `end` was called.
            ProtocolError: they are not the owner's.
        """

    def end(self) -> None:
        """Make the thread stop at once. Idempotent."""

    def left(self) -> None:
        """Note that the thread takes no more bytes. Called once, on the loop's thread."""


class Endpoint(Protocol):
    """A listener for peers, and the way to connect to theirs. An async context manager."""

    kind: str
    by_name: bool
    """Whether `connect` takes the name of a process, which is on this host. Otherwise it takes an address, which has to
    be published."""
    address: str
    """The address that a peer passes to `connect`."""

    @property
    def seals_payloads(self) -> bool:
        """Whether `Connection.seals_payloads` may be True for a connection of this endpoint."""

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen, and call `accepted` on the loop with each authenticated connection, which is not started yet."""

    async def connect(self, address: str) -> Connection:
        """Connect and authenticate.

        Raises:
            ConnectionLost: no process listens there, or the peer has ended meanwhile.
            AuthenticationError: the peer refused this process, or is another one than `address` names.
            VersionMismatch: the peer speaks another protocol or Python version.
        """

    @property
    def far_address(self) -> str:
        """The address for peers on other hosts; empty where they cannot connect to this process."""

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """Set the function that looks up a process on another host: ``find(name)`` returns its address, or raises
        ConnectionLost."""

    def viability(self) -> str | None:
        """Return None when this endpoint can work here, else the reason and the remedy."""

    def abandon(self) -> None:
        """Close this process's copies of the endpoint's descriptors, in a forked child. Nothing else may be called
        after
        that."""

    async def aclose(self) -> None:
        """Stop listening, and remove sockets and addresses from the file system. Connections stay open. Idempotent."""

    def dispose(self) -> None:
        """Free the resources that connections share, once all are closed. Idempotent."""
