"""The agent of a node that has joined a cluster: it starts and ends workers at the head's word.

It holds no names of actors and decides nothing. When it loses the head, it looks for the head as long as the cluster's
patience lasts, and reports what lives here to a head that is back. Otherwise it ends its workers and itself: the head
has given up their actors by then, or is about to, and may start them elsewhere. So no actor lives twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple
from weakref import WeakValueDictionary

from zcactor import ids
from zcactor.control.drain import end_workers
from zcactor.control.head_watch import HeadWatch, boot_clock
from zcactor.control.quorum import Allegiance
from zcactor.control.recipe_shelf import RecipeShelf
from zcactor.errors import AuthenticationError, ConnectionLost, ZcactorError
from zcactor.ids import ProcessId
from zcactor.logs import logger
from zcactor.objects.locations import LostPart
from zcactor.peers.head_link import RELAYED
from zcactor.peers.losses import silence_before
from zcactor.process.cluster import HeadNews, HeadService, MembershipService, NodeService
from zcactor.process.epochs import Deposed
from zcactor.process.head_outage import HeadGone
from zcactor.rpc.services import caller, calling_process, method_number
from zcactor.workers.output import Printers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zcactor.control.node_table import OwnWorkers
    from zcactor.marshal.packed import Packed
    from zcactor.process.context import LocalProcess
    from zcactor.process.epochs import KnownEpoch
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["NodeAgent"]

Ts = TypeVarTuple("Ts")
if TYPE_CHECKING:
    Report = Callable[[Any, int, *Ts], Coroutine[Any, Any, None]]
    """A method of `MembershipService` that takes the known epoch first."""

_RELAYED: Final[dict[int, Any]] = {method_number(method): method for method in RELAYED}
_FOR_SPAWNERS: Final = (HeadService.reserve, HeadService.waits)
"""Methods of the head whose last argument is the worker for which the agent asks."""
_LOOK, _LEAST = 1.0, 0.001
"""Seconds between two looks at whether a head has said that this node may go on: at most, and at least. A rest that is
shorter than the clock's resolution would not end by a sleep of that length."""
_LAST_MOVES = 6.0
"""Seconds beyond its time that a drain takes where moves have begun."""
_LAST_REPORT = 1.0
"""Seconds that the head gets at the end to take in the last reports."""


class _ActorHold:
    """A lease on an actor at the head, which lasts as long as a worker has a lease on this object."""

    __slots__ = ("__weakref__", "id", "release")

    def __init__(self, own: int, release: Callable[[], None]) -> None:
        self.id = own
        self.release = release

    def __del__(self) -> None:
        self.release()


