"""The runs of one compiled graph, in the process that has compiled it: their start, their outcomes, their limits."""

from __future__ import annotations

import sys
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from numpy import ndarray

from zcactor import ids
from zcactor.api.future import ObjectRef
from zcactor.api.handle import ActorHandle
from zcactor.api.passing import FailedArgumentError, passed_value
from zcactor.errors import (
    ActorDied,
    ConnectionLost,
    DeadlineExceeded,
    MailboxFull,
    RemoteError,
    ZcactorError,
    original_of,
)
from zcactor.exception_pickling import bare, text_of
from zcactor.graphs.layout import RUN_BITS, GraphLayout, NodeSlot, tasks_of
from zcactor.graphs.service import GraphService
from zcactor.graphs.share import KEY_NBYTES
from zcactor.graphs.values import PLAIN, Outcome
from zcactor.marshal.move import Move
from zcactor.marshal.packed import Packed, Resolved, shared
from zcactor.marshal.values import SCALARS
from zcactor.peers.seating import Misplaced, Seat, seat_of
from zcactor.process.tasks import all_of
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.graphs.share import Share
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["Runs"]

_ATTEMPTS: Final = 5
"""Number of times that a graph is compiled while its actors change their processes."""
_LAST_RUN: Final = (1 << RUN_BITS) - 1


class Table(Protocol):
    """The graphs of the process; see `zcactor.graphs.graphs.Graphs`."""

    process: LocalProcess

    def prepare(self, runs: Runs, key: bytes) -> Callable[[], Share]:
        """Expect this process's share of a graph."""

    def forget_everywhere(self, key: bytes, processes: Sequence[bytes]) -> None:
        """Have all processes of a graph forget it."""

    def cancel_everywhere(self, key: bytes, processes: Sequence[bytes], run: int) -> None:
        """Have all processes of a graph stop a run."""

    def remove(self, runs: Runs) -> None:
        """Forget a graph that nobody can run any more."""


class _NoSession:
    """The place of a session in the promises of runs, once these have ended."""

    __slots__ = ()

    closed = "a run of a graph has no session"


_NO_SESSION: Final = _NoSession()


class _Run(_NoSession):
    """One run: its inputs until it starts, its outputs until all have come. Until its end it stands in the place of the
    session of its promise, which asks it to cancel."""

    __slots__ = ("blockers", "call", "inputs", "number", "outputs", "plain", "runs")

    def __init__(self, runs: Runs, call: Call, inputs: list[Any]) -> None:
        self.runs = runs
        self.call = call
        self.inputs = inputs
        self.plain: dict[int, Any] = {}
        """Outputs that came as plain values."""
        self.outputs: dict[int, Outcome] = {}
        """The other outputs."""
        self.number = 0
        """Its number once it has started; 0: it waits."""
        self.blockers = 0
        """References among the inputs whose values are not known yet."""

    def cancel(self, call: Call) -> None:
        """Give the run up; its promise fails right after."""
        del call
        self.runs.drop(self)


