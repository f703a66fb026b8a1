"""A call that a peer made to an actor of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["NO_ANSWER", "Incoming"]

NO_ANSWER: Final = object()
"""The result of an inline method whose caller does not keep the call open: no RESPONSE is sent."""


class Answering(Protocol):
    """The way back to the caller, as a call needs it; see `zcactor.rpc.session.Session`."""

    wire: Any
    connection: Connection
    incoming: dict[int, Incoming]
    peer_process: bytes

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False,
        pushed: int = 0,
    ) -> None:  # fmt: skip
        """Answer a call."""

    def send_item(self, incoming: Incoming, index: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Send one item of a stream."""

    def hold_releases(self) -> bool:
        """Promise that a frame follows at once."""

    def unhold_releases(self) -> None:
        """Take the promise of `hold_releases` back."""

    def fail(self, error: Exception) -> None:
        """End the connection, because of `error`."""


class Incoming:
    """One call of a peer, answered exactly once. Attributes that rarely change are class-level defaults, because an
    object is made per call."""

    payload: Any = b""
    """Packed arguments, or their list when they came as plain values."""
    parts: Sequence[Part] = ()
    flags = 0
    timeout_ns = 0
    """Time left of the caller's deadline in nanoseconds; 0: no deadline."""
    deadline = 0.0
    """The deadline as a time of this process's loop; 0: no deadline."""
    blockers = 0
    """Number of references among the arguments that have not come yet; the call starts at 0."""
    cancelled = False
    started = False
    returning = False
    """Whether the call goes back to its caller, unrun, once its references have come: its actor moves."""
    task: asyncio.Task[None] | None = None
    stream: Any = None
    """The producer of a generator method."""
    host: Any = None
    """The actor that took the call."""
    blamed = ""
    """The actor that a failure of the call names; empty for the actor that took the call."""
    forwards: Any = None
    """The FORWARD frames that the call has got, as a list of number, key and id of the process to push to; or None."""

    def __init__(self, session: Answering, call_id: int, actor: int, code: int, payload: Any) -> None:
        self.session = session
        self.id = call_id
        self.actor = actor
        self.code = code
        self.payload = payload
