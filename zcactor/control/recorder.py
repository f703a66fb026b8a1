"""The head's way to its log: changes of one turn of the loop are one batch, and nothing is done before it is recorded.

A decision is of one of two kinds. A request (for a place, for a stop, to join) is *recorded* first, and refused with
`HeadUnavailable` where the log does not take it: nothing of it is done then. An event (the end of a process, of a node,
of a program) is *noted*: it cannot be refused, and is given to the log again and again until the log has taken it. Both
go through one queue, so the log has decisions in the order in which they were made.

| decision | recorded before |
|---|---|
| an actor has a place, a name, a recipe | its constructor begins |
| its constructor has returned | the spawn is answered |
| it is to be stopped or killed | it is told so |
| it is restarted, for the n-th time | its process starts again |
| it is dead, and its name is free | callers and holders of handles learn it |
| a node or a program has joined, or is gone | the answer; the restarts elsewhere |
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVarTuple

from zcactor.control.head_log import MAX_CHANGES, MAX_NBYTES, Deposed, LogUnavailable, check_batch, nbytes_of
from zcactor.errors import HeadUnavailable, RemoteError, remote_of
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from zcactor.control.head_log import Candidate, Change, HeadLog, Term
    from zcactor.process.context import Asking
    from zcactor.rpc.session import Session

__all__ = ["HeadRecorder"]

Ts = TypeVarTuple("Ts")

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0
"""Seconds between two attempts to record events, doubled from the first to the last."""


class _Batch(NamedTuple):
    """Changes that the log takes together, or not at all."""

    changes: tuple[Change, ...]
    nbytes: int
    done: asyncio.Future[None] | None
    """Done when they are recorded; None where nobody waits."""
    refusable: bool


class HeadRecorder:
    """The recorder of one head. Used on the loop's thread.

    Args:
        loop: the head's.
        log: of the cluster's heads.
        me: the head, as a candidate.

    Attributes:
        epoch: of the head's term; 0 before it leads.
        max_recipe: bytes of a recipe that the log takes; larger ones are held by processes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, log: HeadLog, me: Candidate) -> None:
        self._loop = loop
        self._log: Final = log
        self._me = me
        self._term: Term | None = None
        self._campaign: asyncio.Task[None] | None = None
        self._queue: deque[_Batch] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._deposed: Deposed | None = None
        """The error of every decision from the moment on when a later head is known."""
        self._silent_since: float | None = None
        """The loop's time at which the first attempt began that the log has refused since it took the last batch."""
        self.max_recipe = log.recipe_nbytes
        self.lasts: Callable[[], Awaitable[bool]] | None = None
        """The function that waits until it is known whether the term goes on; None where only this head ends it."""

    @property
    def epoch(self) -> int:
        """The epoch of the head's term; 0 before it leads."""
        return 0 if self._term is None else self._term.epoch

    @property
    def is_deposed(self) -> bool:
        """Whether a later head is known, so that this one gives no order."""
        return self._deposed is not None

    @property
    def is_silent(self) -> bool:
        """Whether the log has refused what it was asked to take last."""
        return self._silent_since is not None

    def depose(self, known: int) -> None:
        """Decide no more, because a process has heard of the head of epoch `known`, or the log has. Idempotent."""
        if self._deposed is None:
            self._deposed = Deposed(self.epoch, known)
            logger.warning("this head decides no more: %s", self._deposed)

    def take(self, epoch: int) -> None:
        """Check the epoch of a node's report: this head's own is the only one that it takes.

        Raises:
            Deposed: the node knows a later head; or an earlier one, and has to learn this one's epoch first.
        """
        if epoch > self.epoch:
            self.depose(epoch)
        if epoch != self.epoch:
            raise Deposed(min(epoch, self.epoch), max(epoch, self.epoch))

    def leads(self, term: Term) -> None:
        """Note the term of this head, which has campaigned already."""
        self._term = term

    async def lead(self) -> None:
        """Wait until this head leads. Idempotent.

        Raises:
            LogInUse, LogUnusable, LogUnavailable: as `zcactor.control.head_log.HeadLog.campaign` does.
        """
        if self._term is None:
            if self._campaign is None or self._campaign.done():
                self._campaign = self._loop.create_task(self._lead())
            await asyncio.shield(self._campaign)

    async def _lead(self) -> None:
        self._term = await self._log.campaign(self._me)

    # ---------------------------------------------------------------- decisions

    async def record(self, *changes: Change) -> None:
        """Record the decision about a request, before it is carried out.

        Raises:
            HeadUnavailable: the log does not take it. It must not be carried out.
            Deposed: another head decides now.

        Cancelling ends the wait only: the decision may be recorded all the same.
        """
        await self._add(changes, refusable=True)

    async def record_within(self, seconds: float, *changes: Change) -> bool:
        """Record a decision as `record` does, and wait for it for so many seconds. Returns whether it is recorded;
        otherwise the log may take it later, so that what undoes it has to be recorded after it.

        Raises:
            HeadUnavailable: the log does not take it, for certain.
            Deposed: another head decides now.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.record(*changes)
        except TimeoutError:
            return False
        return True

    async def told(self, seconds: float, *changes: Change) -> None:
        """Record a decision that is carried out in any case: at once, or where the log is silent, in time. This waits
        for it for so many seconds at most.

        Raises:
            Deposed: another head decides now.

        Cancelling ends the wait only.
        """
        try:
            await self.record_within(seconds, *changes)
        except HeadUnavailable:
            self.note(*changes)

    def note(self, *changes: Change) -> None:
        """Record an event, in time. Nobody waits."""
        self._append(changes, None, refusable=False)

    async def noted(self, *changes: Change) -> None:
        """Record an event, and wait until the log has taken it and everything before it: no answer may tell of it
        earlier. Without `changes`, wait for everything before alone.

        Raises:
            Deposed: another head decides now.

        Cancelling ends the wait only.
        """
        if changes or self._queue or self._writing is not None or self._deposed is not None:
            await self._add(changes, refusable=False)

    async def settled(self) -> None:
        """Wait until the log has taken every decision so far.

        Raises:
            HeadUnavailable: the log does not take them now.
            Deposed: another head decides now.
        """
        if self._queue or self._writing is not None or self._deposed is not None:
            await self._add((), refusable=True)

    async def aclose(self) -> None:
        """Let go of the log, after the last changes where it takes them at once. Idempotent."""
        for task in (self._writing, self._campaign):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        await self._log.aclose()

    async def _add(self, changes: tuple[Change, ...], *, refusable: bool) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._append(changes, done, refusable=refusable)
        await done

    def _append(self, changes: tuple[Change, ...], done: asyncio.Future[None] | None, *, refusable: bool) -> None:
        if self._deposed is not None:
            if done is not None:
                done.set_exception(Deposed(self._deposed.epoch, self._deposed.known))
            return
        check_batch(changes)
        self._queue.append(_Batch(changes, sum(map(nbytes_of, changes)), done, refusable))
        if self._writing is None:
            self._writing = self._loop.create_task(self._write())  # it begins after this turn, whose batches it takes

    async def order(
        self, requests: Asking, session: Session, method: Callable[[Any, *Ts, int], Any], *args: *Ts
    ) -> Any:
        """Order something of the session's peer, with the epoch of this head as the last argument.
        Returns the peer's answer.

        Raises:
            Deposed: a later head is known, here or to the peer, which has not done it.
            ConnectionLost: the connection has ended.
            RemoteError: the order has failed there.
        """
        over = self.lasts is not None and not await self.lasts()
        if self._deposed is not None:
            raise Deposed(self._deposed.epoch, self._deposed.known)
        if over:
            raise Deposed(self.epoch, self.epoch)
        try:
            return await requests.ask(session, method, *args, self.epoch)
        except RemoteError as error:
            original: Any = remote_of(error).original
            if not issubclass(type(original), Deposed):
                raise
            self.depose(original.known)
            raise original from None

    # ---------------------------------------------------------------- the log

    async def _write(self) -> None:
        """Give the log all batches of the queue."""
        pause = _FIRST_PAUSE
        try:
            while self._queue:
                batches = self._next()
                begun = self._loop.time()
                try:
                    await self.lead()
                    assert self._term is not None
                    await self._log.record(self._term, _last_of_each(batches))
                except LogUnavailable as error:
                    self._refused(batches, error, begun)
                    if self._queue:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _LAST_PAUSE)
                    continue
                self._taken(batches)
                pause = _FIRST_PAUSE
        except Deposed as error:
            self.depose(error.known)
            self._fail(batches, error)
        except BaseException as error:  # cancelled by `aclose`: a deposed head refuses what it has not decided
            self._fail(batches, error if isinstance(error, Exception) else self._deposed)
            raise
        finally:
            self._writing = None

    def _next(self) -> list[_Batch]:
        """Take from the queue as many batches as one transaction holds."""
        batches: list[_Batch] = []
        count = nbytes = 0
        while self._queue:
            batch = self._queue[0]
            count += len(batch.changes)
            nbytes += batch.nbytes
            if batches and (count > MAX_CHANGES or nbytes > MAX_NBYTES):
                break
            batches.append(self._queue.popleft())
        return batches

    def _taken(self, batches: Iterable[_Batch]) -> None:
        if self._silent_since is not None:
            logger.warning("the head's log answers again")
            self._silent_since = None
        for batch in batches:
            if batch.done is not None and not batch.done.done():
                batch.done.set_result(None)

    def _refused(self, batches: list[_Batch], error: LogUnavailable, begun: float) -> None:
        """Fail all requests, later ones too, and keep the events in their order."""
        if self._silent_since is None:
            self._silent_since = begun
            logger.warning("the head cannot decide now: %s", error)
        since = self._loop.time() - self._silent_since
        kept = deque[_Batch]()
        for batch in (*batches, *self._queue):
            if not batch.refusable:
                kept.append(batch)
            elif batch.done is not None and not batch.done.done():
                batch.done.set_exception(HeadUnavailable(error.log, since))
        self._queue = kept

    def _fail(self, batches: list[_Batch], error: Exception | None) -> None:
        """Fail everything, with `error`; cancel it without one."""
        for batch in (*batches, *self._queue):
            if batch.done is None or batch.done.done():
                continue
            if error is None:
                batch.done.cancel()
            elif isinstance(error, Deposed):
                batch.done.set_exception(Deposed(error.epoch, error.known))
            else:
                batch.done.set_exception(error)
        self._queue.clear()


def _last_of_each(batches: Iterable[_Batch]) -> list[Change]:
    """The changes of several batches, of each entry the last one: etcd takes no two changes of an entry at once."""
    last = {(change.kind, change.key): change for batch in batches for change in batch.changes}
    return list(last.values())
