"""A log that several heads share in one process of the system: with delays, losses and silent times, drawn from a seed.

It behaves as etcd does (`zcactor.control.etcd_log`): terms are leases, which are renewed and end by themselves, and
candidates wait. Requests arrive late, and get lost on their way there or back. As there, `SharedLog.record` fails only
where it is certain that nothing was changed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from zcactor.control.head_log import Deposed, LeaderAt, LogInUse, LogUnavailable, applied, check_batch
from zcactor.control.leading import Leading

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from zcactor.control.head_log import Candidate, Change, HeadState, Term

__all__ = ["SharedBook", "SharedLog", "SharedTerm"]

T = TypeVar("T")
TTL: Final = 2.0
"""Seconds of a lease, as in `zcactor.control.etcd_log`."""
MARGIN: Final = 0.3
"""Seconds by which a term ends before its lease, as there."""
AGAIN: Final = 0.7
"""Seconds without an answer after which a request is sent again."""
POLL: Final = 0.1
"""Seconds between two looks at who leads."""


class _Lease(NamedTuple):
    epoch: int
    until: float
    address: str


class SharedBook:
    """The memory of one cluster's log, and the network before it.

    Args:
        draws: the generator of all delays and losses.
        clock: the clock by which leases end, in seconds.
        delay: the longest time of a request on its way, and of an answer, in seconds.
        loss: the probability that either is lost.
        ttl: seconds of a lease. Infinite where terms last, as those of a log in a file: then only `free` ends the term
            of a process that was killed.
    """

    def __init__(
        self, draws: random.Random, clock: Callable[[], float], *, delay: float = 0.005, loss: float = 0.05,
        ttl: float = TTL,
    ) -> None:  # fmt: skip
        self.state: HeadState = {}
        self.epoch = 0
        self._silent = False
        self.delay = delay
        self.loss = loss
        self.ttl = ttl
        self._draws = draws
        self._clock = clock
        self._lease: _Lease | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, object] = {}
        """The answers that have not arrived, by request: a request that comes again gets its first answer."""

    @property
    def ends_by_itself(self) -> bool:
        """Whether a term ends by itself where it is not renewed."""
        return self.ttl < math.inf

    def stop(self) -> None:
        """Answer nothing until `resume`."""
        self._silent = True

    def resume(self) -> None:
        """Answer again. Leases have ended meanwhile, or begin anew, as after an election in etcd: a draw decides."""
        self._silent = False
        if self._lease is not None and self._draws.random() < 0.5:
            self._lease = self._lease._replace(until=max(self._lease.until, self._clock() + self.ttl))

    def silent(self) -> bool:
        """Whether nothing is answered."""
        return self._silent

    def lease(self) -> _Lease | None:
        """The lease of the leader, unless it has ended."""
        if self._lease is not None and self._clock() >= self._lease.until:
            self._lease = None
        return self._lease

    def leader(self) -> LeaderAt | None:
        """The leader."""
        lease = self.lease()
        return None if lease is None else LeaderAt(lease.epoch, lease.address)

    def lead(self, address: str) -> int:
        """Make a candidate the leader. Returns its epoch; 0 where there is a leader."""
        if self.lease() is not None:
            return 0
        self.epoch += 1
        self._lease = _Lease(self.epoch, self._clock() + self.ttl, address)
        return self.epoch

    def renew(self, epoch: int) -> bool:
        """Renew a lease. Returns whether it had not ended."""
        lease = self.lease()
        if lease is None or lease.epoch != epoch:
            return False
        self._lease = lease._replace(until=self._clock() + self.ttl)
        return True

    def free(self) -> None:
        """End the present lease: its holder's process has ended, and the system has freed its lock."""
        self._lease = None

    def resign(self, epoch: int) -> None:
        """End a lease."""
        if self._lease is not None and self._lease.epoch == epoch:
            self._lease = None

    def change(self, epoch: int, changes: Sequence[Change]) -> HeadState | Deposed:
        """Make changes within a term. Returns all entries."""
        lease = self.lease()
        if lease is None or lease.epoch != epoch:
            return Deposed(epoch, self.epoch)
        self.state = applied(self.state, changes)
        return self.state

    async def ask(self, work: Callable[[], T], patience: float) -> T:
        """Carry out a request once, with all that the network does to it.

        Args:
            work: the change or the look, made when the request arrives.
            patience: seconds after which a request that was not carried out is given up.

        Raises:
            LogUnavailable: the request was not carried out, and will not be.

        Cancelling leaves open whether it was carried out.
        """
        number = next(self._numbers)
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience
        try:
            while True:
                await asyncio.sleep(self._draws.uniform(0, self.delay))
                if not self.silent() and self._draws.random() >= self.loss:
                    if number not in self._answers:
                        self._answers[number] = work()
                    await asyncio.sleep(self._draws.uniform(0, self.delay))
                    if not self.silent() and self._draws.random() >= self.loss:
                        answer: T = self._answers[number]  # type: ignore[assignment]
                        return answer
                if number not in self._answers and clock() >= deadline:
                    raise LogUnavailable("the shared log", "it does not answer")
                await asyncio.sleep(AGAIN)
        finally:
            self._answers.pop(number, None)


