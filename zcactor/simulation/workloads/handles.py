"""Handles: passed on, kept, given back and dropped; an actor lives for as long as anything holds a handle of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from zcactor.errors import ActorDied, NoSuchActor, ZcactorError
from zcactor.simulation import record as records
from zcactor.simulation.workloads.names import Single

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from zcactor.simulation.record import Operation
    from zcactor.simulation.workloads.scene import Scene

__all__ = ["DROPPED", "Handles", "Keeper"]

DROPPED = "its last handle was dropped"
"""The cause that the agent gives for such an end."""


@zc.actor
class Keeper:
    """Holds handles of others by the names of their actors."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)
        self.held: dict[str, Any] = {}

    @zc.method
    async def take(self, number: int, name: str, handle: Any) -> None:
        """Hold a handle."""
        records.current.ran(number, self)
        self.held[name] = handle

    @zc.method
    async def give(self, number: int, name: str) -> Any:
        """The handle, which is held here as before; None where it is not."""
        records.current.ran(number, self)
        return self.held.get(name)

    @zc.method
    async def drop(self, number: int, name: str) -> None:
        """Hold it no longer."""
        records.current.ran(number, self)
        self.held.pop(name, None)

    @zc.method
    async def call(self, number: int, name: str) -> str:
        """Call the actor through the handle that is held here, and tell how that ended."""
        record = records.current
        record.ran(number, self)
        handle = self.held.get(name)
        if handle is None:
            return "not held"
        inner = record.begin("through a kept handle")
        try:
            async with asyncio.timeout(120):
                said = await handle.who(inner.number)
        except ZcactorError as error:
            record.end(inner, type(error).__name__, getattr(error, "maybe_executed", None))
            check_held(name, error)
        except TimeoutError:
            record.break_("I1", f"{record.name(inner)} had no end in 120 s")
        except asyncio.CancelledError:
            record.end(inner, "CancelledError")
            raise
        else:
            record.end(inner, "ok")
            check_name(name, said)
        return inner.outcome


def check_name(name: str, said: object) -> None:
    """The answer of an actor is its own."""
    if said != name:
        records.current.break_("I3", f"an actor called {name} says that it is {said}")


def check_held(name: str, error: ZcactorError) -> None:
    """No actor ends for want of handles while there is one."""
    if isinstance(error, ActorDied) and DROPPED in str(error):
        records.current.break_("I10", f"{name} has ended though its handle is held: {error}")


class Handles:
    """A driver that has keepers on all nodes hold its handles. See `zcactor.simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "handles"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._keepers: list[Any] = []
        self._count = 0
        self._lasting: list[str] = []
        """Names of actors that no drop ends."""

    async def prepare(self) -> None:
        """Spawn a keeper for each node, two at the least and eight at the most."""
        for number in range(min(max(self._scene.nodes, 2), 8)):
            name = f"k{number}"
            restarts = self._scene.rng.choice((0, -1))
            self._keepers.append(await Keeper.options(name=name, node="spread", max_restarts=restarts).spawn(name))

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._pass_around() for _ in range(3)))

    async def finish(self) -> None:
        """End the keepers, with all that they hold, and what lasts without a handle."""
        for name in self._lasting:
            try:
                await zc.kill(await zc.get_actor(name))
            except NoSuchActor:
                self._scene.record.saw("a detached actor had ended")
        for number, keeper in enumerate(self._keepers):
            await (zc.stop if number % 2 else zc.kill)(keeper)
        self._keepers.clear()

    async def _pass_around(self) -> None:
        scene = self._scene
        while not scene.over:
            try:
                await self._one()
            except ZcactorError as error:
                scene.record.saw(f"no leaf: {type(error).__name__}")
            await scene.pause(0.6)

    async def _ask(self, kind: str, make: Any) -> tuple[Operation, Any]:
        """Make a call; the method is given the call's number."""
        operation = self._scene.record.begin(kind)

        async def call() -> Any:
            awaitable: Awaitable[Any] = make(operation.number)
            return await awaitable

        return operation, await self._scene.outcome(operation, call())

    async def _one(self) -> None:
        """The life of one actor."""
        rng, record = self._scene.rng, self._scene.record
        self._count += 1
        name = f"leaf{self._count}"
        options: dict[str, Any] = {"node": rng.choice(("spread", "pack", None)), "max_restarts": rng.choice((0, 0, 2))}
        if rng.random() < 0.3:
            options["process"] = "shared"
        if rng.random() < 0.15:
            options |= {"name": name, "lifetime": "detached"}
            self._lasting.append(name)
        leaf: Any = await Single.options(**options).spawn(name)
        first, second = rng.sample(self._keepers, 2)
        taken, _ = await self._ask("take", lambda number: first.take(number, name, leaf))
        if rng.random() < 0.5:
            leaf = None  # the first keeper has the only handle
        if taken.outcome == "ok":
            await self._ask("call", lambda number: first.call(number, name))
            if rng.random() < 0.5:
                _, given = await self._ask("give", lambda number: first.give(number, name))
                if given is not None:
                    await self._ask("take", lambda number: second.take(number, name, given))
                    given = None
                    await self._ask("drop", lambda number: first.drop(number, name))
                    await self._scene.pause(0.3)
                    _, said = await self._ask("call", lambda number: second.call(number, name))
                    if said == "ok":
                        record.saw("a handle held by the third process that had it")
        if leaf is not None:
            operation, said = await self._ask("who", lambda number: leaf.who(number))
            if operation.outcome == "ok":
                check_name(name, said)
        for keeper in (first, second):
            await self._ask("drop", lambda number, keeper=keeper: keeper.drop(number, name))
