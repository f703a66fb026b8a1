"""Handles: passed on, kept, given back and dropped; an actor lives as long as any process holds a handle of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from simulation import record as records
from simulation.workloads.names import Single
from zcactor.errors import ActorDied, NoSuchActor, ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["DROPPED", "Handles", "Keeper"]

DROPPED = "its last handle was dropped"
"""The cause that the head gives for such an end."""


@zc.actor
class Keeper:
    """An actor that holds handles of others, by the names of their actors."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)
        self.held: dict[str, Any] = {}

    @zc.method
    async def take(self, number: int, name: str, handle: Any) -> None:
        """Hold a handle."""
        records.current.ran(number, self)
        self.held[name] = handle

    @zc.method
    async def give(self, number: int, name: str, away: bool) -> Any:
        """Give a handle, which the keeper goes on holding unless it gives it away; None where it holds none of that
        name."""
        records.current.ran(number, self)
        return self.held.pop(name, None) if away else self.held.get(name)

    @zc.method
    async def drop(self, number: int, name: str) -> None:
        """Drop a handle."""
        records.current.ran(number, self)
        self.held.pop(name, None)

    @zc.method
    async def call(self, number: int, name: str) -> str:
        """Call the actor of a held handle, and return how that ended."""
        record = records.current
        record.ran(number, self)
        handle = self.held.get(name)
        if handle is None:
            return "not held"
        try:
            inner, said = await record.called("through a kept handle", handle.who)
        except ZcactorError as error:
            check_held(name, error)
            return type(error).__name__
        except TimeoutError:
            return "no end"
        check_name(name, said)
        return inner.outcome


def check_name(name: str, said: object) -> None:
    """Check that an actor gave its own name."""
    if said != name:
        records.current.break_("I3", f"an actor called {name} says that it is {said}")


def check_held(name: str, error: ZcactorError) -> None:
    """Check that no actor has ended for want of handles while its handle is held."""
    if isinstance(error, ActorDied) and DROPPED in str(error):
        records.current.break_("I10", f"{name} has ended though its handle is held: {error}")


class Handles:
    """A driver that has keepers on all nodes hold its handles. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "handles"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._keepers: list[Any] = []
        self._count = 0
        self._lasting: list[str] = []
        """Names of actors that outlive their handles."""

    async def prepare(self) -> None:
        """Spawn a keeper for each node, two at the least and eight at the most."""
        for number in range(min(max(self._scene.nodes, 2), 8)):
            name = f"k{number}"
            restarts = self._scene.rng.choice((0, -1))
            self._keepers.append(await Keeper.options(name=name, node="spread", max_restarts=restarts).spawn(name))

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._pass_around() for _ in range(2)))

    async def finish(self) -> None:
        """End the keepers, with all that they hold, and the actors that outlive their handles."""
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

    async def _one(self) -> None:
        """The life of one actor."""
        rng, record, ask = self._scene.rng, self._scene.record, self._scene.ask
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
        taken, _ = await ask("take", first.take, name, leaf)
        if rng.random() < 0.5:
            leaf = None  # the first keeper has the only handle
        if taken.outcome == "ok":
            await ask("call", first.call, name)
            if rng.random() < 0.5:
                _, given = await ask("give", first.give, name, rng.random() < 0.5)
                if given is not None:
                    await ask("take", second.take, name, given)
                    given = None
                    await ask("drop", first.drop, name)
                    await self._scene.pause(0.3)
                    _, said = await ask("call", second.call, name)
                    if said == "ok":
                        record.saw("a handle held by the third process that had it")
        if leaf is not None:
            operation, said = await ask("who", leaf.who)
            if operation.outcome == "ok":
                check_name(name, said)
        for keeper in (first, second):
            await ask("drop", keeper.drop, name)
