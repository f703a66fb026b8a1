"""The process of an actor, as its runner needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zcactor.process.context import LocalProcess

if TYPE_CHECKING:
    from zcactor.execution.threads import Runner, Threads
    from zcactor.objects.pushes import Pushes
    from zcactor.peers.requests import Requests
    from zcactor.process.broken import BrokenParts

__all__ = ["Home"]


class Home(LocalProcess, Protocol):
    """The parts of the process that a runner needs, beside those of `LocalProcess`."""

    crew: Runner | None
    threads: Threads
    leaving: bool
    broken: BrokenParts

    pushes: Pushes

    @property
    def requests(self) -> Requests:
        """Requests to the services of peers."""
