"""The event loop of one simulated process: its own queue and its own clock, over the time of the world."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine

    from zcactor.runtime.process import Process

__all__ = ["SimLoop"]


class Clock(Protocol):
    """What a loop needs of its `zcactor.simulation.world.World`."""

    now: float
    runnable: list[SimLoop]

    def enter(self, when: float, loop: SimLoop, handle: asyncio.Handle) -> None:
        """Run `handle` at `when`."""

    def random(self, name: str) -> random.Random:
        """The generator of that name."""

    def trouble(self, loop: SimLoop, message: str, error: BaseException | None) -> None:
        """Nobody caught something."""


_Base: Any = asyncio.AbstractEventLoop


class SimLoop(_Base):  # type: ignore[misc]  # what a loop must have is less than what its abstract class lists
    """What tasks, futures and the package ask of a loop; the world runs it (`zcactor.simulation.world.World.run`).

    Args:
        world: it belongs to.
        host: on which the process runs.
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
        self.ready: deque[asyncio.Handle] = deque()
        self.queued = False
        """Whether the world knows that something is ready here."""
        self.dead = False
        """Killed: nothing runs here any more."""
        self.stopped = False
        """By SIGSTOP: nothing runs until it goes on."""
        self.process: Process | None = None
        self.context = contextvars.Context()
        """What the process's own tasks run in."""
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
    ) -> asyncio.Handle:
        """As of asyncio's."""
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self.ready.append(handle)
            if not self.queued and not self.stopped:
                self.queued = True
                self.world.runnable.append(self)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As of asyncio's."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As of asyncio's."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.enter(self.moment(when), self, handle)
        return handle

    def moment(self, when: float) -> float:
        """The world's time when this process's clock will show `when`."""
        return (when - self.skew) / self.rate

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` in this process at the world's time `when`."""
        self.world.enter(when, self, asyncio.Handle(callback, args, self, self.context))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The world skips a cancelled handle when its time has come."""

    # ---------------------------------------------------------------- the rest of a loop

    async def run_in_executor(self, executor: object, function: Callable[..., Any], *args: Any) -> Any:
        """The same here, a moment later: a simulated process has no threads."""
        del executor
        await asyncio.sleep(1e-4)
        return function(*args)

    def create_future(self) -> asyncio.Future[Any]:
        """As of asyncio's."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """As of asyncio's. In a process that has ended `coro` never begins: frames that go may want to."""
        if self.dead:
            coro.close()
        return asyncio.Task(coro, loop=self, name=name or self.name, context=context)

    def get_debug(self) -> bool:
        """Never: what debugging adds reads the wall clock."""
        return False

    def is_running(self) -> bool:
        """As long as the process lives."""
        return not self.dead

    def is_closed(self) -> bool:
        """A killed process does not close its loop."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody caught is told to the world."""
        self.world.trouble(self, context.get("message", ""), context.get("exception"))

    def end(self) -> None:
        """Nothing runs here any more, and nothing is kept: a run may have thousands of processes, one after another."""
        self.dead = True
        self.ready.clear()
        self.process = self.main = None
        self.context = contextvars.Context()

    def begin(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run `main` as the process's program."""

        def start() -> None:
            self.main = self.create_task(main, context=self.context)

        self.call_soon(start, context=self.context)
