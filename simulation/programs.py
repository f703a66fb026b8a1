"""A test's program in a simulated cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from simulation.run import Run
from simulation.schedule import Fault, Schedule, check_schedule, draw
from simulation.workloads import WORKLOADS
from zcactor.api.actor import ActorOptions
from zcactor.errors import ZcactorError
from zcactor.ids import ActorId
from zcactor.options import check_options
from zcactor.process.cluster import HeadService
from zcactor.process.context import current

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from simulation.record import Broken
    from simulation.workloads.scene import Scene

__all__ = ["Result", "SimulatedCluster", "simulate"]

DURATION: Final = 30.0
"""Virtual seconds in which faults happen."""
PATIENCE: Final = 3_600.0
"""Virtual seconds after the last repair in which a program has to end."""


class SimulatedCluster:
    """The cluster, as the program of a test sees it.

    Args:
        scene: of the run.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning of the run."""
        return self._scene.record.world.now

    async def spawn(self, cls: Any, /, *args: Any, **options: Any) -> Any:
        """Start an actor on a node of the cluster.

        Args:
            cls: the class.
            args: of its constructor.
            options: of the actor, as for `zcactor.Actor.options`.

        Returns:
            A handle. Raises as `zcactor.spawn`, and `TypeError` for an unknown option.
        """
        check_options("spawn", f"{cls.__name__}.options", options)
        return await ActorOptions(cls, options).spawn(*args)


@dataclass(frozen=True)
class Result:
    """The result of a simulated run in which no invariant was broken.

    Attributes:
        ok: True: a broken invariant is raised as an error.
        digest: 16 hexadecimal digits over all events: the same seed, arguments and sources give the same digest.
        value: the result of the program.
        broken: the broken invariants: none.
        faults: the faults that happened, in order of time.
        events: number of callbacks that ran, of all processes.
        virtual_s: virtual seconds that the run took.
    """

    ok: bool
    digest: str
    value: Any
    broken: tuple[Broken, ...]
    faults: tuple[Fault, ...]
    events: int
    virtual_s: float


class _Program:
    """The program as a workload of a run."""

    name: ClassVar[str] = "program"

    def __init__(self, scene: Scene, program: Callable[[SimulatedCluster], Awaitable[Any]]) -> None:
        self._cluster = SimulatedCluster(scene)
        self._program = program
        self.value: Any = None
        self.error: Exception | None = None

    async def prepare(self) -> None:
        """Do nothing: the program makes its actors by itself."""

    async def run(self) -> None:
        """Run the program. Its error is raised when the run is over, so that the cluster ends in order."""
        try:
            self.value = await self._program(self._cluster)
        except Exception as error:  # a test may raise anything, and gets it back
            self.error = error

    async def finish(self) -> None:
        """Stop the actors that are left: named and detached ones do not end with their handles."""
        head = current().head
        for actor in await head.ask(HeadService.actors):
            if actor["state"] != "dead":
                with contextlib.suppress(ZcactorError):  # it has ended meanwhile
                    await head.ask(HeadService.stop, ActorId(bytes.fromhex(actor["actor_id"])))


def simulate(
    program: Callable[[SimulatedCluster], Awaitable[Any]], seed: int, nodes: int, faults: Sequence[Any] | None,
    workloads: Sequence[str], config: Mapping[str, Any], repeat: str,
) -> Result:  # fmt: skip
    """Run a program in a simulated cluster; see the fixture `zc_simulation`.

    Args:
        repeat: the command that repeats the run.
    """
    check_schedule(Schedule(seed, nodes, DURATION, tuple(workloads), {}), tuple(WORKLOADS))
    drawn = draw(seed, nodes, DURATION, tuple(workloads) or ("calls",), tuple(WORKLOADS))
    given = drawn.faults if faults is None else tuple(map(_fault, faults))
    schedule = replace(
        drawn, workloads=tuple(workloads), settings={**drawn.settings, **config},
        faults=tuple(sorted(given, key=lambda fault: fault.at)),
    )  # fmt: skip
    check_schedule(schedule, tuple(WORKLOADS))
    made: list[_Program] = []

    def workload(scene: Scene) -> _Program:
        made.append(_Program(scene, program))
        return made[0]

    run = Run(schedule, more=workload, healing=PATIENCE)
    ok = run.play()
    note = f"simulated with seed {seed}; repeat it by: {repeat}"
    if made and made[0].error is not None:
        made[0].error.add_note(note)
        raise made[0].error
    broken = tuple(run.record.broken)
    if not ok:
        lines = "\n".join(f"{each.invariant} at virtual second {each.at:.3f}: {each.text}" for each in broken)
        error = AssertionError(f"{len(broken)} broken invariants:\n{lines}")
        error.add_note(note)
        raise error
    return Result(
        ok, run.trace.digest, made[0].value, broken, schedule.faults, run.world.events, round(run.world.now, 6)
    )


def _fault(given: Any) -> Fault:
    if isinstance(given, Fault):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"zc_simulation: a fault is a Fault or a mapping of its fields, not {given!r}")
    return Fault(**{**given, "who": tuple(given.get("who", ()))})
