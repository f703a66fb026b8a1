"""The heads that a cluster has: the one that leads, which is this one, and those that would lead in its place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from zcactor.errors import ZcactorError
from zcactor.logs import logger
from zcactor.process.cluster import HeadNews

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.control.node_table import NodeTable
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["Heads"]


class Heads:
    """The places of heads, which nodes and programs are told. Used on the loop's thread.

    Args:
        process: the head's process.
        nodes: the head's table, with the nodes and programs.
    """

    def __init__(self, process: LocalProcess, nodes: NodeTable) -> None:
        self._process = process
        self._nodes = nodes
        self.own = ""
        """``host:port`` of this head; empty where others cannot take its place."""
        self.all: Sequence[str] = ()
        """The places of all heads, this one among them."""
        self._told: WeakKeyDictionary[Session, tuple[str, ...]] = WeakKeyDictionary()

    @property
    def standbys(self) -> list[str]:
        """The places of the other heads."""
        return [place for place in self.all if place != self.own]

    async def tell(self) -> None:
        """Tell all nodes and programs that do not know it yet. Those that cannot be told are told the next time.

        Cancelling leaves some of them untold.
        """
        places = (self.own, *self.standbys) if self.all else ()
        untold = [session for session in self._joined() if self._told.get(session) != places]
        if places:
            await asyncio.gather(*(self._tell(session, places) for session in untold))

    def _joined(self) -> list[Session]:
        peers = [*self._nodes.drivers, *(node.process for node in self._nodes.by_id.values())]
        found = [self._process.sessions.used.get(peer) for peer in peers]
        return [session for session in found if session is not None]

    async def _tell(self, session: Session, places: tuple[str, ...]) -> None:
        try:
            await self._process.requests.ask(session, HeadNews.heads_are, list(places))
        except ZcactorError as error:  # it has just ended, or is about to seek this head again
            logger.debug("process %s was not told of other heads: %s", session.peer_process.hex()[:8], error)
        else:
            self._told[session] = places
