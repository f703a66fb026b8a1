"""Resources: requests exceed the resources, wait for other actors to end, and some are given up while they wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import zcactor as zc
from simulation import record as records
from zcactor.errors import InsufficientResources, ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Consumer", "Resources"]

NODE_CPUS = 64
"""CPUs of each node of a run, see `simulation.run.Run`."""
GPUS: tuple[float, ...] = ()
"""The numbers of GPUs that the actors ask for, one after the other. The nodes of most runs have none."""
PATIENCE = 200.0
"""Virtual seconds after which a request waits in vain: the run itself is over by then, and all that was in its way."""


@zc.actor
class Consumer:
    """An actor that holds resources while it lives."""

    def __init__(self, name: str) -> None:
        records.current.constructed(name)

    @zc.method
    async def work(self, number: int, seconds: float) -> int:
        """Return after a while."""
        records.current.ran(number, self)
        await asyncio.sleep(seconds)
        return number


class Resources:
    """Tasks of a driver that want more than the nodes have. See `simulation.workloads.scene.Workload`.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = "resources"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._count = 0

    async def prepare(self) -> None:
        """Do nothing: the tasks spawn their actors themselves."""

    async def run(self) -> None:
        """See `Workload.run`."""
        wanting = min(2 * self._scene.nodes, 16)
        await asyncio.gather(*(self._want() for _ in range(wanting)))

    async def finish(self) -> None:
        """Do nothing: the tasks have ended their actors."""

    async def _want(self) -> None:
        scene = self._scene
        while not scene.over:
            what = scene.rng.choice((self._use, self._use, self._use, self._give_up, self._want_too_much))
            try:
                await what()
            except ZcactorError as error:
                scene.record.saw(f"no worker: {type(error).__name__}")
            except TimeoutError:
                scene.record.break_("I9", f"a request has waited for {PATIENCE:g} s")
            await scene.pause(1.0)

    def _drawn(self) -> tuple[str, dict[str, Any]]:
        rng = self._scene.rng
        self._count += 1
        options: dict[str, Any] = {
            "num_cpus": rng.choice((8, 24, 33, 48, NODE_CPUS)),
            "node": rng.choice(("spread", "pack", None)),
        }
        if GPUS:
            options["num_gpus"] = GPUS[self._count % len(GPUS)]
        if rng.random() < 0.3:
            options["max_restarts"] = 1
        return f"u{self._count}", options

    async def _use(self) -> None:
        scene = self._scene
        name, options = self._drawn()
        asked = scene.record.world.now
        async with asyncio.timeout(PATIENCE):
            worker: Any = await Consumer.options(**options).spawn(name)
        if scene.record.world.now - asked > 1.0:
            scene.record.saw("a request waited")
        await scene.ask("work", worker.work, scene.rng.expovariate(1 / 2.5))
        if scene.rng.random() < 0.7:  # else its last handle is dropped
            await (zc.stop if scene.rng.random() < 0.5 else zc.kill)(worker)

    async def _give_up(self) -> None:
        scene = self._scene
        name, options = self._drawn()
        spawning = asyncio.ensure_future(Consumer.options(**options).spawn(name))
        await asyncio.wait([spawning], timeout=scene.rng.expovariate(1 / 0.5))
        if spawning.cancel():
            scene.record.saw("a spawn given up")
        try:
            await spawning
        except asyncio.CancelledError:
            return

    async def _want_too_much(self) -> None:
        name, options = self._drawn()
        try:
            await Consumer.options(**{**options, "num_cpus": NODE_CPUS + 1}).spawn(name)
        except InsufficientResources:
            return
        self._scene.record.break_("I9", f"{name} has more than any node has")
