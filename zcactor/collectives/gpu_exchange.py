"""The exchanges of one member whose arrays lie on GPUs: the communicator of its group, and the thread that calls it.

The ranks tell each other their GPUs with the first exchange, and rank 0 the communicator's id. From then on each rank
queues the work of an operation on a stream of the group's own as soon as all have published the same call. Nobody waits
for that work on the host: arrays know it, and later work on them is ordered after it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from zcactor.collectives.nccl import found_nccl
from zcactor.collectives.service import GroupService
from zcactor.device.events import OTHERS, Moment
from zcactor.device.streams import GpuStream
from zcactor.errors import DeviceError, ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.collectives.member import Member
    from zcactor.collectives.nccl import Communicator, Nccl
    from zcactor.device.memory import GpuMemory

__all__ = ["Exchanging", "GpuExchange", "GpuOutcome", "Queued", "exchange_of", "nccl_of"]

_LOOK: Final = 1.0
"""Seconds between looks at work that is not done: NCCL tells of a lost link or peer only where it is asked."""
_QUESTIONS: Final = 100
"""Number of times that a driver is asked which does not answer for a moment."""
_FIRST_LOOK: Final = 0.001
"""Seconds to the first look at the work of a group that nobody holds any more. Each later one is after twice the time,
up to `_LOOK`."""


class GpuOutcome(Moment):
    """The outcome of an exchange: it is done with the work on the group's stream, and lost where that is ended before.
    An array has it among the writes of other processes, as what is computed from the array depends on it.

    Args:
        moment: after the work.
        exchange: the exchange that queued the work.
    """

    loss = "a member of the group ended before its exchange on the GPUs was done; compute the value again"
    spoils_libraries = False  # each later operation of the group raises, so its ranks know

    __slots__ = ("exchange", "lost", "moment", "noted")

    def __init__(self, moment: Moment, exchange: GpuExchange) -> None:
        super().__init__(None, moment.driver, moment.device, moment.event, OTHERS)
        self.moment: Final = moment
        self.lost = False
        self.exchange: Final = weakref.ref(exchange)
        self.noted = False
        """Whether the loop knows of the work, so that an abort tells this outcome whether the work was done before."""

    @property
    def key(self) -> tuple[object, ...]:
        """See `Moment.key`: there is one object for each exchange."""
        return (id(self),)

    def done(self) -> bool:
        """See `Moment.done`."""
        done = self.moment.done()
        if not self.noted:
            self._look_for_abort()
        return done and not self.lost

    def _look_for_abort(self) -> None:
        exchange = self.exchange()
        if exchange is not None and exchange.is_aborted:
            self.lost = True  # the abort may have ended the work, and the operation has failed in any case

    def note(self) -> None:
        """Note that the loop knows of the work."""
        self._look_for_abort()
        self.noted = True

    def order(self, device: int, stream: int) -> None:
        """Do nothing: the array has the work's moment beside this."""

    def is_lost(self) -> bool:
        """Whether the work was ended before it was done, or will be: the loop may wait for the work in this call, and
        cannot hear of the end of a rank then."""
        if not (self.lost or self.done() or self.moment.is_unknown):
            exchange = self.exchange()
            self.lost |= exchange is not None and exchange.is_cut_off()
        return self.lost

    def lose(self) -> None:
        """Note that the work was ended, unless it is done."""
        with contextlib.suppress(DeviceError):  # a broken context does no work any more
            for _ in range(_QUESTIONS):
                if self.done():
                    return
                if not self.moment.is_unknown:
                    break
        self.lost = True


class Queued(NamedTuple):
    """Work that was queued on the group's stream."""

    outcome: GpuOutcome
    complete: Callable[[], None]
    """A function that gives the result, on the loop."""


class Exchanging(Protocol):
    """An operation of a member that exchanges arrays on GPUs."""

    gpu: GpuMemory | None
    """The GPU of this rank's array; None for a rank that has none yet."""

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """Queue the operation's work. Called in the thread of the exchange."""

    def refused(self, error: Exception) -> None:
        """Take the error that all ranks get in the place of a result."""


