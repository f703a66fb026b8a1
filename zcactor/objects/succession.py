"""Succession: the values of a process that ends in order are handed to the processes that hold references to them.

The process that ends names to each peer the objects that the peer has leased. The peer gets the values while they can
be had. It is the owner of the promises from then on, and keeps the bytes with its leases. Bytes that it maps it keeps
anyway, see `zcactor.objects.adoption`. Later leases are named as well. When every peer has all, nothing more is leased,
and a process that asks later turns to the one that passed the reference on.

Arguments that wait for promises of the process are not handed over: its calls end with it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from zcactor.api.passing import RefHolder
from zcactor.errors import ObjectLost, RemoteError, ZcactorError
from zcactor.objects.locations import LostPart
from zcactor.process.tasks import all_of
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.objects.locations import Locations
    from zcactor.objects.promises import Promises
    from zcactor.objects.resolver import Resolver
    from zcactor.objectstore.lease import RemoteLease
    from zcactor.objectstore.table import LeaseTable
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["Succession"]

logger = logging.getLogger("zcactor")
_LOOK: Final = 0.1
"""Seconds until the next look whether promises without an outcome are still held."""


class Succession:
    """The values that one process hands over at its end, and takes over at the ends of others. Used on the loop's
    thread.

    Args:
        pid: of the process.
        tasks: of the process.
        sessions: with its peers.
        requests: tell the peers of its end.
        promises: those that peers may hold; they ask the owners of others.
        resolver: knows the objects that are under way here.
        locations: bring bytes.
    """

    def __init__(
        self, pid: int, tasks: Tasks, sessions: Sessions, requests: Requests, promises: Promises, resolver: Resolver,
        locations: Locations,
    ) -> None:  # fmt: skip
        self.over = False
        """Whether all is handed over, and nothing more is leased."""
        self._pid = pid
        self._tasks = tasks
        self._sessions = sessions
        self._requests = requests
        self._promises = promises
        self._resolver = resolver
        self._locations = locations

    # ---------------------------------------------------------------- the process that ends

    async def hand_over(self, patience: float) -> None:
        """Have each peer get the values that it has leased. Then lease nothing more.

        Args:
            patience: seconds to wait for the outcomes of promises that peers hold. A promise without an outcome fails
                then, for all who hold it.
        """
        until = self._tasks.loop.time() + patience
        told: dict[LeaseTable, dict[int, int]] = {}
        while True:
            news, open_calls = self._news(told)
            if news:
                await all_of([self._tell(session, leased) for session, leased in news])
            elif not open_calls:
                break
            elif self._tasks.loop.time() < until:
                await _known(open_calls)
            else:
                for call in open_calls:
                    call.fail(
                        ObjectLost(
                            f"{call.label} had no outcome when its owner, pid {self._pid}, ended in order, and had "
                            f"waited for it for {patience:.3g} s; await it before the end"
                        )
                    )
        self.over = True
        self._promises.exports.clear()

    def _news(self, told: dict[LeaseTable, dict[int, int]]) -> tuple[list[tuple[Session, list[int]]], list[Call]]:
        """The objects that each peer has leased and that were not named to it, and the leased promises without an
        outcome.

        Args:
            told: the number of leases that each peer knows, by their table and by object id; it is brought up to date.
        """
        news: list[tuple[Session, list[int]]] = []
        open_calls: list[Call] = []
        for session in self._sessions.all():
            if session.peer_process == self._sessions.process or session.closed is not None or session.is_replaced:
                continue
            before, now = told.get(session.leases, {}), {}
            for object_id, (count, keep) in session.leases.kept().items():
                if isinstance(keep, Call) and not keep.known:
                    open_calls.append(keep)
                else:
                    now[object_id] = count
            told[session.leases] = now
            if new := [object_id for object_id, count in now.items() if count > before.get(object_id, 0)]:
                news.append((session, new))
        return news, open_calls

    async def _tell(self, session: Session, leased: list[int]) -> None:
        try:
            await self._requests.ask(session, "owner_ends", leased)
        except RemoteError:
            logger.exception("%s did not take over what it had leased here", self._name(session))
        except ZcactorError as error:  # it has ended as well
            logger.debug("%s did not take over what it had leased here: %s", self._name(session), error)

    def _name(self, session: Session) -> str:
        return self._sessions.describe(session.peer_process)

    # ---------------------------------------------------------------- a peer of it

    async def take_over(self, owner: bytes, leased: set[int]) -> None:
        """Get each value that this process refers to and `owner` has, which waits for this, as it is about to end.

        Args:
            owner: its id.
            leased: ids of the objects that this process has leased there, without promises that have no outcome.
        """
        await self._resolver.settled(owner)
        if self._tasks.closing:  # nobody can await a reference any more, except who does so already
            await self._locations.settled(owner)
            return
        promises: dict[int, list[RefHolder]] = {}
        remote: list[RemoteLease] = []
        for holder in self._locations.held.of(owner):
            if not isinstance(holder, RefHolder):
                remote.append(holder)
            elif holder.id in leased:
                promises.setdefault(holder.id, []).append(holder)
        await all_of([*map(self._take_promise, promises.values()), *map(self._take_bytes, remote)])

    async def _take_promise(self, holders: Sequence[RefHolder]) -> None:
        """Have the outcome of a promise as one of this process, for all holders of it."""
        owner, object_id = holders[0].owner, holders[0].id
        call = Call(self._sessions.process, self._tasks.loop, self._tasks.thread)
        call.holder, call.retrieved = holders[0], True
        done: asyncio.Future[None] = self._tasks.loop.create_future()
        call.add_waiter(done)
        self._promises.ask(call)
        await done
        call.parts = [self._named(owner, part) for part in call.parts]
        call.holder = None
        self._locations.held.taken[owner, object_id] = call
        for holder in holders:
            holder.taken = call

    async def _take_bytes(self, lease: RemoteLease) -> None:
        part = Part(lease.kind, lease, lease.offset, lease.nbytes, lease.authenticate)
        lease.taken = self._named(lease.owner, await self._locations.read(part))

    def _named(self, owner: bytes, part: Part) -> Part:
        """The part; one that was lost names the end in its error."""
        if not isinstance(part.holder, LostPart):
            return part
        place = self._sessions.describe(owner)
        text = f"its owner, {place}, has ended in order, and it could not be taken over: {part.holder.reason}"
        return part._replace(holder=LostPart(text))


async def _known(calls: Sequence[Call]) -> None:
    """Wait until one of `calls` has an outcome, or for a while."""
    found = asyncio.Event()
    for call in calls:
        call.when_known(lambda _: found.set())
    try:
        async with asyncio.timeout(_LOOK):
            await found.wait()
    except TimeoutError:
        pass
