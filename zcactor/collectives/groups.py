"""The groups that a process takes part in: its members, the messages of peers to them, and the thread that computes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, TypeVarTuple

from zcactor.collectives.cost import Line
from zcactor.collectives.founding import NAME_NBYTES
from zcactor.collectives.hierarchy import Hierarchy, hosts_of
from zcactor.collectives.member import Member
from zcactor.collectives.operations import Publication
from zcactor.collectives.passing import pass_groups
from zcactor.collectives.service import GroupService
from zcactor.collectives.steps import place_of
from zcactor.errors import ProtocolError, ZcactorError
from zcactor.exception_pickling import bare
from zcactor.logs import logger
from zcactor.machine import usable_cpus
from zcactor.peers.seating import Misplaced, Seat
from zcactor.process.loops import fine_time
from zcactor.process.spinning import Spinner
from zcactor.process.tasks import all_of
from zcactor.rpc.services import Services

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    from zcactor.collectives.group_options import GroupOptions
    from zcactor.collectives.nccl import Nccl
    from zcactor.collectives.operations import Collective
    from zcactor.collectives.sources import Piece
    from zcactor.objectstore.store import Block
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["Counts", "Facts", "Groups", "Joined"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_MAX_THREADS: Final = 4
"""Threads that compute, at most: four reach the bandwidth of one socket."""
_AT_ONCE_NBYTES: Final = 1 << 20
"""Bytes of inputs up to which the loop computes by itself: 50-90 us, where telling a thread and coming back takes
100-200 us on two busy cores. More would delay what else is on the loop."""
_LOOKS: Final = 4
"""The number of looks within the time before a warning, which is therefore late by a quarter of that time at most."""
_AGAIN: Final = 60.0
"""Seconds until a member says again that it waits: ranks that compute for long do so in each step."""
_NAMED: Final = 3
"""Ranks, and methods of one, that one line names."""
_PINGS: Final = 5
"""Round trips of which the shortest counts: the first ones after a connection is made are slower."""


class Joined(NamedTuple):
    """The facts of the connections from one process of a group to those behind it in the order of ranks."""

    eager_nbytes: int
    """Bytes that travel in frames on all of them."""
    mapped: Sequence[bytes]
    """The processes whose memory it maps, and which map its own; the process itself is the first."""
    frame_s: float
    """Seconds of a frame, one way, on the first of the others; 0 where there are none."""
    nbytes_per_s: float
    """Bytes per second of bulk on the slowest of the others."""
    latest: int
    """The number of a later epoch that the process knows; -1: none."""


class _Wait(NamedTuple):
    """An operation that waits for other ranks."""

    operation: Collective
    since: float
    """The time of the loop when it was seen first."""
    said: bool


class Facts(NamedTuple):
    """The facts of a group, which are the same on all ranks."""

    eager_nbytes: int
    """Bytes of the largest input that travels in frames."""
    hosts: Sequence[int]
    """The host of each rank."""
    everywhere: bool
    """Whether sums add in the order of the ranks, wherever they are."""
    frame_s: float
    """Seconds of a frame between hosts, one way; 0 on one host."""
    nbytes_per_s: float
    """Bytes per second of bulk between hosts."""
    spin_us: float
    """Microseconds for which a waiting member's loop stays awake."""
    gpus: str
    """``"nccl"``, or why this process has none for arrays on GPUs."""


class Counts:
    """Figures of the collectives of one process."""

    def __init__(self) -> None:
        self.collectives = 0
        """Operations that members here have begun."""
        self.bytes_reduced = 0
        """Bytes of the inputs that sums and other reductions here have read."""


