"""The plugin for pytest of the simulation: ``pytest_plugins = ["simulation.plugin"]`` in a checkout of zcactor."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from simulation.programs import Result, SimulatedCluster, simulate
from zcactor.testing.leaks import Snapshot
from zcactor.testing.plugin import async_fixture, check_left

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import pytest

__all__ = ["zc_simulation"]


@async_fixture
async def zc_simulation(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Result]]:
    """A function that runs a program in a simulated cluster, in virtual time, under faults that a seed decides.

    ``zc_simulation(program, seed=1)`` returns a `Result` when the run is over. It is no coroutine, and works in tests
    with and without a loop.
    """
    before = Snapshot(asyncio.get_running_loop())
    repeat = f"python -m pytest '{request.node.nodeid}'"

    def run(
        program: Callable[[SimulatedCluster], Awaitable[Any]], *, seed: int, nodes: int = 6,
        faults: Sequence[Any] | None = None, workloads: Sequence[str] = (), **config: Any,
    ) -> Result:  # fmt: skip
        """Run ``program(cluster)`` in a driver of a simulated cluster.

        Faults happen while the program runs, for at most 30 virtual seconds; then all damage is repaired. Processes,
        hosts and the network are simulated, and the package's own code runs in them. After the run the invariants of
        `simulation` are checked: no call is lost or runs twice, and no lease and no byte of a store is left.

        Args:
            program: async function of one argument, the `SimulatedCluster`. It may use all of ``zc.*``, and no wall
                clock, thread or socket. It returns plain values: an array would be a lease that is left.
            seed: decides the order of events, delays, faults and settings.
            nodes: number of nodes, 1 to 4,096.
            faults: ``()`` for none, or `simulation.schedule.Fault` objects or mappings of their fields; None
                draws them by the seed.
            workloads: names of workloads of `simulation` that run beside the program.
            config: fields of `zcactor.Config`, in place of those that the seed draws.

        Returns:
            The result. The same seed, arguments and sources give the same `Result.digest`.

        Raises:
            AssertionError: an invariant was broken.
            Exception: the program raised it.
            TypeError, ValueError: an argument is wrong.

        The first two carry a note with the seed and the command that repeats the run.
        """
        return simulate(program, seed, nodes, faults, workloads, config, repeat)

    yield run
    await check_left(request, before)
