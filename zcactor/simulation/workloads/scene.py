"""What a workload is given, and what it has to have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from zcactor.errors import RemoteError, ZcactorError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable

    from zcactor.simulation.record import Operation, Record

__all__ = ["Scene", "Workload"]


class Scene:
    """The run as a program in it sees it.

    Args:
        record: of what happens.
        rng: the workload's own.
        nodes: how many there are.
        duration: virtual seconds of work.
    """

    def __init__(self, record: Record, rng: random.Random, nodes: int, duration: float) -> None:
        self.record = record
        self.rng = rng
        self.nodes = nodes
        self.end = float("inf")
        """Virtual time at which no more is begun."""
        self.duration = duration

    @property
    def over(self) -> bool:
        """Whether the time for work has passed."""
        return self.record.world.now >= self.end

    async def pause(self, mean: float) -> None:
        """Wait for a while that is drawn, `mean` seconds on average."""
        await asyncio.sleep(self.rng.expovariate(1 / mean))

    async def outcome(self, operation: Operation, call: Awaitable[Any]) -> Any:
        """Await a call and enter how it ended; its value, or None."""
        try:
            value = await call
        except RemoteError as error:  # the method has run, and raised
            self.record.end(operation, f"remote {type(error.original or error).__name__}", maybe=True)
        except ZcactorError as error:
            self.record.end(operation, type(error).__name__, getattr(error, "maybe_executed", None))
        except asyncio.CancelledError:
            self.record.end(operation, "CancelledError")
        else:
            self.record.end(operation, "ok")
            return value
        return None


class Workload(Protocol):
    """Part of a program. Its methods run in a driver, in this order, and raise nothing but defects."""

    name: ClassVar[str]

    def __init__(self, scene: Scene) -> None: ...

    async def prepare(self) -> None:
        """Make what is needed, before any fault."""

    async def run(self) -> None:
        """Work until the scene is over, and until every call has ended."""

    async def finish(self) -> None:
        """Give back everything."""
