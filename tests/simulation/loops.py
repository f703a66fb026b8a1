"""A loop of a simulated world that tests run on, as they do on uvloop's and asyncio's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zcactor.simulation.loop import SimLoop
from zcactor.simulation.trace import Trace
from zcactor.simulation.world import World

FOREVER = 1e9
TURN = 1e-4
"""Virtual seconds that a turn takes, for tests that look again in each."""


class MainLoop(SimLoop):
    """The loop of a test: running it lets the whole world go on, and threads of the test in between."""

    world: World

    def __init__(self) -> None:
        super().__init__(World(1, Trace()), "test", "test")
        self.world.loops[self.name] = self
        self._handler: Callable[[Any, dict[str, Any]], object] | None = None
        self._threads = ThreadPoolExecutor()

    def run_until_complete(self, future: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
        """As of asyncio's."""
        task = asyncio.ensure_future(future, loop=self)

        def there() -> bool:
            self.world.now += TURN
            return task.done()

        while not self.world.run(there, limit=FOREVER):
            time.sleep(0)  # hand the interpreter's lock to the thread that is about to wake one of the loops
        return task.result()

    async def shutdown_asyncgens(self) -> None:
        """Nothing is kept."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def set_debug(self, enabled: bool) -> None:
        """Never."""

    def run_in_executor(self, executor: object, function: Callable[..., Any], *args: Any) -> Any:
        """As of asyncio's: a test may have threads, other than the processes of a simulation."""
        del executor
        return asyncio.wrap_future(self._threads.submit(function, *args), loop=self)

    def close(self) -> None:
        """Take no further step."""
        self._threads.shutdown()
        self.dead = True

    def get_exception_handler(self) -> Any:
        """As of asyncio's."""
        return self._handler

    def set_exception_handler(self, handler: Any) -> None:
        """As of asyncio's."""
        self._handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody caught is told to the world."""
        super().call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As of asyncio's."""
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)


LOOPS = {"simulated": MainLoop}
"""For ``LOOP_FACTORIES`` of a test module; see ``tests/conftest.py``."""
