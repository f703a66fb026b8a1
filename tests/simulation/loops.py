"""A loop of a simulated world that tests run on, as on uvloop's and asyncio's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from simulation.loop import SimLoop
from simulation.trace import Trace
from simulation.world import World

FOREVER = 1e9
TURN = 1e-4
"""Virtual seconds of a turn, for tests that look again in each turn."""


class MainLoop(SimLoop):
    """The loop of a test: while it runs, the whole world goes on, and threads of the test in between."""

    world: World

    def __init__(self) -> None:
        super().__init__(World(1, Trace()), "test", "test")
        self.world.loops[self.name] = self
        self._handler: Callable[[Any, dict[str, Any]], object] | None = None
        self._threads = ThreadPoolExecutor()

    def run_until_complete(self, future: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
        """Run until the future is done, as asyncio's loop does."""
        task = asyncio.ensure_future(future, loop=self)

        def there() -> bool:
            self.world.now += TURN
            return task.done()

        while not self.world.run(there, limit=FOREVER):
            time.sleep(0)  # hand the interpreter's lock to a thread that is about to wake one of the loops
        return task.result()

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: this loop keeps no generators."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no default executor."""

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: there is no debug mode."""

    def run_in_executor(self, executor: object, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread, as asyncio's loop does: a test may have threads, a simulated process has none."""
        del executor
        return asyncio.wrap_future(self._threads.submit(function, *args), loop=self)

    def close(self) -> None:
        """End the threads, and take no further step."""
        self._threads.shutdown()
        self.dead = True

    def get_exception_handler(self) -> Any:
        """The handler, as on asyncio's loop."""
        return self._handler

    def set_exception_handler(self, handler: Any) -> None:
        """Set the handler, as on asyncio's loop."""
        self._handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an uncaught exception to the world."""
        super().call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Call the handler, as asyncio's loop does."""
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)


LOOPS = {"simulated": MainLoop}
"""The value for ``LOOP_FACTORIES`` of a test module; see ``tests/conftest.py``."""
