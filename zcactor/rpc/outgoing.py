"""Frames to a peer: what there is credit for is written at once, the rest waits in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import ConnectionLost
from zcactor.rpc.codec import encode_into, frame_size
from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.ref import Region
    from zcactor.rpc.grants import Grants
    from zcactor.rpc.parts import Part
    from zcactor.transport.base import Connection

__all__ = ["Outgoing"]

_MAX_REGIONS = 128
"""Regions in one frame: 7 KiB of its room. A message with more sends them ahead in REGIONS frames."""
_CALL, _REGIONS = int(Kind.CALL), int(Kind.REGIONS)


class Sending(Protocol):
    """What writing needs of a `zcactor.rpc.session.Session`."""

    hub: Any
    lock: threading.Lock
    pending: dict[int, Any]
    credits: Any
    wire: Any
    connection: Connection

    @property
    def has_releases(self) -> bool:
        """Whether leases wait to be given back."""

    def take_releases(self) -> list[tuple[int, int]]:
        """Leases to give back with the next frame."""

    def put_releases_back(self, releases: Sequence[tuple[int, int]]) -> None:
        """It was not written."""

    def fail(self, error: Exception) -> None:
        """End the connection."""


class Outgoing:
    """Writes a session's messages into the connection's send buffer. Under its lock, where nothing else is said.

    Args:
        session: its credits and connection are used, and dropped where half of a message was sent. Each frame takes its
            releases along.
        backlog: frames that wait for credit; the native part, which writes frames too, looks whether there are some.
        grants: leases what messages refer to.
        schedule_flush: has the loop hand over soon what is written.
    """

    def __init__(
        self,
        session: Sending,
        backlog: deque[tuple[Any, ...]],
        grants: Grants,
        schedule_flush: Callable[[], None],
    ) -> None:
        self._session = session
        self._backlog = backlog
        self._grants = grants
        self._schedule_flush = schedule_flush
        self._lock = session.lock
        self._pending = session.pending
        self._credits = session.credits
        self._wire = session.wire
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
        """Encode one message into the send buffer, or keep it until there is a credit.

        Raises what granting a part or writing the frame raises; then nothing was sent and no lease was granted.
        """
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
        """The same for parts that are leased to the peer already, as `regions`."""
        left, begun = regions, False
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
            else:
                self._grants.take_back(regions)
            raise

    def _enqueue(self, *entry: Any) -> None:
        """Send one frame, or keep it until there is a credit. Its parts are kept with it, regions hold nothing."""
        if not self._backlog and self._credits.take():
            try:
                self.frame(*entry[:-1])
            except ConnectionLost:  # the transport knows of the end; `connection_lost` follows in the loop's next turn
                self._backlog.append(entry)
            except BaseException:
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
        """Write one frame, whose credit was taken or which needs none. Releases and owed credits ride with it.

        Raises what writing it raises; then nothing was written, and they wait for another frame.
        """
        if (
            self._wire is not None
            and not regions
            and self._wire.frame(kind, flags, code, actor, message_id, extra, payload)
        ):
            return
        releases: Sequence[tuple[int, int]] = ()
        session = self._session
        if session.has_releases:
            releases = session.take_releases()
        credits = self._credits
        owed = credits.take_owed() if credits.owed else 0
        try:
            buffer, offset = self._reserve(frame_size(len(regions), len(releases), len(payload)))
            self._commit(
                encode_into(
                    buffer, offset, kind, flags, code, owed, actor, message_id, extra, regions, releases, payload
                )
            )
        except BaseException:  # another frame will tell the peer
            if owed:
                credits.consumed(owed)
            session.put_releases_back(releases)
            raise
        counters = self._counters
        counters.frames_sent += 1
        counters.bytes_eager += len(payload)

    def credits_returned(self, count: int) -> None:
        """The peer takes `count` frames more: write what waits, as far as there is credit. Takes the lock itself."""
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
                    self._credits.returned(1)
                    raise
                entry = backlog.popleft()
                if entry[0] == _CALL and (call := self._pending.get(entry[4])) is not None:
                    call.undo = None
        self._schedule_flush()
