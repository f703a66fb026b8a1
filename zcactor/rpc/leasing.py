"""The leases of one session: granting leases to the peer, and giving back the leases that the peer has granted.

An object may be finalized anywhere, also inside a lock when the garbage collector runs there, so a release only appends
to a deque. The next frame takes the release along, or a RELEASE frame does in the loop's next turn. A thread that drops
the arguments of a method which it has run sends their releases itself.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.table import LeaseTable

__all__ = ["LockedLeases", "LockedLeasesOfCopies", "Releasing", "collecting"]

_MAX_RELEASES = 128
_RELEASE = int(Kind.RELEASE)
_RELEASE_DELAY = 1.0
"""Seconds that the peer's memory may stay leased in order to save a frame."""
_MOST_DELAYED = 4 << 20
"""Bytes of the peer's memory that may stay leased so by several leases, and no more than one part in 64 of its arena. A
process that only takes the results of another one sends it no frame, and takes as many as it can in a second."""
_MOST_ALONE = 4
"""The largest part of the peer's arena, as one in so many, that may stay leased so by a single lease."""


collecting: dict[int, list[Any]] = {}
"""The sessions whose first release was noted, for each thread that is about to send them itself, by its identifier (see
`Releasing.send_releases`). It is awake, and the loop's thread may get the processor much later."""


class LockedLeases:
    """The lease table for the native part, which writes frames without the session's lock."""

    __slots__ = ("_leases", "_lock")

    def __init__(self, leases: LeaseTable, lock: threading.Lock) -> None:
        self._leases = leases
        self._lock = lock

    def grant(self, object_id: int, keep: object) -> None:
        """See `LeaseTable.grant`."""
        with self._lock:
            self._leases.grant(object_id, keep)

    def withdraw(self, object_id: int) -> None:
        """Take back a lease that was granted for a frame that is not sent, unless the end of the connection has ended
        it."""
        with self._lock:
            if self._leases.get(object_id) is not None:
                self._leases.release(object_id, 1)

    def release(self, object_id: int, count: int) -> None:
        """See `LeaseTable.release`."""
        with self._lock:
            self._leases.release(object_id, count)


class LockedLeasesOfCopies(LockedLeases):
    """`LockedLeases` for a peer that does not map our arena, and keeps copies of the objects that it has leased."""

    __slots__ = ()

    def grant(self, object_id: int, keep: Any) -> None:
        """See `LockedLeases`."""
        if keep.of_numpy:
            keep.store.take_over(keep.offset)
        super().grant(object_id, keep)


class Releasing:
    """The part of a `zcactor.rpc.session.Session` that gives leases back; the attributes are the session's."""

    hub: Any
    loop: asyncio.AbstractEventLoop
    lock: threading.Lock
    wire: Any
    closed: Exception | None
    successor: Any
    _backlog: deque[tuple[Any, ...]]
    _released: deque[int]
    _release_scheduled: bool
    _release_delayed: bool
    _delayed_nbytes: int
    connection: Any
    _note_release: Callable[[int], None]
    _on_loop: Callable[[Callable[[], None]], None]
    _send: Callable[..., None]
    _flush_locked: Callable[[], None]

    @property
    def is_replaced(self) -> bool:
        """Whether the session's twin is used instead."""
        return self.successor is not None and self.successor.closed is None

    @property
    def in_use(self) -> Any:
        """The session to send by: the twin that is used instead, or this one. The peer may close a connection that is
        replaced at any moment, and does not read what comes by it then."""
        return self.successor if self.is_replaced else self

    def release(self, object_id: int, nbytes: int = 0) -> None:
        """Give back a lease that the peer granted. Any thread may call this at any time; it takes no lock. `nbytes` is
        as for `release_later`, and has no effect here."""
        if self.successor is not None and self.is_replaced:
            self.successor.release(object_id)
            return
        self._note_release(object_id)
        self._release_soon()

    def _release_soon(self) -> None:
        if not self._release_scheduled:
            self._release_scheduled = True
            due = collecting.get(threading.get_ident()) if collecting else None
            if due is not None:
                due.append(self)
            else:
                self._on_loop(self._send_releases)

    def release_later(self, object_id: int, nbytes: int = 0) -> None:
        """`release` for a lease on bytes that have been read: a frame is likely to follow, which takes the release
        along. Releases that no frame has taken within `_RELEASE_DELAY` are sent in a frame of their own, and those of
        many bytes at once.

        Args:
            object_id: the object.
            nbytes: bytes of the peer's memory that the lease keeps; 0 for a promise.
        """
        if self.successor is not None and self.is_replaced:
            self.successor.release_later(object_id, nbytes)
            return
        much = nbytes > 0 and self._is_much(nbytes)
        self._note_release(object_id)
        if much:
            self._release_soon()
        elif not self._release_scheduled and not self._release_delayed and self.closed is None:
            self._release_delayed = True
            self._on_loop(self._send_releases_later)

    def _is_much(self, nbytes: int) -> bool:
        """Whether the leases that were noted, and one on so many bytes, keep too much of the peer's memory."""
        before = self._delayed_nbytes if self.has_releases else 0
        self._delayed_nbytes = before + nbytes
        arena: int = self.connection.peer.arena_nbytes
        return self._delayed_nbytes > (min(_MOST_DELAYED, arena // 64) if before else arena // _MOST_ALONE)

    def _send_releases_later(self) -> None:
        self.loop.call_later(_RELEASE_DELAY, self._send_delayed)

    def _send_delayed(self) -> None:
        self._release_delayed = False
        self._send_releases()

    def hold_releases(self) -> bool:
        """Promise that a frame follows at once and takes the releases noted meanwhile; see `unhold_releases`."""
        held = not self._release_scheduled
        self._release_scheduled = True
        return held

    def unhold_releases(self) -> None:
        """End `hold_releases`: releases that no frame took are sent in a frame of their own."""
        self._release_scheduled = False
        noted = self._released if self.wire is None else self.wire.releases  # as `has_releases`, of each plain call
        if noted and self.closed is None:
            self._release_scheduled = True
            self._on_loop(self._send_releases)

    def send_releases(self) -> None:
        """Send the releases that were noted while the calling thread was `collecting`. Any thread may call this."""
        if self.closed is not None:
            self._on_loop(self._send_releases)
        else:
            self._release_scheduled = False
            self._write_releases()

    def _send_releases(self) -> None:
        self._release_scheduled = False
        if self.closed is not None:
            self.hub.outlived(self)
        else:
            self._write_releases()

    def _write_releases(self) -> None:
        with self.lock:
            while self.has_releases:
                self._send(_RELEASE, 0, 0, 0, 0, 0, (), b"")
                if self._backlog:
                    break  # they go with the backlog
            self._flush_locked()

    def take_releases(self) -> list[tuple[int, int]]:
        """Take the releases for the next frame: object ids, and the count of each. Called under the lock."""
        if self.wire is not None:
            noted = self.wire.take_releases(_MAX_RELEASES)
        else:
            noted = [self._released.popleft() for _ in range(min(len(self._released), _MAX_RELEASES))]
        return list(Counter(noted).items())

    def put_releases_back(self, taken: Sequence[tuple[int, int]]) -> None:
        """Note the releases from `take_releases` again, because their frame was not sent."""
        for object_id, number in taken:
            for _ in range(number):
                self._note_release(object_id)

    @property
    def has_releases(self) -> bool:
        """Whether releases are noted that no frame has taken."""
        return bool(self._released) if self.wire is None else self.wire.releases > 0
