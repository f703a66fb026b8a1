"""What a step costs the head's process, by the size of the cluster: ``--capacity``."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from zcactor import ids
from zcactor.config import Config
from zcactor.simulation.cluster import Cluster
from zcactor.simulation.network import Network
from zcactor.simulation.trace import Trace
from zcactor.simulation.world import World

if TYPE_CHECKING:
    from zcactor.runtime.process import Process
    from zcactor.simulation.loop import SimLoop

__all__ = ["STEPS", "spawn"]

_SPAWNS: Final = 200
_WARM_UP: Final = 40
_NEVER: Final = 1e6
"""Virtual seconds between heartbeats: they cost the head what there are nodes, and are no part of a step."""
_PATIENCE: Final = 1e4


@zc.actor
class _Idle:
    """Does nothing."""


class _MeteredWorld(World):
    """A world that knows how long the turns of each process take, in CPU seconds of the thread."""

    def __init__(self) -> None:
        super().__init__(1, Trace())
        self.seconds: defaultdict[SimLoop, float] = defaultdict(float)

    def _turn(self, loop: SimLoop) -> None:
        before = time.thread_time()
        super()._turn(loop)
        self.seconds[loop] += time.thread_time() - before


def spawn(nodes: int) -> dict[str, Any]:
    """Spawn actors, one after another, spread over so many nodes.

    Returns:
        ``what``, ``nodes``, ``spawns``, and the microseconds of CPU that one took the head's process (``head_us``)
        and all processes (``all_us``).

    Raises:
        RuntimeError: the cluster has not formed, or the program had no end.
    """
    with ids.drawn_from(random.Random(1)):
        world = _MeteredWorld()
        settings = Config(loop="asyncio", num_cpus=64, warn_after=0, log_to_driver=False, store_capacity=4 << 20)
        cluster = Cluster(Network(world), settings, {"CPU": 64.0}, _NEVER, _NEVER)
        for number in range(nodes):
            cluster.start_agent(f"h{number}")
            if number == 0 and not world.run(lambda: cluster.joined == 1, limit=_PATIENCE):
                raise RuntimeError("the head has not started")
        if not world.run(lambda: cluster.joined == nodes, limit=_PATIENCE):
            raise RuntimeError(f"{cluster.joined} of {nodes} nodes have joined")
        marks: list[dict[SimLoop, float]] = []

        async def program(_: Process) -> None:
            actors: list[Any] = []
            for number in range(_WARM_UP + _SPAWNS):
                if number == _WARM_UP:
                    marks.append(world.seconds.copy())
                actors.append(await _Idle.options(node="spread", num_cpus=0).spawn())
            marks.append(world.seconds.copy())

        driver = cluster.start_driver("driver", "h0", program)
        world.run(lambda: driver.main is not None and driver.main.done(), limit=world.now + _PATIENCE)
        if driver.main is None or not driver.main.done():
            raise RuntimeError(f"{_SPAWNS} spawns had no end in {_PATIENCE:g} virtual s")
        driver.main.result()
        before, after = marks
        spent = {loop: seconds - before.get(loop, 0.0) for loop, seconds in after.items()}
        head = cluster.hosts["h0"].agent
        assert head is not None
        return {
            "what": "spawn", "nodes": nodes, "spawns": _SPAWNS, "head_us": round(spent[head] / _SPAWNS * 1e6, 1),
            "all_us": round(sum(spent.values()) / _SPAWNS * 1e6, 1),
        }  # fmt: skip


STEPS: Final = {"spawn": spawn}
"""What can be measured, by the names that the command line has for it."""
