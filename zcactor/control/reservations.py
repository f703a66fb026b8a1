"""The nodes and resources of actors: taken before an actor's process starts, and given back when it needs them no
more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.node_table import NodeTable
    from zcactor.errors import InsufficientResources

__all__ = ["Reservations"]


class Reservations:
    """The shares of the nodes' resources that actors have.

    Args:
        loop: the head's.
        nodes: the nodes, with their ledger.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, nodes: NodeTable) -> None:
        self._loop: Final = loop
        self._nodes: Final = nodes

    async def acquire(self, actor: ActorRecord) -> None:
        """Take a node for the actor, and on that node the resources of its request.

        Raises:
            InsufficientResources: the request fits into no node, even an empty one.

        Cancelling withdraws nothing: that is for `ActorRecord.withdraw`, which the end of the actor calls.
        """
        granted: asyncio.Future[None] = self._loop.create_future()

        def grant(node: str, gpus: tuple[int, ...]) -> None:
            actor.node = self._nodes.by_id[node]
            actor.node_id = node
            actor.gpus = gpus
            actor.withdraw = None
            if not granted.done():  # cancelled a moment ago: the actor is about to be buried, and this given back
                granted.set_result(None)

        def refuse(error: InsufficientResources) -> None:
            actor.withdraw = None
            if not granted.done():
                granted.set_exception(error)

        where, owner = actor.options.get("node"), actor.owner
        withdraw = self._nodes.ledger.acquire(actor.request, self._nodes.order(where, owner), grant, refuse)
        if actor.node is None and not granted.done():

            def give_up() -> None:
                withdraw()
                granted.cancel()

            actor.withdraw = give_up
        await granted

    def give_back(self, actor: ActorRecord) -> None:
        """Give the resources of an actor back to its node: at once, or with GPUs when its process has ended, which uses
        their memory until then."""
        worker = actor.worker
        if actor.gpus and worker is not None and not worker.ended.done():
            worker.ended.add_done_callback(lambda _: self._release(actor))
        else:
            self._release(actor)

    def _release(self, actor: ActorRecord) -> None:
        node, actor.node = actor.node, None
        gpus, actor.gpus = actor.gpus, ()
        if node is not None:
            self._nodes.ledger.release(node.id, actor.request, gpus)
