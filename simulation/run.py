"""One run: a cluster forms, programs work under faults, all damage is repaired, and the rest is judged."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

from simulation import record as records
from simulation.cluster import Cluster
from simulation.failpoints import FailingLog
from simulation.faults import Faults
from simulation.invariants import Invariants
from simulation.loop import SimLoop
from simulation.network import Network
from simulation.record import Record
from simulation.schedule import TAKE_OVER
from simulation.shared_log import TTL, SharedBook
from simulation.trace import Trace
from simulation.workloads import WORKLOADS
from simulation.workloads.scene import Scene
from simulation.world import Overrun, World
from zcactor import ids
from zcactor.buggify import decided_by
from zcactor.control.head_watch import clocked_by
from zcactor.execution.failure import without_frames
from zcactor.marshal.arrays import known_codes, known_dtypes
from zcactor.objectstore.lease import Lease, RemoteLease

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from simulation.schedule import Fault, Schedule
    from simulation.workloads.scene import Workload
    from zcactor.assembly.process import Process

__all__ = ["Run", "set_apart"]

FORMING: Final = 60.0
"""Virtual seconds in which a cluster has formed."""
HEALING: Final = 60.0
"""Virtual seconds after the last repair in which every call has ended."""
ENDING: Final = 60.0
"""Virtual seconds in which every actor has ended."""
DISSOLVING: Final = 30.0
"""Virtual seconds in which a cluster without a head has ended: every node notices the loss, and ends its workers."""
RETURNING: Final = 2.0
"""Virtual seconds in which leases go back of which the garbage collector has taken the last holder."""
DELAYS: Final = (0.0, 0.001, 0.05)
"""Longest virtual seconds on the way to the heads' log and back, of which a run has one."""
LOSSES: Final = (0.0, 0.0, 0.05, 0.2)
"""Probabilities of a loss on either way, likewise."""
EVENTS: Final = 3_000
"""Events that a call may cost, and (in a second) a node: far more is a storm."""


def set_apart() -> None:
    """Exempt the present objects from garbage collections, so that they cost these nothing, until `gc.unfreeze` is
    called. A run does this itself unless it was done before; doing it once for many runs saves time."""
    gc.collect()
    gc.freeze()


def _loop_time() -> float:
    """The time of the simulated process that runs."""
    return asyncio.get_running_loop().time()


def _nothing(object_id: int, nbytes: int = 0) -> None:
    """The end of a lease that goes back to no process."""


def _cut_leases() -> None:
    """Part all leases from the sessions that they go back to, so that the processes of a run can be collected.

    The garbage collector does not look into NumPy's arrays. An actor that holds a received array when its process ends
    would keep, through the array's lease, the whole run: the next runs of this process of the system would be slower
    with each such run before them.
    """
    for each in gc.get_objects():
        if isinstance(each, Lease | RemoteLease):
            each._release = _nothing


