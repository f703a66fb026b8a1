"""The nodes and resources of actors: taken before an actor's process starts, and given back when it needs them no
more."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import InsufficientResources

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.node_table import NodeTable

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

        where, owner = actor.spec.node, actor.owner
        withdraw = self._nodes.ledger.acquire(actor.request, self._nodes.order(where, owner), grant, refuse)
        if actor.node is None and not granted.done():

            def give_up() -> None:
                withdraw()
                granted.cancel()

            actor.withdraw = give_up
        await granted

    def give_back(self, actor: ActorRecord) -> None:
        """Give the resources of an actor back to its node, and those at its next one where it moves: at once, or with
        GPUs when its process has ended, which uses their memory until then."""
        worker = actor.worker
        if actor.gpus and worker is not None and not worker.ended.done():
            worker.ended.add_done_callback(lambda _: self._release(actor))
        else:
            self._release(actor)
        self.give_up_elsewhere(actor)

    def _release(self, actor: ActorRecord) -> None:
        node, actor.node = actor.node, None
        gpus, actor.gpus = actor.gpus, ()
        if node is not None:
            self._nodes.ledger.release(node.id, actor.request, gpus)

    # ---------------------------------------------------------------- moves

    async def take_elsewhere(self, actor: ActorRecord, ended: asyncio.Event) -> bool:
        """Take a place at another node, `ActorRecord.destination`, for an actor that lives and whose node is closed.
        Returns False where `ended` is set before there is room, the actor's state changes meanwhile, or its request
        fits into no other node."""
        granted: asyncio.Future[bool] = self._loop.create_future()

        def grant(node: str, gpus: tuple[int, ...]) -> None:
            actor.destination = self._nodes.by_id[node], gpus
            granted.set_result(True)

        def refuse(_: InsufficientResources) -> None:
            granted.set_result(False)

        order = self._nodes.order(actor.spec.node, actor.owner)
        try:
            withdraw = self._nodes.ledger.acquire(actor.request, order, grant, refuse)
        except InsufficientResources:
            return False
        if not granted.done():
            waits: list[Coroutine[Any, Any, object]] = [ended.wait(), actor.changed()]
            others = [self._loop.create_task(each) for each in waits]
            any_of: list[asyncio.Future[Any]] = [granted, *others]
            try:
                await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in others:
                    task.cancel()
                if not granted.done():
                    withdraw()
        return granted.done() and granted.result()

    def give_up_elsewhere(self, actor: ActorRecord) -> None:
        """Give the place back that was taken for a move, unless the actor has settled there."""
        place, actor.destination = actor.destination, None
        if place is not None:
            self._nodes.ledger.release(place[0].id, actor.request, place[1])

    def settle_elsewhere(self, actor: ActorRecord) -> None:
        """Give an actor, which is closed, its place at the other node in exchange for the present one, whose GPUs come
        free when its process has ended."""
        assert actor.destination is not None
        node, gpus, worker = actor.node, actor.gpus, actor.worker
        (actor.node, actor.gpus), actor.destination = actor.destination, None
        actor.node_id = actor.node.id
        if node is None:
            return
        release = functools.partial(self._nodes.ledger.release, node.id, actor.request, gpus)
        if gpus and worker is not None and not worker.ended.done():
            worker.ended.add_done_callback(lambda _: release())
        else:
            release()
