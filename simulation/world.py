"""The world of a run: virtual time, the order of all events, and the processes that live.

Events of one process run in the order in which they were made, as on a real machine, where code relies on it. The
process of the next turn is drawn. So is everything else, each from a generator of its own, so that a run without one of
its faults is the same run in everything else.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from typing import TYPE_CHECKING, Any

from simulation.loop import SimLoop
from simulation.step import Timer
from zcactor.process import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.step import Step
    from simulation.trace import Trace

__all__ = ["Overrun", "World"]

_push = heapq.heappush


class Overrun(Exception):  # the end of a run, not a defect of the caller's
    """A run had more events than it may have."""


class World:
    """The events and processes of one run.

    Args:
        seed: decides all of it.
        trace: the trace that gets the events.
        limit: events that a run may have.
    """

    def __init__(self, seed: int | str, trace: Trace, limit: int = 50_000_000) -> None:
        self.seed = seed
        self.trace = trace
        self.now = 0.0
        """Virtual seconds since the beginning."""
        self.runnable: list[SimLoop] = []
        self.loops: dict[str, SimLoop] = {}
        """The loops of the processes that live, by name."""
        self.events = 0
        """Callbacks that have run."""
        self.problems: list[tuple[float, str]] = []
        """Times and texts of exceptions that no code has caught."""
        self.turn = ""
        """The process of the present turn, or of the last."""
        self._limit = limit
        self._halted = False
        self._order = self.random("scheduler")
        self._queue: list[tuple[float, int, SimLoop, Step]] = []
        self._entered = 0

    def random(self, name: str) -> random.Random:
        """The generator of that name: the same seed and name give the same numbers."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, process: str, kind: str, **details: Any) -> None:
        """Enter an event into the trace."""
        self.trace.note(self.now, process, kind, **details)

    def trouble(self, loop: SimLoop, message: str, error: BaseException | None) -> None:
        """Note an exception in a process that no code has caught."""
        if not loop.dead:
            self.problems.append((self.now, f"{loop.label}: {message}: {error!r}"))

    # ---------------------------------------------------------------- processes

    def process(self, host: str, name: str) -> SimLoop:
        """Start a process, with a clock of its own."""
        drawn = self.random(f"clock/{name}")
        loop = SimLoop(self, host, name, drawn.uniform(0, 1000), 1 + drawn.uniform(-200e-6, 200e-6))
        self.loops[name] = loop
        self.note(loop.label, "born")
        return loop

    def end(self, loop: SimLoop, why: str) -> None:
        """End a process: it takes no further step. Its peers notice that by the network."""
        if loop.dead:
            return
        self.note(loop.label, "end", why=why)
        loop.end()
        self.loops.pop(loop.name, None)

    def stop(self, loop: SimLoop) -> None:
        """Stop a process, as SIGSTOP does: it takes no step until `resume`."""
        if not loop.dead and not loop.stopped:
            self.note(loop.label, "stop")
            loop.stopped = True
            if loop.queued:
                loop.queued = False
                self.runnable.remove(loop)

    def resume(self, loop: SimLoop) -> None:
        """Let a process go on, as SIGCONT does."""
        if loop.stopped:
            loop.stopped = False
            if not loop.dead:
                self.note(loop.label, "continue")
                if loop.ready:
                    loop.queued = True
                    self.runnable.append(loop)

    def leap(self, loop: SimLoop, seconds: float) -> None:
        """Let the clock of a process jump ahead, as that of a virtual machine does after a sleep."""
        self.note(loop.label, "leap", seconds=seconds)
        loop.skew += seconds
        queue = self._queue
        for at, (_, number, owner, step) in enumerate(queue):
            if owner is loop and isinstance(step, Timer):
                queue[at] = max(loop.moment(step.when()), self.now), number, loop, step
        heapq.heapify(queue)

    # ---------------------------------------------------------------- events

    def enter(self, when: float, loop: SimLoop, step: Step) -> None:
        """Run `step` in the process of `loop` at `when`; never before now."""
        self._entered += 1
        _push(self._queue, (max(when, self.now), self._entered, loop, step))

    def forget(self) -> None:
        """Drop the events that will not happen: cancelled steps, and the callbacks of processes that have ended. The
        times of the latter pass all the same."""
        queue = self._queue
        queue[:] = [entry for entry in queue if entry[3].callback is not None]
        heapq.heapify(queue)
        for _, _, loop, step in queue:
            if loop.dead:
                step.forget()

    def halt(self) -> None:
        """Let the present `run` end after this turn."""
        self._halted = True

    def run(self, until: Callable[[], bool] | None = None, *, limit: float) -> bool:
        """Let events happen until `halt` was called, or ``until()`` is true.

        Args:
            until: called between turns; None saves its calls.
            limit: virtual time after which no event happens.

        Returns:
            False where virtual second `limit` comes before that, or no event is left.

        Raises:
            Overrun: the run had more events than it may have.
        """
        before = asyncio._get_running_loop()
        self._halted = False
        try:
            with context.restored():
                return self._events(until, limit)
        finally:
            asyncio._set_running_loop(before)

    def _events(self, until: Callable[[], bool] | None, limit: float) -> bool:
        runnable, queue, draw, heappop = self.runnable, self._queue, self._order.random, heapq.heappop
        set_running, set_current, turn = asyncio._set_running_loop, context.set_current, self._turn
        while not self._halted and (until is None or not until()):
            now = self.now
            while queue:
                when, _, loop, step = queue[0]
                if when > now:
                    if runnable:
                        break
                    if when > limit and step.callback is not None:
                        return False
                heappop(queue)
                if step.callback is not None:
                    if when > now:
                        self.now = now = when
                    if not loop.dead:
                        loop.ready.append(step)
                        if not loop.queued and not loop.stopped:
                            loop.queued = True
                            runnable.append(loop)
            if len(runnable) == 1:  # nearly always
                loop = runnable.pop()
            elif runnable:
                at = int(draw() * len(runnable))
                loop = runnable[at]
                runnable[at] = runnable[-1]
                runnable.pop()
            else:
                return False
            loop.queued = False
            if loop.dead:
                continue
            set_running(loop)
            self.turn = loop.label
            process = loop.process
            if process is None:
                context.clear_current()
            else:
                set_current(process)
            turn(loop)
        return True

    def _turn(self, loop: SimLoop) -> None:
        """Run one turn: the callbacks that are ready at its beginning."""
        ready = loop.ready
        for _ in range(len(ready)):
            if not ready:  # the process was killed meanwhile
                break
            step: Any = ready.popleft()
            callback = step.callback
            if callback is not None:
                self.events += 1
                try:
                    step.context.run(callback, *step.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    loop.call_exception_handler({"message": step.failure(), "exception": error, "handle": step})
        step = callback = None  # from Python 3.13 on the frames of a step's error keep this one, and with it the step
        if self.events > self._limit:
            raise Overrun(f"{self.events:,} events by virtual second {self.now:.3f}")
        if ready and not loop.queued and not loop.stopped:
            loop.queued = True
            self.runnable.append(loop)

    def number(self, name: str) -> int:
        """A number that stands for `name` in this world, the same in each run."""
        return zlib.crc32(f"{self.seed}/{name}".encode()) | 1
