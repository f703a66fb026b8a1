"""The world of a run: virtual time, the order of all events, and the processes that live.

Events of one process run in the order in which they were made, as on a real machine, where code relies on it. Which
process takes the next turn is drawn. So is everything else, each from a generator of its own, so that a run without one
of its faults is the same run in everything else.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from typing import TYPE_CHECKING, Any

from zcactor import context
from zcactor.simulation.loop import SimLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.trace import Trace

__all__ = ["Overrun", "World"]


class Overrun(Exception):  # the end of a run, not a defect of the caller's
    """More events have happened than a run may have."""


class World:
    """Everything that happens in one run.

    Args:
        seed: decides all of it.
        trace: is told of what matters.
        limit: events that a run may have.
    """

    def __init__(self, seed: int | str, trace: Trace, limit: int = 50_000_000) -> None:
        self.seed = seed
        self.trace = trace
        self.now = 0.0
        """Virtual seconds since the beginning."""
        self.runnable: list[SimLoop] = []
        self.loops: dict[str, SimLoop] = {}
        """Of the processes that live, by name."""
        self.events = 0
        """Callbacks that have run."""
        self.problems: list[tuple[float, str]] = []
        """What nobody caught, and when."""
        self.turn = ""
        """The process whose turn it is, or was the last."""
        self._limit = limit
        self._order = self.random("scheduler")
        self._queue: list[tuple[float, int, SimLoop, asyncio.Handle]] = []
        self._entered = 0

    def random(self, name: str) -> random.Random:
        """The generator of that name: the same seed and name give the same numbers."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, process: str, kind: str, **details: Any) -> None:
        """Enter an event into the trace."""
        self.trace.note(self.now, process, kind, **details)

    def trouble(self, loop: SimLoop, message: str, error: BaseException | None) -> None:
        """Something in a process was caught by nobody."""
        if not loop.dead:
            self.problems.append((self.now, f"{loop.label}: {message}: {error!r}"))

    # ---------------------------------------------------------------- processes

    def process(self, host: str, name: str) -> SimLoop:
        """A process is born, with a clock of its own."""
        drawn = self.random(f"clock/{name}")
        loop = SimLoop(self, host, name, drawn.uniform(0, 1000), 1 + drawn.uniform(-200e-6, 200e-6))
        self.loops[name] = loop
        self.note(loop.label, "born")
        return loop

    def end(self, loop: SimLoop, why: str) -> None:
        """A process takes no further step. What its peers see of that is the network's."""
        if loop.dead:
            return
        self.note(loop.label, "end", why=why)
        loop.end()
        self.loops.pop(loop.name, None)

    def stop(self, loop: SimLoop) -> None:
        """SIGSTOP: the process takes no step until `resume`."""
        if not loop.dead and not loop.stopped:
            self.note(loop.label, "stop")
            loop.stopped = True
            if loop.queued:
                loop.queued = False
                self.runnable.remove(loop)

    def resume(self, loop: SimLoop) -> None:
        """SIGCONT."""
        if loop.stopped:
            loop.stopped = False
            if not loop.dead:
                self.note(loop.label, "continue")
                if loop.ready:
                    loop.queued = True
                    self.runnable.append(loop)

    def leap(self, loop: SimLoop, seconds: float) -> None:
        """The clock of a process jumps ahead, as that of a virtual machine does which was asleep."""
        self.note(loop.label, "leap", seconds=seconds)
        loop.skew += seconds
        queue = self._queue
        for at, (_, number, owner, handle) in enumerate(queue):
            if owner is loop and isinstance(handle, asyncio.TimerHandle):
                queue[at] = max(loop.moment(handle.when()), self.now), number, loop, handle
        heapq.heapify(queue)

    # ---------------------------------------------------------------- events

    def enter(self, when: float, loop: SimLoop, handle: asyncio.Handle) -> None:
        """Run `handle` in the process of `loop` at `when`; never before now."""
        self._entered += 1
        heapq.heappush(self._queue, (max(when, self.now), self._entered, loop, handle))

    def run(self, until: Callable[[], bool], *, limit: float) -> bool:
        """Let things happen until ``until()``, which is asked between turns.

        Returns:
            False where it is virtual second `limit` before that, or nothing is left that could happen.

        Raises:
            Overrun: too much has happened.
        """
        runnable, queue, order = self.runnable, self._queue, self._order
        set_running = asyncio._set_running_loop
        before = asyncio._get_running_loop()
        current = context.current_or_none()
        try:
            while not until():
                while queue and queue[0][3].cancelled():
                    heapq.heappop(queue)
                if queue and (queue[0][0] <= self.now or not runnable):
                    if queue[0][0] > limit:
                        return False
                    when, _, loop, handle = heapq.heappop(queue)
                    self.now = max(self.now, when)
                    if not loop.dead:
                        loop.ready.append(handle)
                        if not loop.queued and not loop.stopped:
                            loop.queued = True
                            runnable.append(loop)
                    continue
                if not runnable:
                    return False
                at = int(order.random() * len(runnable))
                loop = runnable[at]
                runnable[at] = runnable[-1]
                runnable.pop()
                loop.queued = False
                if loop.dead:
                    continue
                set_running(loop)
                self.turn = loop.label
                if loop.process is None:
                    context.clear_current()
                else:
                    context.set_current(loop.process)
                self._turn(loop)
                set_running(None)
        finally:
            set_running(before)
            if current is None:
                context.clear_current()
            else:
                context.set_current(current)
        return True

    def _turn(self, loop: SimLoop) -> None:
        """One turn: the callbacks that are ready at its beginning."""
        ready = loop.ready
        for _ in range(len(ready)):
            if not ready:  # it was killed meanwhile
                return
            handle = ready.popleft()
            if not handle.cancelled():
                self.events += 1
                handle._run()
        if self.events > self._limit:
            raise Overrun(f"{self.events:,} events by virtual second {self.now:.3f}")
        if ready and not loop.queued and not loop.stopped:
            loop.queued = True
            self.runnable.append(loop)

    def number(self, name: str) -> int:
        """A number that stands for `name` in this world, the same in each run."""
        return zlib.crc32(f"{self.seed}/{name}".encode()) | 1
