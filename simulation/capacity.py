"""The cost of a step to the head's process, by the size of the cluster: ``--capacity``."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from simulation.cluster import Cluster
from simulation.network import Network
from simulation.trace import Trace
from simulation.world import World
from zcactor import ids
from zcactor.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simulation.loop import SimLoop
    from zcactor.assembly.process import Process

__all__ = ["STEPS", "measure", "spawn"]

_SPAWNS: Final = 200
_WARM_UP: Final = 40
_SHARE: Final = 20
"""Spawns of one average; the least of these averages counts, as other programs disturb some."""
_NEVER: Final = 1e6
"""Virtual seconds between heartbeats: their cost to the head grows with the number of nodes, and is no part of a
step."""
_PATIENCE: Final = 1e4
_ROUNDS: Final = 3
"""Measurements of each size, in turns; the least of them counts."""


@zc.actor
class _Idle:
    """An actor that does nothing."""


class _MeteredWorld(World):
    """A world that measures the turns of each process, in CPU seconds of the thread."""

    def __init__(self) -> None:
        super().__init__(1, Trace())
        self.seconds: defaultdict[SimLoop, float] = defaultdict(float)

    def _turn(self, loop: SimLoop) -> None:
        before = time.thread_time()
        super()._turn(loop)
        self.seconds[loop] += time.thread_time() - before


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Switch garbage collection off: it would look at the objects of all processes in the turns of one."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def spawn(nodes: int) -> dict[str, Any]:
    """Spawn actors, one after another, spread over so many nodes.

    Returns:
        ``what``, ``nodes``, ``spawns``, and the microseconds of CPU of one spawn in the head's process (``head_us``)
        and in all processes (``all_us``): the least of ten averages.

    Raises:
        RuntimeError: the cluster has not formed, or the program did not end.
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
                if number >= _WARM_UP and number % _SHARE == 0:
                    marks.append(world.seconds.copy())
                actors.append(await _Idle.options(node="spread", num_cpus=0).spawn())
            marks.append(world.seconds.copy())

        driver = cluster.start_driver("driver", "h0", program)
        with _without_collections():
            world.run(lambda: driver.main is not None and driver.main.done(), limit=world.now + _PATIENCE)
        if driver.main is None or not driver.main.done():
            raise RuntimeError(f"{_SPAWNS} spawns had no end in {_PATIENCE:g} virtual s")
        driver.main.result()
        head = cluster.hosts["h0"].agent
        assert head is not None
        of_head = [after[head] - before[head] for before, after in pairwise(marks)]
        of_all = [sum(after.values()) - sum(before.values()) for before, after in pairwise(marks)]
        return {
            "what": "spawn", "nodes": nodes, "spawns": _SPAWNS, "head_us": round(min(of_head) / _SHARE * 1e6, 1),
            "all_us": round(min(of_all) / _SHARE * 1e6, 1),
        }  # fmt: skip


_COSTS: Final = ("head_us", "all_us")
STEPS: Final = {"spawn": spawn}
"""The measured steps, by their names on the command line."""


def measure(what: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The cost of a step in clusters of so many nodes, a line for each size; see `spawn`.

    Args:
        what: one of `STEPS`.
        sizes: numbers of nodes.

    Raises:
        RuntimeError: as for the step.
    """
    least: list[dict[str, Any]] = [{} for _ in sizes]
    for _ in range(_ROUNDS):
        for at, nodes in enumerate(sizes):
            line = STEPS[what](nodes)
            least[at] = {**line, **{key: min(line[key], least[at].get(key, line[key])) for key in _COSTS}}
    return least