class Groups(GroupService):
    """The members of groups in one process. Used on the loop's thread, except `work`.

    Args:
        process: the process.
        hosts: the runners of its actors, by index.
    """

    def __init__(self, process: LocalProcess, hosts: Any) -> None:
        pass_groups()
        self.process = process
        self.counts = Counts()
        self._hosts = hosts
        self._members: dict[bytes, dict[int, Member]] = {}
        self._lingering: set[Member] = set()
        """Members of groups that nobody holds any more, whose work on GPUs is under way."""
        self._founded: dict[bytes, list[bytes]] = {}
        """Processes of the members of groups that this process has founded, by key."""
        self._dropped: deque[bytes] = deque()
        """Groups that this process has founded and nobody holds any more."""
        self._threads: ThreadPoolExecutor | None = None
        self.nccl: Nccl | None = None
        """The maker of communicators for arrays on GPUs; None for the real NCCL. Tests put a stand-in here."""
        self._waits: dict[Member, _Wait] = {}
        """The operation that each member waits for longest."""
        self._looking = False

    # ---------------------------------------------------------------- members

    def member(self, key: bytes, rank: int) -> Member | None:
        """The member with that rank, if this process has it."""
        return self._members.get(key, {}).get(rank)

    async def join(self, key: bytes, epoch: int, places: Sequence[Sequence[Any]]) -> Joined:
        """See `GroupService`."""
        name = key[:NAME_NBYTES]
        latest = max((_epoch_of(known) for known in self._members if known.startswith(name)), default=-1)
        if latest >= epoch:
            return Joined(0, [], 0.0, math.inf, latest)
        self._members[key] = {}
        own = self.process.process
        seats = [Seat(*fields) for fields in places]
        for seat in seats:
            if seat.process == own:
                host = self._hosts.by_index.get(seat.place)
                if host is None or host.info is None or host.info.actor_id != seat.actor_id:
                    raise Misplaced(f"actor {seat.label} is not in its process any more")
        order = list(dict.fromkeys(seat.process for seat in seats))
        self._keep(order, 1)  # from here on, so that no connection is closed for want of use meanwhile
        try:
            joined = await self._connected(order, own)
            members = self._members.get(key)
            if members is None:
                raise Misplaced("the party that makes the group has given up")
        except BaseException:
            self._keep(order, -1)
            raise
        for rank, seat in enumerate(seats):
            if seat.process == own:
                member = members[rank] = Member(self, key, epoch, rank, seats)
                self.process.pushes.expectations.takers[member.word] = member.seat
        self._watch()
        return joined

    def _keep(self, processes: Iterable[bytes], count: int) -> None:
        """Keep the connections to processes open, or with -1 do so no more."""
        kept = self.process.sessions.kept
        for process in processes:
            kept[process] += count
            if not kept[process]:
                del kept[process]

    async def _connected(self, order: Sequence[bytes], own: bytes) -> Joined:
        """Connect to the processes behind our own in the order. The others connect to us."""
        eager_nbytes, mapped, frame_s, nbytes_per_s = self.process.config.eager_limit, [own], 0.0, math.inf
        for process in order[order.index(own) + 1 :]:
            session = await self.process.connections.connect(process)
            connection = session.connection
            eager_nbytes = min(eager_nbytes, connection.eager_limit)
            if connection.maps:
                mapped.append(process)
            else:
                frame_s = frame_s or await self.frame_s(session)  # of one; the slowest of all processes' counts
                nbytes_per_s = min(nbytes_per_s, connection.nbytes_per_s)
        return Joined(eager_nbytes, mapped, frame_s, nbytes_per_s, -1)

    async def frame_s(self, session: Session) -> float:
        """Measure the seconds of a frame to a peer, one way."""
        times = []
        for _ in range(_PINGS):
            before = fine_time(self.process.loop)
            await self.process.requests.ask(session, Services.ping)
            times.append(fine_time(self.process.loop) - before)
        return min(times) / 2

    async def start(self, key: bytes, facts: Sequence[Any]) -> None:
        """See `GroupService`."""
        eager_nbytes, hosts, everywhere, frame_s, nbytes_per_s, spin_us = facts
        hierarchy, line = Hierarchy(hosts, everywhere=everywhere), Line(frame_s, nbytes_per_s)
        members = self._members.get(key, {})
        near = {member.seats[rank].process for member in members.values() for rank in hierarchy.near(member.rank)}
        for process in near - {self.process.process}:  # they write to one another's memory
            await (await self.process.connections.connect(process)).connection.open_writable()
        for member in self._members.get(key, {}).values():
            member.eager_nbytes, member.hierarchy, member.line = eager_nbytes, hierarchy, line
            if spin_us:
                member.spinner = Spinner(self.process.loop, spin_us * 1e-6)
                member.seat.touch = member.spinner.touch
        self.superseded(key[:NAME_NBYTES], _epoch_of(key))

    def superseded(self, name: bytes, epoch: int) -> None:
        """See `GroupService`."""
        for key, members in list(self._members.items()):
            if key.startswith(name):
                for member in list(members.values()):
                    if member.epoch < epoch:
                        member.break_up(-1, "", f"epoch {epoch} has replaced it")

    def facts(self, key: bytes) -> Facts | None:
        """See `GroupService`."""
        for member in self._members.get(key, {}).values():
            hierarchy, line, spinner = member.hierarchy, member.line, member.spinner
            spin_us = 0.0 if spinner is None else spinner.seconds * 1e6
            hosts, times = (hierarchy.hosts, hierarchy.everywhere), (line.latency_s, line.bytes_per_s)
            return Facts(member.eager_nbytes, *hosts, *times, spin_us, self._gpus())
        return None

    def _gpus(self) -> str:
        devices = self.process.store.devices_in_use
        if devices is None:
            return "the first member has not used a GPU"
        from zcactor.collectives.gpu_exchange import nccl_of

        found = nccl_of(self, devices.driver.kind)
        return found if isinstance(found, str) else "nccl"

    def forget(self, key: bytes) -> None:
        """See `GroupService`."""
        members = self._members.pop(key, {})
        for member in members.values():
            member.kept = False
            self.process.pushes.expectations.takers.pop(member.word, None)
            member.close()
        if members:
            self._keep(_processes_of(next(iter(members.values()))), -1)

    def linger(self, member: Member) -> None:
        """Stay connected to the processes of a forgotten member until `settled`, to hear of their ends."""
        self._lingering.add(member)
        self._keep(_processes_of(member), 1)

    def settled(self, member: Member) -> None:
        """Forget a member whose work is done or ended. Idempotent."""
        if member in self._lingering:
            self._lingering.discard(member)
            self._keep(_processes_of(member), -1)

    # ---------------------------------------------------------------- from peers

    def publish(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes,
    ) -> None:  # fmt: skip
        """See `GroupService`."""
        self._publish(key, to, source, seq, signature, failed, data, owner, offset, layout)

    def publish_with(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes, object_id: int, place: int, nbytes: int,
    ) -> bool:  # fmt: skip
        """See `GroupService`."""
        leased = object_id, place, nbytes
        return self._publish(key, to, source, seq, signature, failed, data, owner, offset, layout, *leased)

    def _publish(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes, *leased: int,
    ) -> bool:  # fmt: skip
        member = self.member(key, to)
        if member is None:
            return False
        with _spoiling(member, source, seq):
            member.check(source, seq)
            lease = member.lease(source, *leased) if leased else None
            value, error = member.unpacked(data)
            if failed or error is not None:
                publication = Publication(signature, offset=offset, failure=value if error is None else error)
            else:
                publication = Publication(signature, value, owner, offset, layout, lease)
            member.published(source, seq, publication)
        return True

    def publish_here(self, key: bytes, to: int, source: int, seq: int, publication: Publication) -> None:
        """Take a publication of a member in this process, for another one."""
        member = self.member(key, to)
        if member is not None:
            with _spoiling(member, source, seq):
                member.published(source, seq, publication)

    def piece(self, key: bytes, to: int, source: int, seq: int, data: bytes) -> None:
        """See `GroupService`."""
        member = self.member(key, to)
        if member is not None:
            with _spoiling(member, source, seq):
                member.piece(source, seq, data)

    def offer(self, key: bytes, to: int, source: int, seq: int, object_id: int, offset: int, nbytes: int) -> bool:
        """See `GroupService`."""
        member = self.member(key, to)
        if member is None:
            return False
        with _spoiling(member, source, seq, memory=True):
            member.check(source, seq)
            member.offered(source, seq, member.lease(source, object_id, offset, nbytes))
        return True

    def input(self, key: bytes, to: int, seq: int) -> tuple[int, bytes]:
        """See `GroupService`."""
        member = self.member(key, to)
        if member is None:
            raise ProtocolError(f"rank {to} of a group is not in this process any more")
        return member.own_input(seq)

    def offer_here(self, key: bytes, to: int, source: int, seq: int, memory: Block | Piece) -> None:
        """Take memory of this process that another member here has named."""
        member = self.member(key, to)
        if member is not None:
            with _spoiling(member, source, seq, memory=True):
                member.offered(source, seq, memory)

    def take_gpu(self, key: bytes, to: int, source: int, attempt: int, uuid: str, reason: str, name: Any) -> None:
        """See `GroupService`."""
        member = self.member(key, to)
        if member is not None:
            member.check(source, attempt)
            from zcactor.collectives.gpu_exchange import exchange_of  # most groups exchange no such arrays

            exchange_of(member).take(attempt, source, uuid, reason, name)

    @staticmethod
    def receive_on_gpu(operation: Collective, data: bytes) -> None:
        """Let a broadcast go on whose root has an array on a GPU; see `zcactor.collectives.gpu_operations.receive`."""
        from zcactor.collectives.gpu_operations import receive

        receive(operation, data)

    def report(self, key: bytes, to: int, source: int, seq: int, failure: Any) -> None:
        """See `GroupService`."""
        member = self.member(key, to)
        if member is not None:
            found, error = member.unpacked(failure)
            member.reported(source, seq, found if error is None else error)

    def broken(self, key: bytes, rank: int, actor: str, cause: str) -> None:
        """See `GroupService`."""
        lingering = [member for member in self._lingering if member.key == key]
        for member in [*self._members.get(key, {}).values(), *lingering]:
            member.break_up(rank, actor, cause)

    # ---------------------------------------------------------------- long waits

    def _watch(self) -> None:
        """Look now and then for operations that wait for ranks. An operation costs nothing more for being watched."""
        after = self.process.config.warn_after
        if after and not self._looking:
            self._looking = True
            self.process.loop.call_later(after / _LOOKS, self._look)

    def _look(self) -> None:
        self._looking = False
        now, before, self._waits = self.process.loop.time(), self._waits, {}
        for members in self._members.values():
            for member in members.values():
                operation = next((each for each in member.operations.values() if each.missing), None)
                if operation is None:
                    continue
                wait = before.get(member)
                if wait is None or wait.operation is not operation:
                    wait = _Wait(operation, now, False)
                elif not wait.said and now - wait.since >= self.process.config.warn_after:
                    wait = wait._replace(said=True)
                    if now - member.warned >= _AGAIN:
                        member.warned = now
                        self.process.tasks.start(self._tell(member, operation, now - wait.since))
                self._waits[member] = wait
        if self._members:
            self._watch()

    async def _tell(self, member: Member, operation: Collective, seconds: float) -> None:
        """Log what an operation waits for, and what the missing ranks do, as far as they answer."""
        missing = operation.missing
        if not missing:
            return
        said = await all_of([self._doing(member, rank) for rank in missing[:_NAMED]])
        more = f", and {len(missing) - _NAMED} more ranks" if len(missing) > _NAMED else ""
        logger.warning(
            "rank %d, %s, of a group of %d has waited %.3g s in %s, %s: %s%s",
            member.rank, member.seats[member.rank].label, member.size, seconds, place_of(operation.seq),
            operation.signature, "; ".join(said), more,
        )  # fmt: skip

    async def _doing(self, member: Member, rank: int) -> str:
        """Say what a rank does that others wait for."""
        seat, process = member.seats[rank], self.process
        name = f"rank {rank}, {seat.label},"
        try:
            if seat.process == process.process:
                state = self.state(member.key, rank)
            else:
                session = await process.connections.connect(seat.process)
                asked = process.requests.ask(session, GroupService.state, member.key, rank)
                state = await asyncio.wait_for(asked, process.config.warn_after)
        except TimeoutError:
            return f"{name} does not answer, as its event loop is blocked or its process is stopped"
        except ZcactorError as error:
            return f"{name} is not reached: {error}"
        calls, waits, methods = state
        runs = f"runs {', '.join(methods)}" if methods else "runs no method"
        return f"{name} has called {calls} operations, {f'waits in {waits}' if waits else 'waits in none'}, and {runs}"

    def state(self, key: bytes, rank: int) -> tuple[int, str, list[str]]:
        """See `GroupService`."""
        member = self.member(key, rank)
        if member is None:
            return 0, "", []
        operation = next((each for each in member.operations.values() if each.missing), None)
        waits = "" if operation is None else f"{place_of(operation.seq)}, {operation.signature}"
        seat = member.seats[rank]
        methods = [
            incoming.host.interface.methods[incoming.code].label
            for session in self.process.sessions.all()
            for incoming in session.incoming.values()
            if incoming.host is not None and incoming.actor == seat.place and incoming.started
        ]
        return member.seat.next, waits, methods[:_NAMED]

    # ---------------------------------------------------------------- ends

    def session_left(self, session: Session, another: Session | None) -> None:
        """Note that a connection is lost; `another` one to the same process is used instead."""
        if another is not None:
            if not session.is_replaced:  # else it was closed by agreement, with all that it carried delivered
                self._messages_lost(session.peer_process)
            return
        cause = session.given_up or "its process has ended"
        for member in [*(each for members in self._members.values() for each in members.values()), *self._lingering]:
            member.lost(session.peer_process, cause)

    def _messages_lost(self, process: bytes) -> None:
        """Break the groups with ranks of `process`, which lives on: nobody sends their publications again."""
        for members in list(self._members.values()):
            for member in list(members.values()):
                member.unreached(process, "a connection to its process broke")

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Note that an actor of this process has ended, while the process may go on."""
        for members in list(self._members.values()):
            for member in list(members.values()):
                for rank, seat in enumerate(member.seats):
                    if seat.actor_id == actor_id:
                        member.break_up(rank, seat.label, cause)

    # ---------------------------------------------------------------- founding

    async def found(self, key: bytes, epoch: int, seats: Sequence[Seat], options: GroupOptions) -> int | None:
        """Make all members of a new epoch of a group, wherever they are.

        Args:
            key: names the epoch.
            epoch: its number.
            seats: the places of all ranks.
            options: of the group.

        Returns:
            None; or the number of a later epoch, which the group has already: then no member was made.

        Raises:
            ZcactorError: a member cannot be made; then none is kept.
        """
        processes = list(dict.fromkeys(seat.process for seat in seats))
        plain = [list(seat) for seat in seats]
        try:
            joined = [Joined(*each) for each in await all_of(
                [self._ask_at(process, GroupService.join, key, epoch, plain) for process in processes]
            )]  # fmt: skip
            latest = max(each.latest for each in joined)
            if latest >= 0:
                self._forget_at(key, processes)
                return latest
            numbers = hosts_of([[processes.index(process) for process in each.mapped] for each in joined])
            facts = [
                min(each.eager_nbytes for each in joined),
                [numbers[processes.index(seat.process)] for seat in seats],
                options.everywhere,
                max(each.frame_s for each in joined),
                min(each.nbytes_per_s for each in joined),
                options.spin_us,
            ]
            await all_of([self._ask_at(process, GroupService.start, key, facts) for process in processes])
        except BaseException:
            self._forget_at(key, processes)
            raise
        self._founded[key] = processes
        return None

    async def _ask_at(self, process: bytes, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts) -> R:
        return await self.process.requests.ask(await self.process.connections.connect(process), method, *args)

    def drop(self, key: bytes) -> None:
        """Note that nobody holds a group any more that this process has founded. Any thread may call this at any time,
        within the garbage collector too."""
        self._dropped.append(key)
        try:
            self.process.loop.call_soon_threadsafe(self._forget_dropped)
        except RuntimeError:  # the loop is closed: the process ends, and its members with it
            self._dropped.clear()

    def _forget_dropped(self) -> None:
        while self._dropped:
            key = self._dropped.popleft()
            self._forget_at(key, self._founded.pop(key, ()))

    def _forget_at(self, key: bytes, processes: Sequence[bytes]) -> None:
        for process in processes:
            session = self.process.sessions.used.get(process)
            if session is not None and session.closed is None:
                self.process.requests.send(session, GroupService.forget, (key,))

    # ---------------------------------------------------------------- computing

    def work(
        self, job: Callable[[], None], done: Callable[[BaseException | None], None], nbytes: int | None = None
    ) -> None:  # fmt: skip
        """Run ``job()``, then ``done(error)`` on the loop: both at once where that takes less time than to tell a
        thread.

        Args:
            job: the computation.
            done: takes None, or the exception of `job`.
            nbytes: bytes that `job` reads, at the speed of a sum or a copy; None for a `job` that is slower.
        """
        if nbytes is not None and nbytes <= _AT_ONCE_NBYTES:
            done(_error_of(job))
            return
        if self._threads is None:
            threads = min(_MAX_THREADS, usable_cpus())
            self._threads = ThreadPoolExecutor(threads, "zcactor-collectives")
        self._threads.submit(self._work, job, done)

    def _work(self, job: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self.process.loop.call_soon_threadsafe(done, _error_of(job))

    def close(self) -> None:
        """End the threads. Idempotent."""
        for member in [each for members in self._members.values() for each in members.values()]:
            if member.exchange is not None:
                member.exchange.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _processes_of(member: Member) -> set[bytes]:
    return {seat.process for seat in member.seats}


def _error_of(job: Callable[[], None]) -> BaseException | None:
    """Run a computation. Returns its exception, which is raised on all ranks."""
    try:
        job()
    except Exception as failed:
        return bare(failed, None)
    return None


@contextlib.contextmanager
def _spoiling(member: Member, rank: int, seq: int, *, memory: bool = False) -> Iterator[None]:
    """Take a message of a rank for an operation: where it is refused, the operation fails on all ranks."""
    try:
        yield
    except ProtocolError as error:
        member.spoiled(rank, seq, error, memory=memory)
        raise


def _epoch_of(key: bytes) -> int:
    return int.from_bytes(key[NAME_NBYTES:-4], "big")
