"""The event loop of one simulated process: its own queue and its own clock, over the time of the world."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from simulation.step import Step, Timer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine

    from zcactor.assembly.process import Process

__all__ = ["SimLoop"]


class Clock(Protocol):
    """The parts of `simulation.world.World` that a loop needs."""

    now: float
    runnable: list[SimLoop]

    def enter(self, when: float, loop: SimLoop, step: Step) -> None:
        """Run `step` at the world's time `when`."""

    def random(self, name: str) -> random.Random:
        """The generator of that name."""

    def trouble(self, loop: SimLoop, message: str, error: BaseException | None) -> None:
        """Note an exception that no code has caught."""


_Base: Any = asyncio.AbstractEventLoop


class SimLoop(_Base):  # type: ignore[misc]  # a loop needs less than its abstract class lists
    """The loop for tasks, futures and the package; the world runs it (`simulation.world.World.run`).

    Args:
        world: the world to which it belongs.
        host: the host on which the process runs.
        name: of the process, unique in the world.
        skew: seconds by which its clock is ahead of the world's at the start.
        rate: seconds of its clock in one of the world's.
    """

    def __init__(self, world: Clock, host: str, name: str, skew: float = 0.0, rate: float = 1.0) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.label = f"{name}@{host}"
        self.skew = skew
        self.rate = rate
        self.ready: deque[Step] = deque()
        self.queued = False
        """Whether the world knows that a step is ready here."""
        self.dead = False
        """Whether the process was killed: no further step runs."""
        self.stopped = False
        """Whether the process was stopped by SIGSTOP: no step runs until it goes on."""
        self.process: Process | None = None
        self.context = contextvars.Context()
        """The context of the process's own tasks."""
        self.connections: dict[Any, None] = {}
        """Ends of open connections, in the order in which they were made."""
        self.main: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<SimLoop {self.label}>"

    # ---------------------------------------------------------------- time

    def time(self) -> float:
        """Seconds of this process's clock."""
        return self.world.now * self.rate + self.skew

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Step:
        """See `asyncio.AbstractEventLoop.call_soon`."""
        step = Step(callback, args, contextvars.copy_context() if context is None else context)
        if not self.dead:
            self.ready.append(step)
            if not self.queued and not self.stopped:
                self.queued = True
                self.world.runnable.append(self)
        return step

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """See `asyncio.AbstractEventLoop.call_later`."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """See `asyncio.AbstractEventLoop.call_at`."""
        timer = Timer(when, callback, args, contextvars.copy_context() if context is None else context)
        self.world.enter((when - self.skew) / self.rate, self, timer)
        return timer

    def moment(self, when: float) -> float:
        """The world's time at which this process's clock shows `when`."""
        return (when - self.skew) / self.rate

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` in this process at the world's time `when`."""
        self.world.enter(when, self, Step(callback, args, self.context))

    # ---------------------------------------------------------------- the rest of a loop

    async def run_in_executor(self, executor: object, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` on the loop, a moment later: a simulated process has no threads."""
        del executor
        await asyncio.sleep(1e-4)
        return function(*args)

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.AbstractEventLoop.create_future`."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """See `asyncio.AbstractEventLoop.create_task`. In a process that has ended, `coro` never begins: frames that
        are destroyed may start tasks."""
        if self.dead:
            coro.close()
        return asyncio.Task(coro, loop=self, name=name or self.name, context=context)

    get_debug: Callable[[], bool] = staticmethod(bool)
    """``get_debug()`` is False: debugging would read the wall clock. Each future asks, and `bool` answers fast."""

    def is_running(self) -> bool:
        """Whether the process lives."""
        return not self.dead

    def is_closed(self) -> bool:
        """False: a killed process does not close its loop."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass an exception that no code has caught on to the world."""
        self.world.trouble(self, context.get("message", ""), context.get("exception"))

    def end(self) -> None:
        """End the process: no further step runs, and the loop keeps no objects. A run may have thousands of processes,
        one after another."""
        self.dead = True
        for step in self.ready:
            task = getattr(step.callback, "__self__", None)
            if isinstance(task, asyncio.Task):
                coro: Any = task.get_coro()
                if inspect.iscoroutine(coro) and inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
                    coro.close()  # it never begins, and that is no defect
        self.ready.clear()
        self.process = self.main = None
        self.context = contextvars.Context()

    def begin(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run `main` as the process's program."""

        def start() -> None:
            self.main = self.create_task(main, context=self.context)

        self.call_soon(start, context=self.context)
