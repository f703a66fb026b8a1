"""Pairs: this process, and actors beyond a connection with faults."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor.api.actor import spawn
from zcactor.testing.faults import LinkFaults
from zcactor.testing.runtime import LoopbackRuntime, end_runtime, start_runtime

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import TracebackType

__all__ = ["Pair", "PairStart"]


class Pair:
    """A runtime in this process, whose actors are beyond a connection with faults. See the fixture `zc_loopback`.

    Attributes:
        runtime: the runtime.
    """

    def __init__(self, runtime: LoopbackRuntime, faults: LinkFaults) -> None:
        self.runtime = runtime
        self._faults = faults

    async def spawn(self, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start an actor beyond the connection. When this returns for the first time, the faults begin.

        Args:
            cls: the class, or a class with options: ``Counter.options(name="c")``.
            args, kwargs: of its constructor.

        Returns:
            A handle. Raises as `zcactor.spawn`.
        """
        handle = await (cls.spawn(*args, **kwargs) if hasattr(cls, "spawn") else spawn(cls, *args, **kwargs))
        self._faults.begin()
        return handle

    async def aclose(self) -> None:
        """End the actors and the runtime. Idempotent. The fixture calls this."""
        runtime = self.runtime
        if runtime.process.loop is asyncio.get_running_loop():
            await end_runtime(runtime)
        elif not runtime.closed:
            runtime.end_now()  # its own loop has ended


class PairStart:
    """The result of a call of `zc_loopback`: await it, or use it with ``async with``."""

    def __init__(self, seed: int, faults: Mapping[str, Any], pairs: list[Pair]) -> None:
        self._seed = seed
        self._faults = faults
        self._pairs = pairs
        self._pair: Pair | None = None

    def __await__(self) -> Generator[Any, None, Pair]:
        return self._start().__await__()

    async def _start(self) -> Pair:
        faults = LinkFaults(asyncio.get_running_loop().time, self._seed, self._faults)
        self._pair = Pair(await start_runtime(faults), faults)
        self._pairs.append(self._pair)
        return self._pair

    async def __aenter__(self) -> Pair:
        return await self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pair is not None:
            await self._pair.aclose()
