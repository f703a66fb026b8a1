"""The open connections of one process, and its knowledge of the processes at their other ends."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.session import Session

__all__ = ["Sessions", "StandIn"]

_ID: Final = re.compile(r"(?:process )?(?<![^\s('\"])([0-9a-f]{32})(?![./\w-])(?:@([^\s,;]*[^\s,;:.]))?")
"""The form in which messages of transports name a process: a word of its own. Parts of paths are left as they are."""
_NAMED: Final = 3
"""Number of actors by which a message names a process, at most."""
_REMEMBERED: Final = 1_000
"""Number of ended processes whose greetings are remembered."""


class StandIn(Protocol):
    """The stand-in for an actor of another process, which learns of the end of the connection to it."""

    label: str
    location: tuple[bytes, int]
    route: tuple[Session, int] | None

    def change(self, old: Session, new: Session) -> Coroutine[Any, Any, None]:
        """Use `new` instead of its twin `old`."""

    def changed(self, state: str, location: tuple[bytes, int], cause: str) -> None:
        """Take the head's news of the actor's state."""

    def die(self, cause: str) -> None:
        """Record that the actor is dead for good."""

    def given_up(self, calls: Sequence[Call], cause: str) -> None:
        """End `calls`, which are open at the actor's process, because that is silent."""

    def leave(self, session: Session) -> None:
        """Stop using `session`, on which no call is open."""

    def lost(self, calls: Sequence[Call], cause: str) -> Coroutine[Any, Any, None]:
        """Find out the actor's state after the connection was lost with `calls` unanswered."""


class Sessions:
    """The table of sessions. Used on the loop's thread.

    Args:
        process: id of this process, 16 bytes.
        head: see `Sessions.head`.
    """

    def __init__(self, process: bytes, head: bytes = b"") -> None:
        self.process = process
        self.head = head
        """Id of the process of the head's node agent, which knows every actor. With one node this is its only agent."""
        self.node = b""
        """Id of the process of our own node's agent; empty where no agent started this process."""
        self.used: dict[bytes, Session] = {}
        """The session in use for each peer."""
        self.remotes: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        """Stand-ins of the actors for which this process has handles, by actor id."""
        self.kept: Counter[bytes] = Counter()
        """Number of groups that need a connection to a peer, which therefore stays open."""
        self._all: dict[Session, None] = {}
        self._leaving: dict[bytes, tuple[Session, asyncio.Event]] = {}
        """Session that may be closed by agreement, by peer, with the event of its closing or of its renewed use."""
        self._gone: dict[bytes, Hello] = {}  # greetings of processes whose connections have ended
        self._watchers: dict[Session, weakref.WeakKeyDictionary[StandIn, None]] = {}

    def all(self) -> Iterable[Session]:
        """Every open session."""
        return self._all

    def end_leases(self) -> None:
        """End the leases of all sessions at the end of the runtime, when its loop is closed. Peers may read on in
        memory that they have mapped. Idempotent."""
        for session in list(self._all):
            session.end_leases()

    def add(self, session: Session) -> None:
        """Enter `session`, which is open."""
        self._all[session] = None

    def remove(self, session: Session) -> Session | None:
        """Remove `session`, which is lost. Returns another session with the same peer, which is used instead, or
        None."""
        self._all.pop(session, None)
        peer = session.peer_process
        self._settled(session)
        if session.peer_hello is not None:
            self._gone[peer] = session.peer_hello
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        others = (each for each in self._all if each.peer_process == peer != self.process and each.closed is None)
        another = next(others, None)
        if self.used.get(peer) is session:
            del self.used[peer]
        if peer not in self.used and another is not None and not self.is_leaving(another):
            self.used[peer] = another
        return another

    # ---------------------------------------------------------------- closing by agreement

    def leave(self, session: Session) -> None:
        """Stop using `session`, which may be closed by agreement. Until that is settled no other connection to its peer
        is opened; a connection that was being opened before is its twin (`zcactor.peers.simultaneous_open`)."""
        peer = session.peer_process
        if self.used.get(peer) is session:
            del self.used[peer]
            self._leaving[peer] = session, asyncio.Event()

    def living(self, peer: bytes) -> Session | None:
        """The session in use for `peer`, or otherwise the one that may be closed by agreement, or None."""
        found = self.used.get(peer) or self._leaving.get(peer, (None,))[0]
        return None if found is None or found.closed is not None else found

    def is_leaving(self, session: Session) -> bool:
        """Whether `session` may be closed by agreement."""
        return self._leaving.get(session.peer_process, (None, None))[0] is session

    def stay(self, session: Session) -> None:
        """Use `session` again, which is not closed."""
        if session.closed is None:
            self.used.setdefault(session.peer_process, session)
        self._settled(session)

    def _settled(self, session: Session) -> None:
        leaving, event = self._leaving.get(session.peer_process, (None, None))
        if leaving is session and event is not None:
            del self._leaving[session.peer_process]
            event.set()

    async def left(self, peer: bytes) -> None:
        """Return once no connection to `peer` is about to be closed by agreement."""
        while peer in self._leaving:
            await self._leaving[peer][1].wait()

    # ---------------------------------------------------------------- watching for the end of a session

    def watch(self, session: Session, actor: StandIn) -> None:
        """Let `actor` learn of the loss of `session`."""
        self._watchers.setdefault(session, weakref.WeakKeyDictionary())[actor] = None

    def unwatch(self, session: Session) -> list[StandIn]:
        """Remove the stand-ins that would learn of the loss of `session`, and return them."""
        return list(self._watchers.pop(session, ()))

    def watched(self, session: Session) -> bool:
        """Whether this process has a handle of an actor at the other end of `session`."""
        return bool(self._watchers.get(session))

    # ---------------------------------------------------------------- names

    def describe(self, process: bytes) -> str:
        """The name of a process in messages: by its actors, by its greeting, or otherwise by as many digits of its id
        as ``zcactor status`` shows of a node."""
        labels = sorted(remote.label for remote in list(self.remotes.values()) if remote.location[0] == process)
        if labels:
            more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
            return f"the process of {', '.join(labels[:_NAMED])}{more}"
        session = self.used.get(process)
        hello = session.peer_hello if session is not None else self._gone.get(process)
        what = "node agent" if process == self.head else "process"
        if hello is None:
            return f"{what} {process.hex()[:8]}"
        return f"{what if hello.role == 'worker' else hello.role} {process.hex()[:8]}, pid {hello.pid} on {hello.host}"

    def named(self, text: str) -> str:
        """Translate `text` of a transport, which names processes by their ids, for users."""

        def name(match: re.Match[str]) -> str:
            place = f" at {match[2]}" if match[2] else ""
            return self.describe(bytes.fromhex(match[1])) + place

        return _ID.sub(name, text)