class SharedTerm:
    """The right to decide, renewed by a lease."""

    def __init__(self, epoch: int, until: float) -> None:
        self.epoch = epoch
        self.until = until
        self.over = False

    def valid_until(self) -> float:
        """The time until which nobody else can lead, by the clock of the head's loop."""
        return -math.inf if self.over else self.until


class SharedLog:
    """The log of one head; see `zcactor.control.head_log.HeadLog`. Its clock is that of the running loop.

    Args:
        book: the memory that it shares with the logs of other heads.
        patience: seconds after which a log that does not answer is reported.
    """

    recipe_nbytes: int = 16 << 10

    def __init__(self, book: SharedBook, *, patience: float = 5.0) -> None:
        self._book = book
        self._patience = patience
        self._term: SharedTerm | None = None
        self._leading = Leading()
        self._first = asyncio.Event()
        self._following = False
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def campaign(self, me: Candidate) -> Term:
        if self._term is not None and not self._term.over:
            raise LogInUse("the shared log", me)
        clock = asyncio.get_running_loop().time
        patience = self._patience
        while True:
            asked = clock()
            epoch = await self._book.ask(lambda: self._book.lead(me.address), patience)
            if epoch:
                self._term = SharedTerm(epoch, asked + self._book.ttl - MARGIN)
                if self._book.ttl < math.inf:
                    self._start(self._keep(self._term))
                return self._term
            patience = math.inf
            await asyncio.sleep(POLL)

    async def _keep(self, term: SharedTerm) -> None:
        clock = asyncio.get_running_loop().time
        while not term.over:
            await asyncio.sleep(self._book.ttl / 3)
            asked = clock()
            try:
                renewed = await self._book.ask(lambda: self._book.renew(term.epoch), self._book.ttl / 3)
            except LogUnavailable:
                continue
            if not renewed:
                term.over = True
            term.until = asked + self._book.ttl - MARGIN

    def _check(self, term: Term) -> SharedTerm:
        if self._term is None or self._term.epoch != term.epoch or self._term.over:
            raise Deposed(term.epoch, max(term.epoch, self._book.epoch))
        return self._term

    async def _change(self, term: Term, changes: Sequence[Change]) -> HeadState:
        held = self._check(term)
        async with self._order:
            found = await self._book.ask(lambda: self._book.change(term.epoch, changes), self._patience)
        if isinstance(found, Deposed):
            held.over = True
            raise found
        return found

    async def load(self, term: Term) -> HeadState:
        return applied(await self._change(term, ()), ())

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        check_batch(changes)
        await self._change(term, tuple(changes))

    async def leaders(self) -> AsyncIterator[LeaderAt | None]:
        if not self._following:
            self._following = True
            self._start(self._follow())
        await self._first.wait()
        async for leader in self._leading.changes():
            yield leader

    async def _follow(self) -> None:
        while True:
            leader = await self._book.ask(self._book.leader, math.inf)
            if leader != self._leading.leader:
                self._leading.lead(leader)
            self._first.set()
            await asyncio.sleep(POLL)

    async def resign(self, term: Term) -> None:
        held = self._term
        if held is None or held.epoch != term.epoch or held.over:
            return
        held.over = True
        try:
            await self._book.ask(lambda: self._book.resign(term.epoch), 0.0)
        except LogUnavailable:
            return  # its lease ends by itself

    async def aclose(self) -> None:
        if self._term is not None:
            await self.resign(self._term)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
