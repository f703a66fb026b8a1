"""The log that simulated heads share: beside the suite of all logs, its silences and its losses."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

import pytest

from simulation.loop import SimLoop
from simulation.shared_log import MARGIN, TTL, SharedBook, SharedLog
from simulation.trace import Trace
from simulation.world import World
from tests.conformance.head_log import ONE, TWO, HeadLogTests, Make
from zcactor.control.head_log import Change, Deposed, LeaderAt, LogInUse, LogUnavailable, Term

A, B = Change("name", "a", b"1"), Change("name", "b", b"1")


class TestSharedLog(HeadLogTests):
    """The suite for `SharedLog`."""

    @pytest.fixture
    def make(self) -> Make:
        book = SharedBook(random.Random(0), lambda: asyncio.get_running_loop().time(), delay=0.001, loss=0.0)
        return lambda: SharedLog(book)


class Scene:
    """A world with a log, and processes with clocks of their own."""

    def __init__(self, seed: int, loss: float = 0.1) -> None:
        self.world = World(seed, Trace())
        self.book = SharedBook(self.world.random("log"), lambda: self.world.now, loss=loss)
        self.loops: list[SimLoop] = []

    def start(self, main: Callable[[SharedLog], object]) -> SimLoop:
        """Run a program in a process of its own."""

        async def run() -> None:
            await main(SharedLog(self.book))  # type: ignore[misc]

        self.loops.append(self.world.process("host", f"p{len(self.loops)}"))
        self.loops[-1].begin(run())
        return self.loops[-1]

    def run(self, until: Callable[[], bool], seconds: float = 1000.0) -> None:
        """Let time pass until a condition holds."""
        assert self.world.run(until, limit=self.world.now + seconds)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_head_that_is_gone(seed: int, how: str) -> None:
    scene = Scene(seed)
    done: list[int] = []
    terms: list[Term] = []
    found: list[set[str]] = []

    async def first(log: SharedLog) -> None:
        terms.append(await log.campaign(ONE))
        for number in range(1000):
            while True:
                try:
                    await log.record(terms[-1], [Change("name", f"{number}", b"x")])
                    break
                except Deposed:  # renewals were lost
                    terms.append(await log.campaign(ONE))
            done.append(number)

    async def second(log: SharedLog) -> None:
        term = await log.campaign(TWO)
        assert scene.world.now > one.moment(terms[-1].valid_until())
        assert term.epoch > terms[-1].epoch
        found.append(set((await log.load(term))["name"]))

    one = scene.start(first)
    scene.run(lambda: len(done) == 6)
    scene.start(second)
    if how == "killed":
        scene.world.end(one, "killed")
    else:
        scene.world.stop(one)
    scene.run(lambda: bool(found))
    assert {f"{number}" for number in done} <= found[0]
    assert not scene.world.problems


@pytest.mark.parametrize("seed", range(20))
def test_a_head_that_goes_on_after_another_led(seed: int) -> None:
    scene = Scene(seed, loss=0.0)
    seen: list[str] = []

    async def first(log: SharedLog) -> None:
        term = await log.campaign(ONE)
        await log.record(term, [A])
        seen.append("first")
        try:
            while True:
                await log.record(term, [A])
        except Deposed:
            seen.append("deposed")
        assert term.valid_until() < 0

    async def second(log: SharedLog) -> None:
        term = await log.campaign(TWO)
        await log.record(term, [Change("name", "a", None), B])
        seen.append("second")
        while "deposed" not in seen:
            await asyncio.sleep(1.0)
        assert await log.load(term) == {"name": {"b": b"1"}}
        seen.append("loaded")

    one = scene.start(first)
    scene.run(lambda: seen == ["first"])
    scene.start(second)
    scene.world.stop(one)
    scene.run(lambda: "second" in seen)
    scene.world.resume(one)
    scene.run(lambda: "loaded" in seen)
    assert not scene.world.problems


@pytest.mark.parametrize("seed", range(20))
def test_silence(seed: int) -> None:
    scene = Scene(seed, loss=0.0)
    seen: list[str] = []
    state: list[object] = []

    async def main(log: SharedLog) -> None:
        loop = asyncio.get_running_loop()
        term = await log.campaign(ONE)
        assert loop.time() < term.valid_until() <= loop.time() + TTL - MARGIN
        await log.record(term, [A])
        seen.append("ready")
        while not scene.book.silent():
            await asyncio.sleep(0.01)
        with pytest.raises(LogUnavailable):
            await log.record(term, [B])
        assert loop.time() > term.valid_until()
        seen.append("unavailable")
        with pytest.raises(LogUnavailable):
            await SharedLog(scene.book).campaign(TWO)
        seen.append("still")
        while scene.book.silent():
            await asyncio.sleep(0.01)
        try:
            state.append(await log.load(term))
            await asyncio.sleep(TTL)
            assert loop.time() < term.valid_until()
            seen.append("renewed")
        except Deposed:
            state.append(await log.load(await log.campaign(ONE)))
            seen.append("again")

    scene.start(main)
    scene.run(lambda: seen == ["ready"])
    scene.book.stop()
    scene.run(lambda: "still" in seen)
    scene.book.resume()
    scene.run(lambda: len(seen) == 4)
    assert state == [{"name": {"a": b"1"}}]
    assert not scene.world.problems


def test_followers_hear_of_all_that_lasts() -> None:
    scene = Scene(3)
    heard: list[LeaderAt | None] = []

    async def follow(log: SharedLog) -> None:
        async for leader in log.leaders():
            heard.append(leader)

    async def lead(log: SharedLog) -> None:
        await log.campaign(ONE)
        with pytest.raises(LogInUse):
            await log.campaign(ONE)
        while heard[-1] is None:
            await asyncio.sleep(1.0)
        await log.aclose()

    scene.start(follow)
    scene.run(lambda: heard == [None])
    scene.start(lead)
    scene.run(lambda: len(heard) == 3)
    assert heard == [None, LeaderAt(1, ONE.address), None]
    assert not scene.world.problems


def test_terms_that_last_as_long_as_the_process() -> None:
    scene = Scene(1, loss=0.0)
    scene.book.ttl = math.inf
    terms: list[Term] = []

    async def lead(log: SharedLog) -> None:
        terms.append(await log.campaign(ONE))
        await log.record(terms[-1], [A])

    first = scene.start(lead)
    scene.run(lambda: "name" in scene.book.state)
    scene.start(lead)
    assert not scene.world.run(lambda: len(terms) == 2, limit=scene.world.now + 10), "it waits"
    scene.book.stop()
    assert not scene.world.run(lambda: len(terms) == 2, limit=scene.world.now + 100), "no silence ends it"
    scene.book.resume()
    assert not scene.world.run(lambda: len(terms) == 2, limit=scene.world.now + 100)
    scene.world.end(first, "it was killed")
    scene.book.free()
    scene.run(lambda: len(terms) == 2)
    assert [term.epoch for term in terms] == [1, 2]