class Run:
    """The player of one schedule.

    Args:
        schedule: the schedule.
        trace: the trace that gets the events; None for one of the run's own.
        more: ``make(scene)`` makes a further workload, beside those that the schedule names.
        healing: virtual seconds after the last repair in which every call has ended.
    """

    def __init__(
        self, schedule: Schedule, trace: Trace | None = None, more: Callable[[Scene], Workload] | None = None,
        healing: float = HEALING,
    ) -> None:  # fmt: skip
        self.schedule = schedule
        self._more = more
        self._healing = healing
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
        self._loss = 0.0
        self._go: asyncio.Future[None] | None = None
        self._driver: SimLoop | None = None
        self._nowhere = SimLoop(self.world, "nowhere", "garbage", 0.0, 1.0)
        self._nowhere.end()
        self.faults = Faults(self.cluster, self.record)
        if TAKE_OVER in schedule.workloads:
            drawn = self.world.random("log")
            ttl = self.world.random("leases").choice((math.inf, TTL))  # of a log in a file, and of one in etcd
            self.cluster.book = book = SharedBook(
                drawn, lambda: self.world.now, ttl=ttl, delay=drawn.choice(DELAYS), loss=drawn.choice(LOSSES)
            )
            self._loss = book.loss
            if book.ends_by_itself:
                book.loss = 0.0  # until the faults begin: no head steps down while the programs prepare their work
            self.cluster.make_log = lambda: FailingLog(book, self.faults.reached, self.faults.armed)

    def play(self) -> bool:
        """Play the run. Returns whether every invariant held."""
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
        """Separate the run from all outside of it, and leave nothing of it behind."""
        frozen = gc.get_freeze_count() > 0
        if frozen:
            gc.collect()  # the garbage of an earlier run
        else:
            set_apart()
        enabled = gc.isenabled()
        gc.disable()
        loggers = [logging.getLogger(name) for name in ("zcactor", "asyncio")]
        levels = [(logger.propagate, logger.level) for logger in loggers]
        for logger in loggers:
            logger.addHandler(self.invariants)
            logger.propagate = False
            logger.setLevel(logging.ERROR)
        records.current = self.record
        known_codes.clear()  # the native wire writes arrays of dtypes that are known, Python the others
        known_dtypes.clear()
        try:
            drawn = ids.drawn_from(self.world.random("ids"))
            with drawn, without_frames(), decided_by(self._unlikely), clocked_by(_loop_time):
                yield
        finally:
            for logger, (propagate, level) in zip(loggers, levels, strict=True):
                logger.removeHandler(self.invariants)
                logger.propagate = propagate
                logger.setLevel(level)
            del records.current
            _cut_leases()
            if not frozen:
                gc.unfreeze()
            if enabled:
                gc.enable()

    def _unlikely(self, place: str) -> bool:
        """Whether unlikely behaviour is chosen at a place, see `zcactor.buggify`. In half of the runs it never is."""
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
        host, faults = self._away_from_faults()
        self._driver = cluster.start_driver("driver", host, self._program)
        if not self._until("work", FORMING):
            return
        begun = world.now
        if cluster.book is not None:
            cluster.book.loss = self._loss
        self.faults.arm(faults)
        self._collect()
        world.run(limit=begun + schedule.duration)
        self.faults.heal()
        if not self._until("rest", self._healing):
            for operation in record.open[:10]:
                what = record.name(operation)
                record.break_(
                    "I1", f"{what}, begun at {operation.begun:.3f}, has not ended {self._healing:g} s after healing"
                )
            return
        self._sweep()
        if self.faults.beheaded:
            world.run(limit=world.now + DISSOLVING)
            self.invariants.without_head()
            record.judge()
            return
        world.run(limit=world.now + 8.0)
        self._sweep()  # errors that programs got since then have frames in which their references are
        world.run(limit=world.now + RETURNING)
        self.invariants.at_rest(ended=False)
        if self._go is not None:
            self._go.set_result(None)
        if not self._until("end", ENDING):
            return
        self._sweep()
        world.run(limit=world.now + 8.0)
        self._sweep()
        self.invariants.at_rest(ended=True)
        record.judge()
        bound = EVENTS * (len(record.operations) + 100 + schedule.nodes * int(world.now + 1))
        if world.events > bound and self._more is None:  # the calls of other programs are not recorded
            record.break_("I12", f"{world.events:,} events for {len(record.operations):,} calls")

    def _away_from_faults(self) -> tuple[str, tuple[Fault, ...]]:
        """The host of the program, and the faults. The program sees the end of the cluster from a host that stays on,
        and where there is none, the head's host stays on."""
        faults = self.schedule.faults
        if not any(fault.kind == "head" for fault in faults):
            return "h0", faults
        off = {host for fault in faults if fault.kind == "off" for host in fault.who}
        for number in range(1, self.schedule.nodes):
            if f"h{number}" not in off:
                return f"h{number}", faults
        return "h0", tuple(fault for fault in faults if fault.kind != "head")

    def _until(self, phase: str, patience: float) -> bool:
        """Let events happen until the program is in `phase`; False where it is not in time."""
        assert self._driver is not None
        if self._phase != phase:
            self.world.run(limit=self.world.now + patience)
        reached, task = self._phase == phase, self._driver.main
        if task is not None and task.done() and self._phase != phase:
            error = None if task.cancelled() else task.exception()
            lines = "" if error is None else "".join(traceback.format_exception(error))
            self.record.break_("I11", f"the program ended before it was to {phase}: {lines[-1500:]}")
            return False
        if not reached:
            self.record.break_("I10", f"the program has not come to {phase} within {patience:g} s")
        return reached

    def _sweep(self, generation: int = 2) -> None:
        """Collect garbage, ended processes included, whose pending steps hold all of their objects."""
        self.world.forget()
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._nowhere)  # destroyed frames of ended processes take steps, without effect
        try:
            gc.collect(generation)
        finally:
            asyncio._set_running_loop(before)

    def _collect(self) -> None:
        """Collect garbage, now and again: the process and the moment of it decide when leases end."""
        self._sweep(self._drawn.choice((0, 1, 2)))
        loop = self._driver
        assert loop is not None
        loop.at(self.world.now + self._drawn.expovariate(1 / 5), self._collect)

    async def _program(self, process: Process) -> None:
        """The program of the driver."""
        del process
        try:
            await self._work()
        finally:
            self.world.halt()

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self.world.halt()

    async def _work(self) -> None:
        schedule, made = self.schedule, []
        kinds: dict[str, Callable[[Scene], Workload]] = {name: WORKLOADS[name] for name in schedule.workloads}
        if self._more is not None:
            kinds["program"] = self._more
        for name, kind in kinds.items():
            scene = Scene(
                self.record, self.world.random(f"work/{name}"), schedule.nodes, schedule.duration, self.cluster
            )
            workload = kind(scene)
            made.append((scene, workload))
            await workload.prepare()
        for scene, _ in made:
            scene.end = self.world.now + schedule.duration
        self._enter("work")
        await asyncio.gather(*(workload.run() for _, workload in made))
        self._enter("rest")
        self._go = asyncio.get_running_loop().create_future()
        await self._go
        for _, workload in made:
            await workload.finish()
        made.clear()
        self._enter("end")
        await asyncio.get_running_loop().create_future()  # the process stays, with no objects of its own

    # ---------------------------------------------------------------- the result

    def line(self, commit: str) -> dict[str, Any]:
        """The result, in the types of the JSON line of a seed."""
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
