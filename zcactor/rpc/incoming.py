"""A call that a peer made to an actor here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["Incoming"]


class Answering(Protocol):
    """The way back to the caller; see `zcactor.rpc.session.Session`."""

    wire: Any
    connection: Connection
    peer_process: bytes

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False
    ) -> None:
        """Answer a call."""

    def send_item(self, incoming: Incoming, index: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """One item of a stream."""

    def hold_releases(self) -> bool:
        """Promise that a frame follows at once."""

    def unhold_releases(self) -> None:
        """It has not."""

    def fail(self, error: Exception) -> None:
        """End the connection."""


class Incoming:
    """Answered exactly once. Attributes are class-level defaults where they rarely change: one is made per call."""

    payload: Any = b""
    """Packed arguments, or the list of them when they came as plain values."""
    parts: Sequence[Part] = ()
    flags = 0
    timeout_ns = 0
    """What is left of the caller's deadline, nanoseconds; 0 for none."""
    deadline = 0.0
    """The same as a time of this loop."""
    blockers = 0
    """References among the arguments that are not here yet; the call starts when there are none."""
    cancelled = False
    started = False
    task: asyncio.Task[None] | None = None
    stream: Any = None
    """The producer, of a generator method."""
    host: Any = None
    """The actor that took the call."""

    def __init__(self, session: Answering, call_id: int, actor: int, code: int, payload: Any) -> None:
        self.session = session
        self.id = call_id
        self.actor = actor
        self.code = code
        self.payload = payload
