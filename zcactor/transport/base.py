"""A connection, which has both seams of a transport, and the endpoint that makes connections.

A transport moves whole frames in order between two processes (`zcactor.transport.frames.Frames`) and gives access to
the peer's bytes (`zcactor.transport.bytes.Bytes`). It knows no calls, credits or actors: `zcactor.rpc` does.
``tests.conformance`` has the suite that each implementation passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from zcactor.transport.bytes import Bytes
from zcactor.transport.frames import Frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

__all__ = ["Connection", "Endpoint"]


class Connection(Frames, Bytes):
    """A connection to one authenticated peer: frames in order, and access to the bytes of the peer's arena."""


class Endpoint(ABC):
    """A listener for peers, and the way to connect to theirs. An async context manager, which closes it at the end of
    the block."""

    kind: str
    """As of the connections that it makes; see `zcactor.transport.frames.Frames`."""
    by_name = False
    """Whether `connect` takes the name of a process, which is on this host. Otherwise it takes an address, which has to
    be published."""
    seals_payloads = False
    """Whether `Connection.seals_payloads` may be True for a connection of this endpoint."""
    address: str
    """The address that a peer passes to `connect`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen, and call `accepted` on the loop with each authenticated connection, which is not started yet."""

    @abstractmethod
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
        return ""

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """Set the function that looks up a process on another host: ``find(name)`` returns its address, or raises
        ConnectionLost. Ignored by default: such an endpoint is given addresses."""
        del find

    def viability(self) -> str | None:
        """Return None when this endpoint can work here, else the reason and the remedy."""
        return None

    def abandon(self) -> None:  # noqa: B027
        """Close this process's copies of the endpoint's descriptors, in a forked child. Nothing else may be called
        after that."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop listening, and remove sockets and addresses from the file system. Connections stay open. Idempotent."""

    def dispose(self) -> None:  # noqa: B027
        """Free the resources that connections share, once all are closed. Idempotent. By default there are none."""