class Runs:
    """The runs of a compiled graph. Used on the loop's thread, except where a method says otherwise.

    Args:
        graphs: the graphs of this process.
        layout: the graph.
        in_flight: runs that are under way at the same time, at most.
        spin_us: microseconds for which the loops of all its processes stay awake after a message.
    """

    def __init__(self, graphs: Table, layout: GraphLayout, in_flight: int, spin_us: float) -> None:
        self.graphs = graphs
        self.process: LocalProcess = graphs.process
        self.layout, self.in_flight, self.spin_us = layout, in_flight, spin_us
        self.handles = [ActorHandle(step.remote) for step in layout.steps]
        """Keep the actors alive."""
        self.limit = min(step.remote.max_pending for step in layout.steps) if layout.steps else 1 << 30
        self.unfinished: set[Call] = set()
        """The promises of all runs that have no outcome. Any thread adds its own."""
        self.closing = False
        self.share: Share | None = None
        """This process's share; None while the graph is not compiled."""
        self._arguments: dict[int, tuple[list[tuple[bool, Any]], dict[str, tuple[bool, Any]]]] | None = None
        """The arguments of each step, with the constants as they were when the graph was compiled for the first
        time."""
        self.seats: list[Seat] = []
        self.paths: dict[tuple[bytes, bytes], str] = {}
        """The transport from one process to another."""
        self.sizes: dict[int, int] = {}
        """Bytes of the largest value of each node so far."""
        self.processes: list[bytes] = []
        """All processes of the graph, this one among them."""
        self._compiling = False
        self._lost = False
        self._number = 0
        self._active: dict[int, _Run] = {}
        self._waiting: deque[_Run] = deque()
        self._wanted = len(layout.outputs)
        self._idle: list[asyncio.Future[None]] = []

    # ---------------------------------------------------------------- compiling

    async def compile(self) -> None:
        """Give every process its share, and connect them.

        Raises:
            ActorDied: an actor is dead.
            ConnectionLost: a process is not reached.
            Exception: the error of packing a constant.
            RemoteError: the error of a constant in an actor's process.
        """
        process, steps = self.process, self.layout.steps
        self.forget()
        if self._arguments is None:
            self._arguments = {
                step.number: ([*map(self._argued, step.args)], {n: self._argued(v) for n, v in step.kwargs.items()})
                for step in steps
            }
        seats = [await seat_of(process, handle, lost=self._lost) for handle in self.handles]
        for attempt in range(_ATTEMPTS):
            try:
                await self._divide(ids.token(KEY_NBYTES), seats)
            except (RemoteError, ConnectionLost) as error:
                original = original_of(error)
                if issubclass(type(error), RemoteError) and type(original) is not Misplaced:
                    raise  # of a constant, or of a method's name
                before, seats = seats, [await seat_of(process, handle, lost=True) for handle in self.handles]
                if seats == before or attempt == _ATTEMPTS - 1:
                    raise ConnectionLost(
                        f"the graph of {steps[0].spec.label} could not be made: {text_of(original)}"
                    ) from error
            else:
                self._lost = False
                return

    async def _divide(self, key: bytes, seats: list[Seat]) -> None:
        process, founder = self.process, self.process.process
        tasks = tasks_of(self.layout, [seat.process for seat in seats], founder)
        places = {step.number: seat for step, seat in zip(self.layout.steps, seats, strict=True)}
        order = list(tasks)
        sessions = [await process.connections.connect(each) for each in order]
        asked: list[tuple[Session, Any]] = []
        arguments = self._arguments or {}
        for place, session in zip(order, sessions, strict=True):
            task = tasks[place]
            steps = [
                [
                    step.number, places[step.number].place, places[step.number].actor_id, step.spec.code,
                    step.spec.label, *arguments[step.number], list(step.needs),
                ]
                for step in task.steps
            ]  # fmt: skip
            targets = {str(number): list(to) for number, to in task.targets.items()}
            asked.append((session, (key, founder, steps, targets, [*task.peers.items()], order, self.spin_us)))
        self.seats, self._number = seats, 0
        share, ask = self.graphs.prepare(self, key), self.process.requests.ask
        try:
            await all_of([ask(session, GraphService.join, *fields) for session, fields in asked])
            paths = await all_of([ask(session, GraphService.start, key) for session in sessions])
        except BaseException:
            self.graphs.forget_everywhere(key, order)
            raise
        self.share = share()
        self.paths = {(place, peer): kind for place, found in zip(order, paths, strict=True) for peer, kind in found}
        self.processes = order

    def forget(self) -> None:
        """Have all processes forget the graph. Idempotent."""
        share, self.share = self.share, None
        if share is not None:
            self.graphs.forget_everywhere(share.key, self.processes)

    # ---------------------------------------------------------------- starting

    def begin(self, inputs: Sequence[Any], seconds: float | None) -> ObjectRef[Any]:
        """Start a run, or let it wait until others have ended. Any thread may call this.

        Raises:
            MailboxFull: as many runs wait as calls of an actor may.
            Exception: the error of packing an input.
        """
        process = self.process
        if len(self.unfinished) >= self.limit:
            raise MailboxFull(
                f"the graph has {len(self.unfinished)} unfinished runs; its actors' max_pending_calls allows "
                f"{self.limit}: await some of them first"
            )
        here = threading.get_ident() == process.thread
        at_once = (
            here and self.share is not None and not self._waiting and len(self._active) < self.in_flight
            and self._number < _LAST_RUN and all(value._call.known for value in inputs if type(value) is ObjectRef)
        )  # fmt: skip
        if not at_once:
            inputs = [self._kept(value) for value in inputs]
        call = Call(process.process, process.loop, process.thread)
        call.label = "a run of a graph"
        call.state = CallState.SENT  # a cancelled await tells its session, which is the run
        call.on_done = self._done
        call.retrieved = True  # until its reference exists
        run = _Run(self, call, list(inputs))
        call.session = run
        self.unfinished.add(call)
        reference: ObjectRef[Any] = ObjectRef(call)
        if at_once:
            try:
                self._start(run)  # an input that cannot be packed raises at the call
            except BaseException:
                self._done(call)
                raise
            self._limit(run, seconds)
        elif here:
            self._line_up(run, seconds)
        else:
            process.loop.call_soon_threadsafe(self._line_up, run, seconds)
        call.retrieved = False
        return reference

    def _argued(self, value: Any) -> tuple[bool, Any]:
        """An argument for the wire: a node's number, or a constant as it is now."""
        if type(value) is NodeSlot:
            return True, value.node
        if type(value) in SCALARS or type(value) is ObjectRef:
            return False, value
        payload, parts, flags = self.process.marshaller.pack(value)
        return False, Packed(payload, shared(parts), flags)

    def _kept(self, value: Any) -> Any:
        """An input as it was at the call, for a run that starts later."""
        if type(value) in SCALARS or type(value) is ObjectRef:
            return value
        return Packed(*self.process.marshaller.pack(value))

    def _line_up(self, run: _Run, seconds: float | None) -> None:
        """Let a run wait until its inputs are known and its turn has come; it may start now."""
        if run.call.done:
            return
        for value in run.inputs:
            if type(value) is ObjectRef and not value._call.known:
                run.blockers += 1
                value._call.when_known(partial(self._unblocked, run))
        self._waiting.append(run)
        self._go_on()
        self._limit(run, seconds)

    def _limit(self, run: _Run, seconds: float | None) -> None:
        if seconds is not None and not run.call.done:
            run.call.timer = self.process.loop.call_later(seconds, self._expire, run, seconds)

    def _unblocked(self, run: _Run, call: Call) -> None:
        del call
        run.blockers -= 1
        if not run.blockers:
            self._go_on()

    def _go_on(self) -> None:
        """Start waiting runs in order, as far as there is room."""
        while self._waiting and len(self._active) < self.in_flight and not self._waiting[0].blockers:
            if self._number == _LAST_RUN:
                self.forget()
            if self.share is None:
                if not self._compiling:
                    self._compiling = True
                    self.process.tasks.start(self._compile_again())
                return
            run = self._waiting.popleft()
            try:
                self._start(run)
            except BaseException as error:  # packing runs code of the values' classes, which may raise anything
                run.call.fail(bare(error, None))

    def _start(self, run: _Run) -> None:
        """Send the inputs of a run. A run with an input that has failed ends with that failure.

        Raises:
            Exception: the error of packing an input; nothing was sent.
            BaseException: the exception of a signal's handler. If an input was sent, the runs under way end, because
                the next run would have the same number.
        """
        share = self.share
        assert share is not None
        try:
            inputs: list[Any] = [passed_value(each) if type(each) is ObjectRef else each for each in run.inputs]
        except FailedArgumentError as error:
            # In a turn of its own: of many runs each may take the result of the one before.
            self.process.loop.call_soon(run.call.fail, bare(error.failure, None))
            return
        for index, value in enumerate(inputs):
            if type(value) not in SCALARS and type(value) is not Packed and len(inputs) > 1:
                inputs[index] = Packed(*self.process.marshaller.pack(value))  # all can be sent, or none is
        number, values = self._number + 1, dict(enumerate(inputs))
        if self.layout.start in share.targets:
            values[self.layout.start] = None
        before = share.handed(values)
        try:
            for node, value in values.items():
                share.send(node, number, value)
                self._note_size(node, value)
            self._number = run.number = number
            run.inputs = []
            self._active[number] = run
        except BaseException:
            if share.handed(values) != before:
                self.broke("the program", "an exception came while a run was started", died=False)
            raise
        if share.spinner is not None:
            share.spinner.touch()

    def _note_size(self, number: int, value: Any) -> None:
        nbytes = sum(part.nbytes for part in value.parts) if type(value) is Packed else getattr(value, "nbytes", 0)
        if type(nbytes) is int and nbytes > self.sizes.get(number, 0):
            self.sizes[number] = nbytes

    async def _compile_again(self) -> None:
        """Compile the graph whose actors were lost, for the runs that wait."""
        try:
            await self.compile()
        except ZcactorError as error:
            waiting, self._waiting = self._waiting, deque()
            for run in waiting:
                run.call.fail(bare(error, None))
        finally:
            self._compiling = False
        if self.share is not None:
            self._go_on()

    # ---------------------------------------------------------------- outcomes

    def arrived(self, number: int, run_number: int, outcome: Outcome) -> None:
        """Take an output of a run."""
        run = self._active.get(run_number)
        if run is None:
            return  # it was cancelled
        run.outputs[number] = outcome
        run.plain.pop(number, None)
        if len(run.outputs) + len(run.plain) == self._wanted:
            self._came(run, run_number)

    def arrived_plain(self, number: int, run_number: int, value: Any) -> None:
        """Take an output of a run that is a plain value."""
        run = self._active.get(run_number)
        if run is None:
            return
        plain, others = run.plain, run.outputs
        plain[number] = value
        if others:
            others.pop(number, None)
        if len(others) + len(plain) == self._wanted:
            self._came(run, run_number)

    def _came(self, run: _Run, number: int) -> None:
        """End a run that has all its outputs, and go on with those that wait for its place."""
        del self._active[number]
        plain, wanted = run.plain, self.layout.outputs
        if not run.outputs:
            run.call.complete_plain(plain[wanted[0]] if len(wanted) == 1 else tuple([plain[each] for each in wanted]))
        else:
            run.outputs.update({each: Outcome(Status.OK, value) for each, value in plain.items()})
            self._finish(run.call, run.outputs)
        if self._waiting:
            self._go_on()

    def _finish(self, call: Call, outputs: Mapping[int, Outcome]) -> None:
        failure = next((outcome for outcome in outputs.values() if outcome.failed), None)
        if failure is not None or len(self.layout.outputs) == 1:
            outcome = failure or outputs[self.layout.outputs[0]]
            if outcome.flags == PLAIN:
                call.complete_plain(outcome.payload)
            else:
                self.process.promises.complete(call, outcome.status, outcome.payload, outcome.parts, outcome.flags)
            return
        # Unpickling may raise anything, and does so where the run is awaited. Until then all stays here, of any length.
        values = tuple([_unopened(outputs[number]) for number in self.layout.outputs])
        packed = self.process.marshaller.pack(values, payload_limit=sys.maxsize)
        self.process.promises.complete(call, Status.OK, *packed)

    def _done(self, call: Call) -> None:
        call.session = _NO_SESSION  # or run and promise would hold each other, and all that either has
        self.unfinished.discard(call)
        if not self.unfinished:
            if self._idle:
                idle, self._idle = self._idle, []
                for future in idle:
                    if not future.done():
                        future.set_result(None)
            if self.closing:
                self._end()

    def drop(self, run: _Run) -> None:
        """Give a run up: its place is free at once, and its methods stop as cancelled calls do."""
        if run.number:
            if self._active.pop(run.number, None) is not None and self.share is not None:
                self.graphs.cancel_everywhere(self.share.key, self.processes, run.number)
        elif run in self._waiting:
            self._waiting.remove(run)
        self.process.loop.call_soon(self._go_on)

    def _expire(self, run: _Run, seconds: float) -> None:
        self.drop(run)
        run.call.fail(DeadlineExceeded(f"a run of a graph had no result after {seconds:.6g} s"))

    # ---------------------------------------------------------------- faults and ends

    def broke(self, label: str, cause: str, *, died: bool) -> None:
        """End the runs under way: an actor, or messages, are lost. The next run compiles the graph again."""
        active, self._active = self._active, {}
        self._lost = True
        self.forget()
        for run in active.values():
            if died:
                run.call.fail(ActorDied(label, cause, True))
            else:
                run.call.fail(ConnectionLost(f"a run of a graph lost messages: {label}: {cause}", True))
        self._go_on()

    async def idle(self) -> None:
        """Return once all runs have ended."""
        while self.unfinished:
            future = self.process.loop.create_future()
            self._idle.append(future)
            await future

    def release(self) -> None:
        """Forget the graph as soon as its runs have ended: nobody can start another."""
        self.closing = True
        if not self.unfinished:
            self._end()

    def _end(self) -> None:
        self.forget()
        self.graphs.remove(self)

    def close(self, cause: str) -> None:
        """End all runs, because the process ends."""
        self.closing = True
        self._active.clear()
        self._waiting.clear()
        for call in list(self.unfinished):
            call.fail(ConnectionLost(cause, True))


def _unopened(outcome: Outcome) -> Any:
    """One of several outputs, for a tuple of them that is packed."""
    value = outcome.payload
    if outcome.flags != PLAIN:
        return Resolved(value, outcome.parts, outcome.flags)
    if type(value) is ndarray and value.flags.writeable:  # a small array that was handed over
        return Move(value.copy())  # a method of this process may have the array itself
    return value
