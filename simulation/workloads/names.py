"""Names: several tasks at once spawn an actor of one name, look it up, end it, and spawn it anew."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from simulation import record as records
from zcactor.errors import NameTaken, NoSuchActor, ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Names", "Single"]


@zc.actor
class Single:
    """An actor that lives once under its name."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)
        self.name = name

    @zc.method
    async def who(self, number: int) -> str:
        """The actor's name."""
        records.current.ran(number, self)
        return self.name


class Names:
    """Tasks of a driver that want the same names. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "names"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._names = [f"n{number}" for number in range(3)]

    async def prepare(self) -> None:
        """Do nothing: the tasks spawn their actors themselves."""

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._want() for _ in range(4)))

    async def _want(self) -> None:
        scene = self._scene
        while not scene.over:
            name = scene.rng.choice(self._names)
            what = scene.rng.choice((self._get_or_spawn, self._get_or_spawn, self._spawn, self._look_up, self._end))
            try:
                await what(name)
            except (NameTaken, NoSuchActor) as error:
                scene.record.saw(type(error).__name__)
            except ZcactorError:
                scene.record.saw("no actor of a name")
            await scene.pause(0.3)

    async def _call(self, name: str, handle: Any) -> None:
        operation, said = await self._scene.ask("who", handle.who)
        if operation.outcome == "ok" and said != name:
            self._scene.record.break_("I3", f"an actor called {name} says that it is {said}")

    async def _get_or_spawn(self, name: str) -> None:
        options: dict[str, Any] = {
            "name": name,
            "get_if_exists": True,
            "node": self._scene.rng.choice(("spread", "pack", None)),
        }
        await self._call(name, await Single.options(**options).spawn(name))

    async def _spawn(self, name: str) -> None:
        lives = self._scene.record.lives(name)
        try:
            handle = await Single.options(name=name, node="spread").spawn(name)
        except NameTaken:
            if not self._scene.record.lives(name) and not lives:
                self._scene.record.saw("name taken by an actor that is not constructed yet")
            raise
        await self._call(name, handle)

    async def _look_up(self, name: str) -> None:
        await self._call(name, await zc.get_actor(name))

    async def _end(self, name: str) -> None:
        await (zc.kill if self._scene.rng.random() < 0.5 else zc.stop)(await zc.get_actor(name))

    async def finish(self) -> None:
        """End the remaining actors."""
        for name in self._names:
            try:
                await zc.kill(await zc.get_actor(name))
            except NoSuchActor:
                continue
