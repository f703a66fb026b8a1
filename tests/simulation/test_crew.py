"""The stand-in for threads in a simulated process."""

from __future__ import annotations

from simulation.cluster import WAKING, LoopCrew
from simulation.trace import Trace
from simulation.world import World


def test_functions_run_later_on_the_loop() -> None:
    world = World(1, Trace())
    loop = world.process("h0", "a")
    crew = LoopCrew(loop)
    ran: list[float] = []
    crew.submit(lambda: ran.append(world.now))
    assert not ran
    world.run(lambda: False, limit=1)
    assert len(ran) == 1
    assert WAKING[0] <= ran[0] <= WAKING[1]
    world.end(loop, "killed")
    crew.submit(lambda: ran.append(world.now))
    world.run(lambda: False, limit=2)
    assert len(ran) == 1
    crew.close()
