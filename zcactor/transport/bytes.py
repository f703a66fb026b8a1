"""The second of the two seams of a transport: the bytes of the peer's arena, mapped in place or pulled.

`Bytes` says what a connection between hosts does: nothing of the peer's arena is mapped, and `pull` copies its bytes. A
transport that maps overrides `map` and `open_writable`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import msgspec

from zcactor.errors import ProtocolError
from zcactor.transport.mapping import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from zcactor.transport.frames import PeerInfo
    from zcactor.transport.mapping import Mapped, Mapping
    from zcactor.transport.os_process import OsProcess

    Commit: TypeAlias = Callable[[int, int], None]

__all__ = ["Bytes", "Extents", "Flow", "RemoteRegion"]


class RemoteRegion(msgspec.Struct, frozen=True):
    """A range of the peer's arena, with all that a pull of it needs. The caller holds a lease on the bytes."""

    object_id: int
    """Key, in the peer's table, of the object that the bytes are part of."""
    offset: int
    """Bytes from the start of the peer's arena."""
    nbytes: int
    """More than 0."""
    seal: int = 0
    """The seal and the rkey that the peer's `Bytes.export` returned; 0 where it returned nothing."""
    rkey: int = 0
    authenticate: bool = False
    """Whether the bytes are part of a pickle. They are authenticated then, also where the peers agreed not to
    authenticate arrays."""
    sealed: bool = False
    """Whether the bytes are ciphertext. The reader checks it when it decrypts, so the bytes are pulled without tags,
    also where the peers agreed to authenticate arrays."""


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


class Extents(Protocol):
    """The parts of our arena that a network card reads for peers."""

    extent_nbytes: int
    """Bytes of an extent, to whose multiples registrations are rounded."""
    registrations: int
    """Number of registrations."""
    copied: Callable[[int], None]
    """Called with the number of bytes that were copied, because their destination here could not be registered."""
    brought: Callable[[int], None]
    """Called with the number of bytes that came through the socket, because their owner could not register them."""

    def ahead(self, offset: int, nbytes: int) -> None:
        """Register extents around these bytes of the arena, in the background."""


class Bytes(ABC):
    """Access to the bytes of the arena of one authenticated peer. Used on the loop's thread."""

    peer: PeerInfo
    name: str
    """The name of the peer in messages."""
    maps = False
    """Whether `map` reaches the peer's arena. Where it does not, `pull` copies the bytes."""
    mapping: Mapping | None = None
    """The windows onto the peer's arena, read-only; None where it is not mapped by them, and once nothing more is
    mapped."""
    writable_mapping: Mapping | None = None
    """The windows with write access; None until `open_writable` has succeeded."""
    reader: OsProcess | None = None
    """The peer's process where it maps our arena; None where it does not, and where it is this process."""
    one_sided = False
    """Whether `pull` reads the peer's memory without its processor, by RDMA READ."""
    nbytes_per_s = math.inf
    """The cost of `pull`, as plans of groups reckon with it: bytes per second of bulk between two hosts."""
    export: Callable[[int, int, int], tuple[int, int]] | None = None
    """``export(object_id, offset, nbytes)`` returns the seal and the rkey of bytes of our own arena. A reference
    carries them, so that the peer's `pull` need not ask for them. Any thread may call it. None where `pull` needs
    neither."""
    ask_to_dial: Callable[[], None] | None = None
    """Ask the peer, over the frames, to call its end's `dial`. Set before `start` by who sends the frames; None where
    nobody does."""

    @property
    @abstractmethod
    def integrity(self) -> str:
        """The protection of bytes that are pulled: ``"arrays"`` (all are authenticated), ``"frames"`` (only regions
        that ask for it), ``"none"``, ``"tls"`` (encrypted and authenticated) or ``"mapped"`` (nothing is pulled)."""

    @property
    def extents(self) -> Extents | None:
        """The registered parts of our arena; None where no card reads it."""
        return None

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> Mapped:
        """Return `nbytes` of the peer's arena at `offset`, as an object that owns the validity of their address: they
        stay readable, or writable, and in place as long as it lives, also after the end of the connection and of the
        peer. The address is 0 where the arena cannot be mapped.

        Raises:
            ConnectionLost: the connection has ended, and nothing more is mapped by it.
            LookupError: `writable` is True, and `open_writable` has not succeeded.
            OutOfMemory: this process has no address space left.
            ProtocolError: the range does not lie inside the peer's arena.
        """
        self._check_range(offset, nbytes)
        if writable:
            raise LookupError(f"the arena of {self.name} cannot be mapped: pull from it")
        return NOWHERE

    def _check_range(self, offset: int, nbytes: int) -> None:
        """Raise `ProtocolError` where the range does not lie inside the peer's arena."""
        size = self.peer.arena_nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ProtocolError(f"{self.name} named {nbytes} bytes at {offset} of its arena, which has {size} bytes")

    async def open_writable(self) -> None:
        """Get write access to the peer's arena, which moved arrays need. Idempotent.

        Raises:
            ConnectionLost: the peer has ended.
            RuntimeError: the arena is not mapped, so moved arrays are pulled.
        """
        raise RuntimeError(f"the arena of {self.name} cannot be mapped: moved arrays are pulled from it")

    @abstractmethod
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
        del region
        return None

    def dial(self) -> None:  # noqa: B027
        """Open a data socket to the peer, for its pulls: it has asked for that, as it cannot open one to this process.
        Returns at once. Without effect where pulls need no data sockets."""