class _Seen(NamedTuple):
    """The facts that a rank has told of itself."""

    uuid: str
    reason: str
    """The reason why it takes no part; empty where it does."""
    name: Any
    """The id of a communicator, from rank 0."""


class _Lane:
    """A thread that does jobs in order. It does not keep the program from ending, as NCCL may wait for ever for ranks
    that are gone."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begun = False

    def do(self, job: Callable[[], None]) -> None:
        """Do a job after those before. Called on the loop."""
        self._jobs.put(job)
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="zcactor-nccl", daemon=True).start()

    def end(self) -> None:
        """Do no more jobs after those before."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class GpuExchange:
    """The exchanges of one member. Used on the loop's thread, unless a method says otherwise.

    Args:
        member: the member.
    """

    def __init__(self, member: Member) -> None:
        self._member: Final = member
        self._groups: Final[Any] = member.groups
        self._loop: Final = member.process.loop
        self._lane: Final = _Lane()
        self._waiting: deque[Exchanging] = deque()
        """Operations that wait for the communicator, in order."""
        self._attempt = 0
        """Number of times that the ranks began to make a communicator."""
        self._making = False
        self._seen: dict[int, dict[int, _Seen]] = {}
        """The facts that ranks have told of themselves, by attempt."""
        self._nccl: Nccl | None = None
        self._communicator: Communicator | None = None
        self._stream: GpuStream | None = None
        self._pending: list[GpuOutcome] = []
        """Those of exchanges that may not be done yet."""
        self._looks: asyncio.TimerHandle | None = None
        """The next look at work that is not done."""
        self._gpu: GpuMemory | None = None
        self._closed = False
        """Whether no operation is run any more."""
        self._settled = False
        """Whether all work is known to be done or ended, after the last operation."""
        self._aborted: Final = threading.Event()
        self._calling: Final = threading.Lock()
        """Held to ask or to end the communicator: its end comes from the lane or from another thread."""

    def bind(self, gpu: GpuMemory) -> None:
        """Note the GPU of an operation's array.

        Raises:
            ValueError: earlier operations had theirs on another one.
        """
        former = self._gpu or gpu
        if not self.takes(gpu):
            raise ValueError(
                f"rank {self._member.rank} has an array on cuda:{gpu.index}, and had its arrays on "
                f"cuda:{former.index} before: NCCL takes one GPU a rank; copy the array there, or make another group"
            )

    def takes(self, gpu: GpuMemory) -> bool:
        """Whether arrays of this rank lie on a GPU, or may do so from now on, as it had none before."""
        if self._gpu is None:
            self._gpu = gpu
        return self._gpu is gpu

    def run(self, operation: Exchanging) -> None:
        """Queue the work of an operation, which all ranks have called, once there is a communicator."""
        self._waiting.append(operation)
        self._advance()

    def _advance(self) -> None:
        while self._waiting and not self._making and not self._closed:
            if self._communicator is None:
                self._attempt += 1
                self._making = True
                self._lane.do(partial(self._introduce, self._attempt, self._waiting[0].gpu))
                return
            self._lane.do(partial(self._queue, self._waiting.popleft(), self._communicator))

    # ---------------------------------------------------------------- the communicator

    def _introduce(self, attempt: int, gpu: GpuMemory | None) -> None:
        reason: str = ""
        name: Any = None
        try:
            devices = self._member.process.store.devices()
            gpu = gpu or self._gpu or devices.gpu(0)
            nccl = nccl_of(self._groups, devices.driver.kind)
            if isinstance(nccl, str):
                reason = nccl
            else:
                self._nccl = nccl
                if self._member.rank == 0:
                    name = nccl.new_id()
        except Exception as error:  # of NCCL, of a driver: all ranks get the reason
            reason = f"{type(error).__name__}: {error}"
        self._call(partial(self._tell, attempt, gpu, _Seen(gpu.uuid if gpu else "", reason, name)))

    def _tell(self, attempt: int, gpu: GpuMemory | None, seen: _Seen) -> None:
        if self._closed:
            return
        self._gpu = gpu
        member = self._member
        self.take(attempt, member.rank, *seen)
        for rank, seat in enumerate(member.seats):
            if rank == member.rank:
                continue
            values = (member.key, rank, member.rank, attempt, *seen)
            if seat.process == member.process.process:
                self._loop.call_soon(self._groups.take_gpu, *values)
                continue
            session = member.process.sessions.used.get(seat.process)
            if session is not None and session.closed is None:  # else its end breaks the group
                member.process.requests.send(session, GroupService.take_gpu, values)

    def take(self, attempt: int, rank: int, uuid: str, reason: str, name: Any) -> None:
        """Take what a rank tells of itself.

        Raises:
            ProtocolError: it has told before.
        """
        seen = self._seen.setdefault(attempt, {})
        if rank in seen or attempt <= 0:
            raise ProtocolError(f"rank {rank} told its GPU for attempt {attempt} of a group twice")
        seen[rank] = _Seen(uuid, reason, name)
        if len(seen) == self._member.size and attempt == self._attempt and self._making:
            del self._seen[attempt]
            self._meet([seen[each] for each in range(self._member.size)])

    def _meet(self, seen: Sequence[_Seen]) -> None:
        first = dict[str, int]()
        for rank, each in enumerate(seen):
            if each.reason:
                self._refuse(TypeError(
                    f"rank {rank} cannot take part in an exchange of arrays on GPUs: {each.reason}; or pass "
                    "zc.gpu.to_host(x)"
                ))  # fmt: skip
                return
            if first.setdefault(each.uuid, rank) != rank:
                self._refuse(ValueError(
                    f"ranks {first[each.uuid]} and {rank} have their arrays on one GPU, {each.uuid}, and NCCL takes "
                    "one rank a GPU: spawn the actors with num_gpus=1, or pass zc.gpu.to_host(x)"
                ))  # fmt: skip
                return
        self._lane.do(partial(self._connect, seen[0].name))

    def _refuse(self, error: Exception) -> None:
        self._making, self._gpu = False, None
        self._waiting.popleft().refused(error)
        self._advance()

    def _connect(self, name: Any) -> None:
        gpu, nccl = self._gpu, self._nccl
        assert gpu is not None
        assert nccl is not None
        try:
            stream = GpuStream(gpu)
            made = nccl.connect(gpu.index, self._member.size, self._member.rank, name)
        except Exception as error:  # the other ranks have connected, or wait for this one
            self._call(partial(self._failed, error))
            return
        self._call(partial(self._connected, made, stream))

    def _connected(self, made: Communicator, stream: GpuStream) -> None:
        if self._closed:  # the group has broken meanwhile
            self._aside(made.abort)
            return
        self._communicator, self._stream, self._making = made, stream, False
        self._advance()

    # ---------------------------------------------------------------- work

    def _queue(self, operation: Exchanging, communicator: Communicator) -> None:
        gpu, stream = self._gpu, self._stream
        assert gpu is not None
        assert stream is not None
        try:
            if self.is_aborted:
                return
            queued = operation.queue(communicator, gpu, stream.ptr)
        except Exception as error:  # the other ranks have queued their part, and wait for this one on their GPUs
            self._call(partial(self._failed, error))
            return
        self._call(partial(self._note, queued))

    def _note(self, queued: Queued) -> None:
        self._forget_done()
        self._pending.append(queued.outcome)
        queued.outcome.note()
        if self.is_aborted:
            self._lose()
        self._look_later()
        queued.complete()

    def _forget_done(self) -> None:
        self._pending = [each for each in self._pending if not _is_done(each)]

    def _look_later(self) -> None:
        if self._looks is None and not self._closed:
            self._looks = self._loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        self._looks = None
        self._forget_done()
        if self._pending and self._communicator is not None:
            self._lane.do(self._check_later)

    def _check(self) -> bool:
        """Ask the communicator for a fault. Returns whether there was none. Called in the lane."""
        try:
            with self._calling:
                if self._communicator is not None:
                    self._communicator.check()
        except Exception as error:  # the GPUs of the group wait for each other for ever
            self._call(partial(self._failed, error))
            return False
        return True

    def _check_later(self) -> None:
        if self._check():
            self._call(self._look_later)

    def _failed(self, error: Exception) -> None:
        member = self._member
        cause = f"an exchange on the GPUs failed there: {type(error).__name__}: {error}"
        member.break_up(member.rank, member.seats[member.rank].label, cause)

    def _lose(self) -> None:
        for each in self._pending:
            each.lose()
        self._pending.clear()

    @property
    def is_aborted(self) -> bool:
        """Whether the group is broken. Any thread may ask."""
        return self._aborted.is_set()

    def is_cut_off(self) -> bool:
        """Whether a rank's process has ended its connection to this one, though the loop may not know. Any thread may
        ask."""
        used = self._member.process.sessions.used
        sessions = [used.get(seat.process) for seat in self._member.seats]
        return any(session is not None and session.connection.hung_up() for session in sessions)

    # ---------------------------------------------------------------- the end

    @property
    def lingers(self) -> bool:
        """See `zcactor.collectives.operations.Ending`."""
        return self._closed and not self._settled

    def abort(self) -> None:
        """End all work, done or not, as the group is broken. Arrays that were not computed are lost. Idempotent."""
        if self._settled:
            return
        self._aborted.set()
        self._stop()
        self._waiting.clear()
        self._lose()
        if self._communicator is not None:
            self._aside(partial(self._give_up, abort=True))
        self._settle()

    def close(self) -> None:
        """Give the communicator up once all queued work is done, as nobody holds the group any more. Idempotent."""
        if self._closed:
            return
        self._groups.linger(self._member)
        self._lane.do(self._finish)
        self._stop()

    def _settle(self) -> None:
        self._settled = True
        self._groups.settled(self._member)

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._lane.end()
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None

    def _finish(self) -> None:
        """Give the communicator up after all work, or with the first fault. Called in the lane."""
        pause = _FIRST_LOOK
        while self._stream is not None and not _is_idle(self._stream):
            if self._aborted.wait(pause) or not self._check():
                return
            pause = min(2 * pause, _LOOK)
        try:
            self._give_up(abort=False)
        finally:
            self._call(self._settle)

    def _give_up(self, *, abort: bool) -> None:
        """Abort or destroy the communicator, by whichever call comes first."""
        with self._calling:
            communicator, self._communicator = self._communicator, None
            if communicator is None:
                return
            if abort:
                communicator.abort()
            else:
                communicator.destroy()

    @staticmethod
    def _aside(job: Callable[[], None]) -> None:
        """Do a job that may wait for a GPU in a thread of its own."""
        threading.Thread(target=job, name="zcactor-nccl-abort", daemon=True).start()

    def _call(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(job)


def _is_done(moment: Moment) -> bool:
    try:
        return moment.done()
    except DeviceError:  # the context is broken
        return False


def _is_idle(stream: GpuStream) -> bool:
    try:
        return stream.done()
    except DeviceError as error:  # a broken context does no work any more
        return error.fatal


def exchange_of(member: Member) -> GpuExchange:
    """The exchanges of a member. Called on the loop."""
    if member.exchange is None:
        member.exchange = GpuExchange(member)
    return cast("GpuExchange", member.exchange)


def nccl_of(groups: Any, kind: str) -> Nccl | str:
    """NCCL for the groups of this process, or the reason why there is none. Any thread may call this.

    Args:
        groups: the `zcactor.collectives.groups.Groups`.
        kind: of the GPUs' driver.
    """
    found = groups.nccl or found_nccl(kind)
    if not isinstance(found, str):
        groups.nccl = found
    return found
