"""Frames to a peer: frames with a credit are written at once, the others wait in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import ConnectionLost
from zcactor.rpc.codec import encode_into, frame_size
from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable, Sequence

    from zcactor.native import hot
    from zcactor.objectstore.ref import Region
    from zcactor.rpc.grants import Grants
    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["Outgoing"]

_MAX_REGIONS = 128
"""Regions in one frame, at most: 7 KiB. A message with more regions sends them ahead in REGIONS frames."""
_CALL, _REGIONS = int(Kind.CALL), int(Kind.REGIONS)


class Sending(Protocol):
    """The parts of a `zcactor.rpc.session.Session` that writing needs."""

    hub: Any
    lock: threading.RLock
    pending: dict[int, Any]
    credits: Any
    connection: Connection

    @property
    def has_releases(self) -> bool:
        """Whether leases wait to be given back."""

    def take_releases(self) -> list[tuple[int, int]]:
        """Take the leases to give back with the next frame."""

    def put_releases_back(self, releases: Sequence[tuple[int, int]]) -> None:
        """Note releases again, because their frame was not written."""

    def fail(self, error: Exception) -> None:
        """End the connection, because of `error`."""


class Outgoing:
    """The writing of a session's messages into the connection's send buffer. Used under the session's lock, except
    where a method says otherwise.

    Args:
        session: the session, whose credits and connection are used. Each frame takes its releases along. A connection
            on which half of a message was sent is dropped.
        backlog: frames that wait for credit; the native part, which writes frames too, checks whether it is empty.
        grants: leases the parts of messages.
        schedule_flush: function that lets the loop flush the written frames soon.
    """

    def __init__(
        self,
        session: Sending,
        backlog: deque[tuple[Any, ...]],
        grants: Grants,
        schedule_flush: Callable[[], None],
    ) -> None:
        self.wire: hot.Wire
        """The session's native part; the session sets it."""
        self.wrote = False
        """Whether the last frame was written, also where `frame` raises: a signal's handler may, right after that."""
        self._session = session
        self._backlog = backlog
        self._grants = grants
        self._schedule_flush = schedule_flush
        self._lock = session.lock
        self._pending = session.pending
        self._credits = session.credits
        self._buffer = session.connection.native_out
        self._reserve = session.connection.reserve
        self._commit = session.connection.commit
        self._counters = session.hub.counters

    def send(
        self,
        kind: int,
        flags: int,
        code: int,
        actor: int,
        message_id: int,
        extra: int,
        parts: Sequence[Part],
        payload: Any,
    ) -> None:
        """Encode one message into the send buffer, or keep it until a credit comes.

        Raises:
            Exception: the error of granting a part or writing the frame. Nothing was sent or leased then, unless
                `wrote` is True.
        """
        self.wrote = False
        if parts:
            self.write(kind, flags, code, actor, message_id, extra, self._grants.export(parts), payload, parts)
        else:
            self._enqueue(kind, flags, code, actor, message_id, extra, (), payload, parts)

    def write(
        self,
        kind: int,
        flags: int,
        code: int,
        actor: int,
        message_id: int,
        extra: int,
        regions: Sequence[Region],
        payload: Any,
        parts: Sequence[Part],
    ) -> None:
        """Do the same as `send`, for parts that are already leased to the peer, as `regions`."""
        left, begun, self.wrote = regions, False, False
        try:
            while len(left) > _MAX_REGIONS:
                self._enqueue(_REGIONS, 0, kind, 0, message_id, 0, left[:_MAX_REGIONS], b"", parts)
                left, begun = left[_MAX_REGIONS:], True
            self._enqueue(kind, flags, code, actor, message_id, extra, left, payload, parts)
        except BaseException as error:
            if begun:  # the peer has references, and would keep them for a message that never comes
                self._session.fail(
                    ConnectionLost(f"half of a message could not be sent: {error!r}", maybe_executed=True)
                )
            elif not self.wrote:
                self._grants.take_back(regions)
            raise

    def _enqueue(self, *entry: Any) -> None:
        """Send one frame, or keep it until a credit comes. Its parts are kept with it, because regions keep nothing
        alive."""
        self.wrote = False
        if not self._backlog and self._credits.take():
            try:
                self.frame(*entry[:-1])
            except ConnectionLost:  # the transport knows the end; `connection_lost` follows in the loop's next turn
                self._backlog.append(entry)
            except BaseException:
                if not self.wrote:
                    self._credits.returned(1)
                raise
        else:
            self._backlog.append(entry)

    def frame(
        self,
        kind: int,
        flags: int,
        code: int,
        actor: int,
        message_id: int,
        extra: int,
        regions: Sequence[Region],
        payload: Any,
    ) -> None:
        """Write one frame, whose credit was taken or which needs none. The frame takes releases and owed credits along.

        Raises:
            Exception: the error of writing. Nothing was written then; releases and credits wait for another frame. With
                `wrote` the frame was written, and a signal's handler has raised.
        """
        releases: Sequence[tuple[int, int]] = ()
        session, credits, owed = self._session, self._credits, 0
        self.wrote, before, writing = False, self._buffer.committed, True
        try:
            if not regions and self.wire.frame(kind, flags, code, actor, message_id, extra, payload):
                self.wrote = True
                return
            writing = False  # until the last step
            if session.has_releases:
                releases = session.take_releases()
            owed = credits.take_owed() if credits.owed else 0
            buffer, offset = self._reserve(frame_size(len(regions), len(releases), len(payload)))
            nbytes = encode_into(
                buffer, offset, kind, flags, code, owed, actor, message_id, extra, regions, releases, payload
            )
            writing = True
            self._commit(nbytes)
            self.wrote = True
        except BaseException:
            self.wrote = writing and self._buffer.committed != before
            if not self.wrote:  # another frame will take them
                if owed:
                    credits.consumed(owed)
                session.put_releases_back(releases)
            raise
        counters = self._counters
        counters.frames_sent += 1
        counters.bytes_eager += len(payload)
        if regions:
            counters.bytes_lent += sum(region.nbytes for region in regions)

    def credits_returned(self, count: int) -> None:
        """Take `count` credits from the peer, and write waiting frames as far as there is credit. This method takes the
        lock itself."""
        with self._lock:
            if count:
                self._credits.returned(count)
            backlog = self._backlog
            if not backlog:
                return
            while backlog and self._credits.take():
                try:
                    self.frame(*backlog[0][:-1])
                except ConnectionLost:  # as in `_enqueue`
                    return
                except BaseException:
                    if self.wrote:
                        backlog.popleft()
                    else:
                        self._credits.returned(1)
                    raise
                entry = backlog.popleft()
                if entry[0] == _CALL and (call := self._pending.get(entry[4])) is not None:
                    call.undo = None
        self._schedule_flush()
