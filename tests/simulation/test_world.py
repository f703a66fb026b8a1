"""Virtual time, the order of events, and the processes that live."""

from __future__ import annotations

import asyncio

import pytest

from simulation.loop import SimLoop
from simulation.trace import Trace
from simulation.world import Overrun, World


def played(seed: int) -> tuple[list[tuple[str, int]], str]:
    """The notes of three processes, and the digest."""
    world = World(seed, Trace())
    noted: list[tuple[str, int]] = []

    async def main(name: str) -> None:
        for number in range(5):
            noted.append((name, number))
            world.note(name, "step", number=number)
            await asyncio.sleep(0 if number % 2 else 0.001)

    for name in "abc":
        world.process("h0", name).begin(main(name))
    assert not world.run(lambda: False, limit=10)
    return noted, world.trace.digest


def test_one_seed_is_one_order_and_each_process_keeps_its_own() -> None:
    assert played(1) == played(1)
    assert len({played(seed)[1] for seed in range(20)}) == 20
    noted, _ = played(3)
    for name in "abc":
        assert [number for other, number in noted if other == name] == [0, 1, 2, 3, 4]


def test_time_is_virtual_and_each_clock_runs_by_itself() -> None:
    world = World(1, Trace())
    loops = [world.process("h0", name) for name in "ab"]
    read: list[tuple[float, float]] = []

    async def main(loop: SimLoop) -> None:
        before = loop.time()
        await asyncio.sleep(1000)
        read.append((loop.time() - before, loop.rate))

    for loop in loops:
        loop.begin(main(loop))
    world.run(lambda: len(read) == 2, limit=2000)
    assert loops[0].time() != loops[1].time()
    for passed, rate in read:
        assert passed == pytest.approx(1000, abs=1e-6)
        assert abs(rate - 1) <= 200e-6
    assert 999 < world.now < 1001


def test_a_killed_process_takes_no_further_step_and_a_stopped_one_none_until_it_goes_on() -> None:
    world = World(1, Trace())
    steps = {"killed": 0, "stopped": 0}

    async def main(name: str) -> None:
        while True:
            steps[name] += 1
            await asyncio.sleep(0.1)

    loops = {name: world.process("h0", name) for name in steps}
    for name, loop in loops.items():
        loop.begin(main(name))
    world.run(lambda: steps["killed"] == 3 and steps["stopped"] == 3, limit=10)
    world.end(loops["killed"], "SIGKILL")
    world.stop(loops["stopped"])
    world.run(lambda: False, limit=5)
    assert steps == {"killed": 3, "stopped": 3}
    assert "killed" not in world.loops
    world.resume(loops["stopped"])
    loop = world.process("h0", "clock")
    loop.at(6, lambda: None)
    world.run(lambda: False, limit=6)
    assert steps["killed"] == 3
    assert steps["stopped"] > 3


def test_what_nobody_catches_is_told() -> None:
    world = World(1, Trace())
    loop = world.process("h0", "a")

    def fails() -> None:
        raise KeyError("nobody")

    loop.call_soon(fails)
    world.run(lambda: False, limit=1)
    ((at, text),) = world.problems
    assert at == 0.0
    assert "a@h0" in text and "KeyError('nobody')" in text


def test_a_storm_ends() -> None:
    world = World(1, Trace(), limit=1000)
    loop = world.process("h0", "a")

    def again() -> None:
        loop.call_soon(again)

    again()
    with pytest.raises(Overrun):
        world.run(lambda: False, limit=1)


def test_a_clock_that_jumps_ahead_takes_its_timers_along() -> None:
    world, seen = World(1, Trace()), []
    one, other = world.process("h0", "one"), world.process("h0", "other")
    for loop in (one, other):
        loop.call_later(5.0, lambda loop=loop: seen.append((loop.name, world.now)))
    one.at(4.5, lambda: seen.append(("what the world decides", world.now)))
    world.run(lambda: False, limit=1.0)
    before = one.time(), other.time()
    world.leap(one, 10.0)
    assert one.time() == before[0] + 10
    assert other.time() == before[1]
    world.run(lambda: False, limit=10.0)
    assert [name for name, _ in seen] == ["one", "what the world decides", "other"]
    assert seen[0][1] < 1.1
    assert seen[2][1] > 4.9
