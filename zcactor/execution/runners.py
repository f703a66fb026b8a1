"""The actors that a process hosts, by the number that CALL frames carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.execution.actor_runner import ActorRunner
from zcactor.options import ActorSpec
from zcactor.rpc.messages import Status
from zcactor.rpc.services import SYSTEM_INDEX

if TYPE_CHECKING:
    from zcactor.execution.home import Home
    from zcactor.execution.watchdog import Watchdog
    from zcactor.interface import Interface
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.session import Session

__all__ = ["Hosts"]

_PLAIN: Final = ActorSpec("default")
_FIRST_ACTOR: Final = 2
"""The first index of an actor."""


class Hosts:
    """The table of a process's runners. Used on the loop's thread.

    Args:
        home: the process.
    """

    def __init__(self, home: Home) -> None:
        self.by_index: dict[int, ActorRunner] = {}
        self.watchdog: Watchdog | None = None
        """The watchdog; it begins to look when the first actor arrives."""
        self._home = home
        self._next = _FIRST_ACTOR

    def add(
        self, index: int, actor_class: type, label: str, spec: ActorSpec = _PLAIN, info: Any = None,
        interface: Interface | None = None,
    ) -> ActorRunner:  # fmt: skip
        """Add a runner for an actor; `ActorRunner.construct` or `adopt` gives it its instance."""
        host = self.by_index[index] = ActorRunner(self._home, index, actor_class, label, spec, info, interface)
        if index != SYSTEM_INDEX and self.watchdog is not None:
            self.watchdog.start()
        return host

    def take_index(self) -> int:
        """A fresh actor index."""
        self._next += 1
        return self._next - 1

    def actors(self) -> list[ActorRunner]:
        """The runners of the program's actors, without that of the services."""
        return [host for index, host in self.by_index.items() if index != SYSTEM_INDEX]

    def call_received(self, incoming: Incoming) -> None:
        """See `zcactor.rpc.hub.Hub`."""
        host = self.by_index.get(incoming.actor)
        if host is None:
            incoming.session.respond(incoming, Status.NO_SUCH_ACTOR, b"", (), 0)
        else:
            host.receive(incoming)

    def session_closed(self, session: Session) -> None:
        """Forget a caller whose connection is gone."""
        for host in list(self.by_index.values()):
            host.session_closed(session)

    def close(self) -> None:
        """End all actors at once, and stop the watchdog. Idempotent."""
        if self.watchdog is not None:
            self.watchdog.close()
        for host in list(self.by_index.values()):
            host.close()
        self.by_index.clear()
