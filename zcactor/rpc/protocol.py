"""The states of calls, streams and objects, and every legal transition, as data.

Everything that decides a state is in this file, and nothing here knows the role of a process. The shape is h11's
``_state.py``. An illegal event that the peer caused is the peer's fault (`ProtocolError`); an illegal event that only
our own code can cause is a bug here (`RuntimeError`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CALL_TRANSITIONS",
    "OBJECT_TRANSITIONS",
    "STREAM_TRANSITIONS",
    "CallEvent",
    "CallState",
    "ObjectEvent",
    "ObjectState",
    "StreamEvent",
    "StreamState",
    "advance_call",
    "advance_object",
    "advance_stream",
]


class CallState(IntEnum):
    """State of a call, as its caller sees it."""

    QUEUED = 0
    """The call waits for a credit; the peer does not know it."""
    SENT = 1
    CANCELLING = 2
    """CANCEL was sent; the response still comes and tells the outcome."""
    DONE = 3


class CallEvent(IntEnum):
    """Events of a call."""

    CREDIT = 0
    """A credit was taken and the frame written."""
    RESPONSE = 1
    """The peer's RESPONSE, of any status."""
    CANCEL = 2
    """The caller, or its deadline, gives up."""
    LOST = 3
    """The connection has ended."""


CALL_TRANSITIONS: Final[dict[tuple[CallState, CallEvent], CallState]] = {
    (CallState.QUEUED, CallEvent.CREDIT): CallState.SENT,
    (CallState.QUEUED, CallEvent.CANCEL): CallState.DONE,
    (CallState.QUEUED, CallEvent.LOST): CallState.DONE,
    (CallState.SENT, CallEvent.RESPONSE): CallState.DONE,
    (CallState.SENT, CallEvent.CANCEL): CallState.CANCELLING,
    (CallState.SENT, CallEvent.LOST): CallState.DONE,
    (CallState.CANCELLING, CallEvent.RESPONSE): CallState.DONE,
    (CallState.CANCELLING, CallEvent.CANCEL): CallState.CANCELLING,  # a deadline may pass after a cancel
    (CallState.CANCELLING, CallEvent.LOST): CallState.DONE,
    (CallState.DONE, CallEvent.CANCEL): CallState.DONE,  # too late, which is not an error
    (CallState.DONE, CallEvent.LOST): CallState.DONE,
}
"""(state, event) to the next state; a missing pair is illegal."""


class StreamState(IntEnum):
    """State of a stream of items, as its consumer sees it."""

    OPEN = 0
    CLOSING = 1
    """The consumer stopped early and CANCEL was sent; items under way are dropped until the response comes."""
    DONE = 2


class StreamEvent(IntEnum):
    """Events of a stream."""

    ITEM = 0
    RESPONSE = 1
    """The peer's RESPONSE: the end of the items, an error, or a cancellation."""
    CLOSE = 2
    """The consumer takes no more items."""
    LOST = 3
    """The connection has ended."""


STREAM_TRANSITIONS: Final[dict[tuple[StreamState, StreamEvent], StreamState]] = {
    (StreamState.OPEN, StreamEvent.ITEM): StreamState.OPEN,
    (StreamState.OPEN, StreamEvent.RESPONSE): StreamState.DONE,
    (StreamState.OPEN, StreamEvent.CLOSE): StreamState.CLOSING,
    (StreamState.OPEN, StreamEvent.LOST): StreamState.DONE,
    (StreamState.CLOSING, StreamEvent.ITEM): StreamState.CLOSING,
    (StreamState.CLOSING, StreamEvent.RESPONSE): StreamState.DONE,
    (StreamState.CLOSING, StreamEvent.CLOSE): StreamState.CLOSING,
    (StreamState.CLOSING, StreamEvent.LOST): StreamState.DONE,
    (StreamState.DONE, StreamEvent.CLOSE): StreamState.DONE,
    (StreamState.DONE, StreamEvent.LOST): StreamState.DONE,
}
"""(state, event) to the next state; a missing pair is illegal."""


class ObjectState(IntEnum):
    """State of an object in its owner's table."""

    DRAFT = 0
    """Its bytes are being written, and only the owner can name it."""
    SEALED = 1
    """Its bytes do not change any more; leases may be granted."""
    FREE = 2
    """Its bytes may be reused."""


class ObjectEvent(IntEnum):
    """Events of an object."""

    SEAL = 0
    ABORT = 1
    """The writer has given up."""
    LAST_LEASE = 2
    """The last lease has ended: its holder released it, or was fenced off."""


OBJECT_TRANSITIONS: Final[dict[tuple[ObjectState, ObjectEvent], ObjectState]] = {
    (ObjectState.DRAFT, ObjectEvent.SEAL): ObjectState.SEALED,
    (ObjectState.DRAFT, ObjectEvent.ABORT): ObjectState.FREE,
    (ObjectState.SEALED, ObjectEvent.LAST_LEASE): ObjectState.FREE,
}
"""(state, event) to the next state; a missing pair is illegal."""

_PEER_EVENTS: Final = frozenset(
    {
        (CallEvent, CallEvent.RESPONSE),
        (StreamEvent, StreamEvent.ITEM),
        (StreamEvent, StreamEvent.RESPONSE),
        (ObjectEvent, ObjectEvent.LAST_LEASE),
    }
)

_State = TypeVar("_State", bound=IntEnum)
_Event = TypeVar("_Event", bound=IntEnum)


def _advance(what: str, table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """Look a transition up, or raise the error that blames the peer or our own code for its absence."""
    following = table.get((state, event))
    if following is not None:
        return following
    legal = ", ".join(known.name for at, known in table if at is state) or "none"
    message = f"{event.name} is not legal for {what} in state {state.name}; legal there: {legal}"
    if (type(event), event) in _PEER_EVENTS:
        raise ProtocolError(message)
    raise RuntimeError(message)


def advance_call(state: CallState, event: CallEvent) -> CallState:
    """Return the state of a call after `event`.

    Raises:
        ProtocolError: the peer answered a call that was not sent, or answered it twice.
        RuntimeError: our own code sent a call twice.
    """
    return _advance("a call", CALL_TRANSITIONS, state, event)


def advance_stream(state: StreamState, event: StreamEvent) -> StreamState:
    """Return the state of a stream after `event`.

    Raises:
        ProtocolError: the peer sent an item or a response after the end.
    """
    return _advance("a stream", STREAM_TRANSITIONS, state, event)


def advance_object(state: ObjectState, event: ObjectEvent) -> ObjectState:
    """Return the state of an object after `event`.

    Raises:
        ProtocolError: a lease was released on an object that is not sealed.
        RuntimeError: our own code sealed or aborted an object that is not a draft.
    """
    return _advance("an object", OBJECT_TRANSITIONS, state, event)