class NodeAgent(NodeService):
    """The actor at index 1 of the agent's process. Its callers are the head and this node's workers.

    Args:
        process: the agent's own.
        pool: starts workers here.
        known: the epoch of the head whose orders this process carries out.
    """

    def __init__(self, process: LocalProcess, pool: OwnWorkers, known: KnownEpoch) -> None:
        self._process = process
        self._pool = pool
        self._known = known
        self._ending: asyncio.Task[None] | None = None
        self._leaving = False
        """Whether this node has been told to leave."""
        self._reports: dict[asyncio.Task[None], None] = {}
        self._printers = Printers(self._show, process.tasks.start)
        self._holds: WeakValueDictionary[int, _ActorHold] = WeakValueDictionary()
        """The objects that workers have leased, by the actors' object ids at the head."""
        self._recipes = RecipeShelf()
        self._joined: tuple[dict[str, Any], dict[str, float]] | None = None
        """The facts and the resources with which this node has joined."""
        self._seeking: asyncio.Task[None] | None = None
        self._ready: dict[ProcessId, tuple[int, str]] = {}
        """The pids and addresses that workers have reported, perhaps before the zygote has reported their pids."""
        self.over: Callable[[int, str], None] = lambda _status, _text: None
        """Called when the head says that the run is over, which it may do before it has answered that this node has
        joined."""
        self.again = False
        """Whether the node starts again when it has ended."""
        self.finished: asyncio.Future[None] = process.loop.create_future()
        self._allegiance: Allegiance | None = None
        """The time for which this node goes on without a word of the head, where others can lead in its place."""
        self.watch = HeadWatch(process, known, self._heard)
        """The watch over the head, once that has told where others are."""

    async def join(self, facts: dict[str, Any], resources: dict[str, float]) -> None:
        """Join the cluster.

        Args:
            facts, resources: see `zcactor.control.membership.Membership.join_node`.

        Raises:
            HeadGone: the head has ended, or a standby is in its place.
            ConnectionLost: the head does not take this node in.
        """
        head = self._process.head
        try:
            answer = await head.ask(MembershipService.join_node, facts, resources)
        except (ConnectionLost, AuthenticationError) as error:  # AuthenticationError: another process listens there
            if self._process.sessions.living(head.process) is not None:
                raise
            raise HeadGone(str(error.args[0]), False) from error
        head.outage.joined(*answer)
        self._joined = facts, resources

    async def run_over(self, epoch: int, status: int, text: str) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        self.over(status, text)

    async def start_worker(
        self, epoch: int, worker: ProcessId, label: str, env: dict[str, str], driver: ProcessId, shared: bool
    ) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        if self._ending is not None:
            self._report(MembershipService.worker_ended, worker, "its node is shutting down")
            return
        try:
            self._pool.start(label, env, driver, shared=shared, process=worker)
        except (OSError, ValueError) as error:
            self._report(
                MembershipService.worker_ended,
                worker,
                f"no process could be started for {label}: {error}; see ulimit -n",
            )

    async def kill_worker(self, epoch: int, worker: ProcessId, cause: str | None) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        self._kill(worker, cause)

    def _kill(self, worker: ProcessId, cause: str | None) -> None:
        record = self._pool.by_process.get(worker)
        if record is not None:
            record.kill(cause)

    async def serves(self, epoch: int) -> None:
        """See `NodeService`."""
        self._known.check(epoch)

    async def worker_broken(self, cause: str) -> None:
        """See `OwnNodeService`."""
        self._kill(calling_process(), cause)

    async def worker_ready(self, worker: ProcessId, pid: int, address: str) -> None:
        """See `OwnNodeService`."""
        record = self._pool.by_process.get(worker)
        if record is not None and not record.ready.done():
            self._ready[worker] = pid, address
            record.ready.set_result(None)
            await self._say(MembershipService.worker_started, worker, pid, address)

    # ---------------------------------------------------------------- recipes

    async def hold_recipe(self, epoch: int, key: int, recipe: Packed) -> bool:
        """See `NodeService`."""
        self._known.check(epoch)
        lost = [part.holder for part in recipe.parts if isinstance(part.holder, LostPart)]
        if lost:
            lost[0].raise_error()
        return self._recipes.put(key, recipe)

    async def recipe(self, epoch: int, key: int) -> Packed | None:
        """See `NodeService`."""
        self._known.check(epoch)
        return self._recipes.get(key)

    async def drop_recipe(self, epoch: int, key: int) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        self._recipes.drop(key)

    async def keep_recipes(self, epoch: int, keys: list[int]) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        self._recipes.keep(keys)

    # ---------------------------------------------------------------- requests of workers to the head

    async def relay(self, number: int, args: list[Any]) -> Any:
        """See `NodeService`."""
        method = _RELAYED.get(number)
        if method is None:
            raise ValueError(f"a worker cannot ask the head for method number {number}")
        if method in _FOR_SPAWNERS:
            args = [*args[:-1], calling_process()]
        return await self._process.head.ask(method, *args)

    async def hold_actor(self, object_id: int) -> int:
        """See `NodeService`."""
        hold = self._holds.get(object_id)
        if hold is None:  # shielded: a lease that comes after the worker's end has to be given back
            hold = await asyncio.shield(self._process.tasks.begin(self._hold(object_id)))
            if hold is None:
                return 0
        session = caller()
        with session.lock:
            session.leases.grant(hold.id, hold)
        return hold.id

    async def _hold(self, object_id: int) -> _ActorHold | None:
        try:
            release = await self._process.head.hold_actor(object_id)
        except ZcactorError as error:  # the head is lost, and this node ends
            logger.debug("an actor could not be leased: %s", error)
            return None
        return None if release is None else self._holds.setdefault(object_id, _ActorHold(ids.bits(62), release))

    def actor_changed(self, *change: Any) -> None:
        """Pass the head's report of an actor's change to the workers, some of which hold the actor."""
        for process in self._pool.by_process:
            session = self._process.sessions.used.get(process)
            if session is not None and session.closed is None:
                self._process.tasks.start(self._tell_worker(session, *change))

    async def _tell_worker(self, session: Session, *change: Any) -> None:
        with contextlib.suppress(ZcactorError):  # the worker has ended, and its handles with it
            await self._process.requests.ask(session, HeadNews.actor_changed, *change)

    # ---------------------------------------------------------------- the end

    async def end(self, epoch: int, grace: float, again: bool) -> None:
        """See `NodeService`."""
        self._known.check(epoch)
        await self.end_itself(grace, again)

    async def end_itself(self, grace: float, again: bool = False) -> None:
        """See `end`, at this node's own wish."""
        if self._ending is None:
            self.again = again
            self._ending = self._process.loop.create_task(self._end(grace))
        elif grace <= 0:
            self._pool.kill_all("the node was shut down")

    async def leave(self, grace: float) -> None:
        """Have the head move this node's actors to other nodes, for at most `grace` seconds, and end then, in order
        within as many. Asked a second time it ends at once. Without a head, or where nothing can be moved, it does not
        wait."""
        if self._leaving or self._ending is not None:
            await self.end_itself(0.0)
            return
        self._leaving = True
        head = self._process.head
        if self._joined is not None and not head.outage.going_on:
            try:
                async with asyncio.timeout(grace + _LAST_MOVES):
                    told = await head.ask(MembershipService.drain, self._process.process.hex(), grace, False)
            except (TimeoutError, ZcactorError, ValueError) as error:
                logger.warning(
                    "the actors of this node stay until it ends: %s", str(error) or "the head does not answer"
                )
            else:
                for line in told["left"]:
                    logger.warning("left in its place: %s", line)
        await self.end_itself(grace)

    async def _end(self, grace: float) -> None:
        self._report(
            MembershipService.leave_node
        )  # before the workers end, so that the head starts no others here in their place
        await end_workers(self._process.sessions, self._process.requests, self._pool, grace, "the node was shut down")
        with contextlib.suppress(TimeoutError):  # the head does not answer, and gets no further reports
            async with asyncio.timeout(_LAST_REPORT):
                await self._printers.flush()
                await asyncio.gather(*self._reports)
        self.finish()

    def finish(self) -> None:
        """End the agent's process."""
        if not self.finished.done():
            self.finished.set_result(None)

    # ---------------------------------------------------------------- reports of the pool and the process

    def worker_ended(self, record: WorkerRecord) -> None:
        """Report the end of a worker's process."""
        self._ready.pop(record.process, None)
        self._report(MembershipService.worker_ended, record.process, record.ended.result())

    def output(self, stream: str, record: WorkerRecord, lines: list[str]) -> None:
        """Take the output of a worker."""
        self._printers.write(record.driver, stream, f"({record.label} pid={record.pid}) ", lines)

    async def _show(self, driver: ProcessId, stream: str, text: str) -> None:
        await self._say(MembershipService.worker_said, driver, stream, text)

    def zygote_lost(self) -> None:
        """End the node: its workers have ended with the zygote, and no further worker can be started."""
        self._process.loop.call_soon(self.finish)

    def session_lost(self, session: Session) -> None:
        peer = ProcessId(session.peer_process)
        if self._process.tasks.closing:
            return
        if peer == self._process.sessions.head and self._process.sessions.used.get(peer) is None:
            self._head_lost(session)
        worker = self._pool.by_process.get(peer)
        if worker is not None and not worker.leaving:
            worker.kill()

    def _head_lost(self, session: Session) -> None:
        patience = self._process.head.outage.patience
        silence = 0.0 if self._process.head.moving else silence_before(session.closed)
        patience = max(patience - silence, 0.0)  # the head's fence begins with the silence
        if self._ending is not None or not patience:
            if self._ending is None:
                logger.warning("the cluster's head is lost (%s); this node ends", session.closed)
            self._process.tasks.start(self.end_itself(0.0))
        elif self._seeking is None or self._seeking.done():
            logger.warning("the cluster's head is lost (%s); looking for it for %g s", session.closed, patience)
            self._process.head.outage.begin(silence)
            self._seeking = self._process.tasks.begin(self._seek(patience))

    def _heard(self, epoch: int, asked: float, age: float | None) -> None:
        if self._allegiance is None:
            self._allegiance = Allegiance(self._process.head.outage.patience, asked)
            self._process.tasks.start(self._end_in_time(self._allegiance))
        self._allegiance.epoch = self._known.epoch
        self._allegiance.heard(epoch, asked, age)

    async def _end_in_time(self, allegiance: Allegiance) -> None:
        """End this node where no head has said for too long that it may go on: another one may decide so by now."""
        while (left := allegiance.ends_at() - boot_clock()) > 0:  # noqa: ASYNC110  # a clock decides
            await asyncio.sleep(max(min(left, _LOOK), _LEAST))
        if self._ending is None:
            logger.warning("no head has said in time that this node may go on; it ends")
            await self.end_itself(0.0)

    async def _seek(self, patience: float) -> None:
        """Look for the head, and end this node where it does not come back."""
        head = self._process.head
        while await head.outage.seek(self._return, patience):
            if self._process.sessions.living(head.process) is not None:
                logger.warning("the cluster's head is back")
                return
        logger.warning("the cluster's head has not come back in %g s; this node ends", patience)
        await self.end_itself(0.0)

    async def _return(self) -> bool:
        """Report this node to a head that is back: its workers, and the actors that they hold."""
        assert self._joined is not None
        workers: list[Any] = [
            (record.process, *self._ready.get(record.process, (0, "")), record.label, record.driver, record.shared)
            for record in self._pool.by_process.values()
        ]  # fmt: skip
        session, held = await self._process.head.rejoin(
            self._known.epoch, MembershipService.return_node, *self._joined, workers, self._held()
        )
        if held is None:
            return False
        for of_recipe in self._recipes.holds():
            if of_recipe.id in held:
                held.remove(of_recipe.id)
                of_recipe.renew(session.release)
        for object_id in held:
            hold = self._holds.get(object_id)  # not kept while this waits: a failed attempt's traceback keeps its frame
            if hold is None:
                session.release(object_id)
            else:
                hold.release = functools.partial(session.release, object_id)
        return True

    def _held(self) -> list[int]:
        """The actors that this process leases at the head, by object id, each as often as it does."""
        return [*self._holds, *(hold.id for hold in self._recipes.holds())]

    async def _say(self, method: Report[*Ts], *args: *Ts) -> None:
        """Report something to the head, with the epoch that is known here. A head of a later one refuses that, so that
        this node knows its term from then on."""
        while True:
            epoch = self._known.epoch  # another report may raise it meanwhile
            try:
                await self._process.head.ask(method, epoch, *args)
                return
            except Deposed as error:
                if error.known <= epoch:
                    raise  # this head's own term is over
                if error.known > self._known.epoch:
                    self._known.check(error.known)

    def _report(self, method: Report[*Ts], *args: *Ts) -> None:
        task = self._process.loop.create_task(self._tell_head(method, *args))
        self._reports[task] = None
        task.add_done_callback(self._reports.pop)

    async def _tell_head(self, method: Report[*Ts], *args: *Ts) -> None:
        try:
            await self._say(method, *args)
        except ZcactorError as error:  # the head is gone, or has given us up, and has no use for the report
            logger.debug("the head was not told of %s: %s", method.__name__, error)
