"""A call that a peer made to an actor here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session

__all__ = ["Incoming"]


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

    def __init__(self, session: Session, call_id: int, actor: int, code: int, payload: Any) -> None:
        self.session = session
        self.id = call_id
        self.actor = actor
        self.code = code
        self.payload = payload
