"""The open connections of one process, and what is known of the processes at their other ends."""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from zcactor.rpc.call import Call
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.session import Session

__all__ = ["Sessions", "StandIn"]

_ID: Final = re.compile(r"(?:process )?(?<![/\w])([0-9a-f]{32})(?![.\w])(?:@([^\s,;]*[^\s,;:.]))?")
"""How transports name a process in their messages."""
_NAMED: Final = 3
"""Actors by which a message names a process."""
_REMEMBERED: Final = 1_000
"""Processes of which is remembered what they said of themselves."""


class StandIn(Protocol):
    """What stands for an actor of another process: told of the end of the connection to it."""

    label: str
    location: tuple[bytes, int]
    session: Session | None

    def change(self, old: Session, new: Session) -> Coroutine[Any, Any, None]:
        """Use `new` instead of its twin `old`."""

    def changed(self, state: str, location: tuple[bytes, int], cause: str) -> None:
        """The head says what has become of the actor."""

    def die(self, cause: str) -> None:
        """The actor is dead for good."""

    def given_up(self, calls: Sequence[Call], cause: str) -> None:
        """Its process is silent, and `calls` are open there."""

    def lost(self, calls: Sequence[Call], cause: str) -> Coroutine[Any, Any, None]:
        """The connection is lost, with `calls` unanswered."""


class Sessions:
    """The table of them. On the loop's thread.

    Args:
        process: 16 bytes that name ours.
    """

    def __init__(self, process: bytes) -> None:
        self.process = process
        self.head = b""
        """The process of the head's node agent, which knows every actor; of the only one, where there is one node."""
        self.used: dict[bytes, Session] = {}
        """The connection used to reach each peer."""
        self.remotes: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        """Actors that handles in this process stand for, by actor id."""
        self._all: dict[Session, None] = {}
        self._gone: dict[bytes, Hello] = {}  # what processes said of themselves whose connections have ended
        self._watchers: dict[Session, weakref.WeakKeyDictionary[StandIn, None]] = {}

    def all(self) -> Iterable[Session]:
        """Every open connection."""
        return self._all

    def add(self, session: Session) -> None:
        """It is open."""
        self._all[session] = None

    def remove(self, session: Session) -> Session | None:
        """It is lost. Returns another one to the same peer, which is used instead; None where there is none."""
        self._all.pop(session, None)
        peer = session.peer_process
        if session.peer_hello is not None:
            self._gone[peer] = session.peer_hello
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        others = (each for each in self._all if each.peer_process == peer != self.process and each.closed is None)
        another = next(others, None)
        if self.used.get(peer) is session:
            del self.used[peer]
            if another is not None:
                self.used[peer] = another
        return another

    # ---------------------------------------------------------------- those who are told of an end

    def watch(self, session: Session, actor: StandIn) -> None:
        """Tell `actor` when `session` is lost."""
        self._watchers.setdefault(session, weakref.WeakKeyDictionary())[actor] = None

    def unwatch(self, session: Session) -> list[StandIn]:
        """Tell no actor any more when `session` is lost. Returns those that were to be told."""
        return list(self._watchers.pop(session, ()))

    def watched(self, session: Session) -> bool:
        """Whether a handle here stands for an actor at the other end of `session`."""
        return bool(self._watchers.get(session))

    # ---------------------------------------------------------------- names

    def describe(self, process: bytes) -> str:
        """A process as messages name it: by the actors in it, by what it said of itself, or else by as many digits as
        ``zcactor status`` shows of a node."""
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
        """`text` of a transport, which knows processes by their ids, as users can read it."""

        def name(match: re.Match[str]) -> str:
            place = f" at {match[2]}" if match[2] else ""
            return self.describe(bytes.fromhex(match[1])) + place

        return _ID.sub(name, text)
