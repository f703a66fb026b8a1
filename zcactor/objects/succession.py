"""Succession: the values of a process that ends in order are handed to the processes that hold references to them.

The process that ends names to each peer the objects that the peer has leased. The peer gets the values while they can
be had. It is the owner of the promises from then on, and keeps the bytes with its leases. Bytes that it maps it keeps
anyway, see `zcactor.objects.adoption`. Later leases are named as well. When every peer has all, nothing more is leased,
and a process that asks later turns to the one that passed the reference on.

Arguments that wait for promises of the process are not handed over: its calls end with it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zcactor.api.passing import RefHolder
from zcactor.errors import ObjectLost, RemoteError, ZcactorError
from zcactor.logs import logger
from zcactor.objects.locations import LostPart
from zcactor.process.tasks import all_of
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zcactor.objects.locations import Locations
    from zcactor.objects.promises import Promises
    from zcactor.objects.resolver import Resolver
    from zcactor.objectstore.lease import RemoteLease
    from zcactor.objectstore.table import LeaseTable
    from zcactor.peers.leases import Leases
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["Succession"]

_FOR_OUTCOMES: Final = 0.5
_FOR_VALUES: Final = 0.8
"""Parts of the time of an end: in the one promises that peers hold get their outcomes, in the other peers get values.
The rest is for exit functions."""
_AT_ONCE: Final = 4
"""Arrays that a process reads at once: at the end of the time there should be few that have not come whole. Promises
have no such limit, as one may wait for a third process."""
_LATE: Final = "it had not come when the time of that end (shutdown_timeout) was over"
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
        leases: grant none once all is handed over.
    """

    def __init__(
        self, pid: int, tasks: Tasks, sessions: Sessions, requests: Requests, promises: Promises, resolver: Resolver,
        locations: Locations, leases: Leases,
    ) -> None:  # fmt: skip
        self._pid = pid
        self._tasks = tasks
        self._sessions = sessions
        self._requests = requests
        self._promises = promises
        self._resolver = resolver
        self._locations = locations
        self._leases = leases

    # ---------------------------------------------------------------- the process that ends

    async def hand_over(self, time: float) -> None:
        """Have each peer get the values that it has leased. Then lease nothing more.

        Args:
            time: seconds of this end. A promise that peers hold and that has no outcome after half of them fails, for
                all who hold it. A value that a peer has not got after four fifths of them is lost to that peer.
        """
        begun = self._tasks.loop.time()
        try:
            async with asyncio.timeout_at(begun + time * _FOR_VALUES):
                await self._hand_all_over(begun + time * _FOR_OUTCOMES)
        except TimeoutError:
            logger.warning("this end has %.3g s (shutdown_timeout), which were not enough for all values", time)
        self._leases.over = True
        self._promises.exports.clear()

    async def _hand_all_over(self, until: float) -> None:
        begun = self._tasks.loop.time()
        told: dict[LeaseTable, tuple[int, set[int]]] = {}
        telling: dict[Session, asyncio.Task[None]] = {}
        try:
            while True:
                for session in [session for session, task in telling.items() if task.done()]:
                    telling.pop(session).result()
                news, open_calls = self._news(told, telling)
                for session, leased in news:
                    telling[session] = self._tasks.loop.create_task(self._tell(session, leased))
                if not telling and not open_calls:
                    return
                if self._tasks.loop.time() < until or not open_calls:
                    await _changed(telling.values(), open_calls)
                    continue
                for call in open_calls:
                    call.fail(
                        ObjectLost(
                            f"{call.label} had no outcome when its owner, pid {self._pid}, ended in order, and had "
                            f"waited for it for {until - begun:.3g} s; await it before the end"
                        )
                    )
        finally:
            for task in telling.values():
                task.cancel()
            await asyncio.gather(*telling.values(), return_exceptions=True)

    def _news(
        self, told: dict[LeaseTable, tuple[int, set[int]]], telling: Collection[Session]
    ) -> tuple[list[tuple[Session, list[int]]], list[Call]]:
        """The objects that each peer has leased and that it may have to get, and the leased promises without an
        outcome.

        Args:
            told: by their tables the number of leases that were granted so far, and the objects that were named to the
                peer; brought up to date. After a further lease all are named: it may have let an object go between.
            telling: the sessions with peers that get values now; a slow one holds up no other.
        """
        news: list[tuple[Session, list[int]]] = []
        open_calls: list[Call] = []
        for session in self._sessions.all():
            if session.peer_process == self._sessions.process or session.closed is not None or session.is_replaced:
                continue
            granted, known = session.leases.granted, set[int]()
            for object_id, keep in session.leases.kept().items():
                if isinstance(keep, Call) and not keep.known:
                    open_calls.append(keep)
                else:
                    known.add(object_id)
            if session in telling:
                continue
            before = told.get(session.leases, (0, set()))
            told[session.leases] = granted, known
            if new := known if granted != before[0] else known - before[1]:
                news.append((session, sorted(new)))
        return news, open_calls

    async def _tell(self, session: Session, leased: list[int]) -> None:
        try:
            await self._requests.ask(session, Succession.take_over, leased)
        except RemoteError:
            logger.exception("%s did not take over what it had leased here", self._name(session))
        except ZcactorError as error:  # it has ended as well
            logger.debug("%s did not take over what it had leased here: %s", self._name(session), error)
        except asyncio.CancelledError:
            logger.warning("%s has not taken over in time what it had leased here", self._name(session))
            raise

    def _name(self, session: Session) -> str:
        return self._sessions.describe(session.peer_process)

    # ---------------------------------------------------------------- a peer of it

    @remote(4)
    async def take_over(self, leased: list[int]) -> None:
        """Get each value that this process refers to and the caller has, which waits for this, as it is about to end.

        Args:
            leased: ids of the objects that this process has leased there, without promises that have no outcome.
        """
        owner, named = caller().peer_process, set(leased)
        await self._resolver.settled(owner)
        if self._tasks.closing:  # nobody can await a reference any more, except who does so already
            await self._locations.settled(owner)
            return
        promises: dict[int, list[RefHolder]] = {}
        remote: list[RemoteLease] = []
        places = asyncio.Semaphore(_AT_ONCE)
        for holder in self._locations.held.of(owner):
            if not isinstance(holder, RefHolder):
                remote.append(holder)
            elif holder.id in named:
                promises.setdefault(holder.id, []).append(holder)
        await all_of(
            [self._take_promise(each) for each in promises.values()]
            + [self._take_bytes(each, places) for each in remote]
        )

    async def _take_promise(self, holders: Sequence[RefHolder]) -> None:
        """Have the outcome of a promise as one of this process, for all holders of it."""
        owner, object_id = holders[0].owner, holders[0].id
        call = Call(self._sessions.process, self._tasks.loop, self._tasks.thread)
        call.holder, call.retrieved = holders[0], True
        done: asyncio.Future[None] = self._tasks.loop.create_future()
        call.add_waiter(done)
        try:
            self._promises.ask(call)
            await done
        finally:  # where this is cancelled, the owner has ended
            if not call.known:
                call.fail(ObjectLost(self._lost(owner, _LATE)))
            elif type(call.error) is ObjectLost and self._sessions.used.get(owner) is None:
                call.error = ObjectLost(self._lost(owner, str(call.error)))
            call.parts = [self._named(owner, part) for part in call.parts]
            call.again = call.holder = None  # the owner has nothing to read any more
            self._locations.held.taken[owner, object_id] = call
            for holder in holders:
                holder.taken = call

    async def _take_bytes(self, lease: RemoteLease, places: asyncio.Semaphore) -> None:
        wanted = Part(lease.kind, lease, lease.offset, lease.nbytes, lease.authenticate)
        found = wanted._replace(holder=LostPart(_LATE))
        try:
            async with places:
                found = await self._locations.read(wanted)
        finally:
            lease.taken = self._named(lease.owner, found)

    def _named(self, owner: bytes, part: Part) -> Part:
        """The part; one that was lost names the end in its error."""
        if not isinstance(part.holder, LostPart):
            return part
        return part._replace(holder=LostPart(self._lost(owner, part.holder.reason)))

    def _lost(self, owner: bytes, why: str) -> str:
        place = self._sessions.describe(owner)
        return f"its owner, {place}, has ended in order, and it could not be taken over: {why}"


async def _changed(telling: Collection[asyncio.Task[None]], calls: Sequence[Call]) -> None:
    """Wait until a peer has been told, one of `calls` has an outcome, or for a while."""
    found = asyncio.Event()
    for call in calls:
        call.when_known(lambda _: found.set())
    known = asyncio.ensure_future(found.wait())
    try:
        await asyncio.wait([known, *telling], timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
    finally:
        known.cancel()
