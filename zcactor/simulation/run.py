"""One run: a cluster forms, programs work while things go wrong, everything is repaired, and what is left is judged."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

from zcactor import ids
from zcactor.buggify import decided_by
from zcactor.runtime.failure import without_frames
from zcactor.simulation import record as records
from zcactor.simulation.cluster import Cluster
from zcactor.simulation.faults import Faults
from zcactor.simulation.invariants import Invariants
from zcactor.simulation.network import Network
from zcactor.simulation.record import Record
from zcactor.simulation.trace import Trace
from zcactor.simulation.workloads import WORKLOADS
from zcactor.simulation.workloads.scene import Scene
from zcactor.simulation.world import Overrun, World

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from zcactor.runtime.process import Process
    from zcactor.simulation.loop import SimLoop
    from zcactor.simulation.schedule import Schedule
    from zcactor.simulation.workloads.scene import Workload

__all__ = ["Run"]

FORMING: Final = 60.0
"""Virtual seconds in which a cluster has formed."""
HEALING: Final = 60.0
"""Virtual seconds after the last repair in which every call has ended."""
ENDING: Final = 60.0
"""Virtual seconds in which every actor has ended."""
EVENTS: Final = 3_000
"""Events that a call may cost, and (in a second) a node: far more is a storm."""


class Run:
    """Plays one schedule.

    Args:
        schedule: what happens.
        trace: is told of it; None for one of its own.
    """

    def __init__(self, schedule: Schedule, trace: Trace | None = None) -> None:
        self.schedule = schedule
        self.trace = trace or Trace()
        self.world = World(schedule.seed, self.trace)
        self.record = Record(self.world)
        self.network = Network(self.world)
        self.cluster = Cluster(self.network, schedule.config, {"CPU": 64.0}, native=schedule.wire == "native")
        self.record.apart = self.cluster.is_apart
        self.record.crash = self.cluster.crash
        self.invariants = Invariants(self.cluster, self.record)
        self.cpu = 0.0
        self._drawn = self.world.random("run")
        self._odds: dict[str, tuple[random.Random, float]] = {}
        self._phase = ""
        self._go: asyncio.Future[None] | None = None
        self._driver: SimLoop | None = None
        self.faults = Faults(self.cluster, self.record)

    def play(self) -> bool:
        """Let it happen. Whether every invariant held."""
        began = time.process_time()
        with self._alone():
            try:
                self._play()
            except Overrun as error:
                self.record.break_("I12", f"{error}: a run has no more than that")
            self.invariants.problems()
        self.cpu = time.process_time() - began
        return not self.record.broken

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing outside of the run has a part in it, and nothing is left of it afterwards."""
        gc.collect()
        frozen = gc.get_freeze_count() > 0
        if not frozen:
            gc.freeze()  # what was there before has no part in collections, and costs them nothing
        enabled = gc.isenabled()
        gc.disable()
        loggers = [logging.getLogger(name) for name in ("zcactor", "asyncio")]
        levels = [(logger.propagate, logger.level) for logger in loggers]
        for logger in loggers:
            logger.addHandler(self.invariants)
            logger.propagate = False
            logger.setLevel(logging.ERROR)
        records.current = self.record
        try:
            with ids.drawn_from(self.world.random("ids")), without_frames(), decided_by(self._unlikely):
                yield
        finally:
            for logger, (propagate, level) in zip(loggers, levels, strict=True):
                logger.removeHandler(self.invariants)
                logger.propagate = propagate
                logger.setLevel(level)
            del records.current
            if not frozen:
                gc.unfreeze()
            if enabled:
                gc.enable()

    def _unlikely(self, place: str) -> bool:
        """Whether the unlikely is done at a place, see `zcactor.buggify`. In half of the runs it never is."""
        if place not in self._odds:
            drawn = self.world.random(f"buggify/{place}")
            self._odds[place] = drawn, drawn.choice((0, 0, 0.05, 0.3))
        drawn, odds = self._odds[place]
        if drawn.random() >= odds:
            return False
        self.record.saw(f"unlikely: {place}")
        return True

    # ---------------------------------------------------------------- phases

    def _play(self) -> None:
        schedule, world, record, cluster = self.schedule, self.world, self.record, self.cluster
        cluster.start_agent("h0")
        if not world.run(lambda: cluster.joined == 1, limit=FORMING):
            record.break_("I10", "the head has not started")
            return
        for number in range(1, schedule.nodes):
            cluster.start_agent(f"h{number}")
        if not world.run(lambda: cluster.joined == schedule.nodes, limit=FORMING):
            record.break_("I10", f"{cluster.joined} of {schedule.nodes} nodes have joined in {FORMING:g} s")
            return
        self._driver = cluster.start_driver("driver", "h0", self._program)
        if not self._until("work", FORMING):
            return
        begun = world.now
        self.faults.arm(schedule.faults)
        self._collect()
        world.run(lambda: world.now >= begun + schedule.duration, limit=begun + schedule.duration)
        self.faults.heal()
        if not self._until("rest", HEALING):
            for operation in record.open[:10]:
                what = record.name(operation)
                record.break_(
                    "I1", f"{what}, begun at {operation.begun:.3f}, has not ended {HEALING:g} s after healing"
                )
            return
        gc.collect()
        world.run(lambda: False, limit=world.now + 8.0)
        self.invariants.at_rest(ended=False)
        if self._go is not None:
            self._go.set_result(None)
        if not self._until("end", ENDING):
            return
        gc.collect()
        world.run(lambda: False, limit=world.now + 8.0)
        gc.collect()
        self.invariants.at_rest(ended=True)
        record.judge()
        bound = EVENTS * (len(record.operations) + 100 + schedule.nodes * int(world.now + 1))
        if world.events > bound:
            record.break_("I12", f"{world.events:,} events for {len(record.operations):,} calls")

    def _until(self, phase: str, patience: float) -> bool:
        """Let things happen until the program is in `phase`; False where it is not in time."""
        main = self._driver
        assert main is not None

        def there() -> bool:
            return self._phase == phase or (main.main is not None and main.main.done())

        reached = self.world.run(there, limit=self.world.now + patience)
        task = main.main
        if task is not None and task.done() and self._phase != phase:
            error = None if task.cancelled() else task.exception()
            lines = "" if error is None else "".join(traceback.format_exception(error))
            self.record.break_("I11", f"the program ended before it was to {phase}: {lines[-1500:]}")
            return False
        if not reached:
            self.record.break_("I10", f"the program has not come to {phase} within {patience:g} s")
        return reached

    def _collect(self) -> None:
        """Collect garbage, now and again: which process does, and when, decides when leases end."""
        gc.collect(self._drawn.choice((0, 1, 2)))
        loop = self._driver
        assert loop is not None
        loop.at(self.world.now + self._drawn.expovariate(1 / 5), self._collect)

    async def _program(self, process: Process) -> None:
        """What the driver does."""
        del process
        schedule, made = self.schedule, []
        for name in schedule.workloads:
            scene = Scene(
                self.record, self.world.random(f"work/{name}"), schedule.nodes, schedule.duration, self.cluster
            )
            workload: Workload = WORKLOADS[name](scene)
            made.append((scene, workload))
            await workload.prepare()
        for scene, _ in made:
            scene.end = self.world.now + schedule.duration
        self._phase = "work"
        await asyncio.gather(*(workload.run() for _, workload in made))
        self._phase = "rest"
        self._go = asyncio.get_running_loop().create_future()
        await self._go
        for _, workload in made:
            await workload.finish()
        made.clear()
        self._phase = "end"
        await asyncio.get_running_loop().create_future()  # the process stays, with nothing of its own

    # ---------------------------------------------------------------- what came of it

    def line(self, commit: str) -> dict[str, Any]:
        """As the JSON line of a seed has it."""
        schedule, record, world = self.schedule, self.record, self.world
        return {
            "seed": schedule.seed, "nodes": schedule.nodes, "ok": not record.broken, "digest": self.trace.digest,
            "events": world.events, "messages": self.network.frames, "calls": len(record.operations),
            "virtual_s": round(world.now, 6), "cpu_s": round(self.cpu, 3), "commit": commit,
            "config": {**schedule.settings, "wire": schedule.wire}, "outcomes": dict(sorted(record.outcomes.items())),
            "sometimes": dict(sorted(record.sometimes.items())),
            "faults": [fault.plain() for fault in schedule.faults],
            "broken": [broken.plain() for broken in record.broken],
        }  # fmt: skip
