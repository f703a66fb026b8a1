"""Processes allocate, fill, copy, pass, pass on and drop arrays on two GPUs, and die, beside a model of the bytes.

One of them sees one GPU only. Streams are late, by a seed. The test fails on a wrong byte anywhere, on a write to a
passed array, and on memory or leases that are not given back.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

import zcactor as zc
from tests.actors_gpu import Shelf

pytestmark = pytest.mark.slow

SIDES = {"a": None, "b": "1"}
"""The actors, and the GPUs that each sees."""
STEPS = 50
EXAMPLES = 3

names = st.sampled_from(sorted(SIDES))
numbers = st.integers(1, 255)  # fresh memory is zero, which would hide a missing wait
sizes = st.sampled_from([1, 1000, 70_000])
gpus = st.sampled_from(["cuda:0", "cuda:1"])


class Held:
    """An array that a process holds, and the bytes that it should have."""

    def __init__(self, array: Any, expected: Any, maker: str) -> None:
        self.array = array
        """The array, here, or None where it could not be had; its number on the shelf, in an actor."""
        self.expected = expected
        self.maker = maker
        """The side that computes it; empty for this process."""
        self.passed = False
        self.lost = False
        """Whether its maker died, perhaps before it was computed: it may raise `ObjectLost`."""


class World:
    """A runtime with its actors, for all examples."""

    def __init__(self, options: str) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.runtime = zc.init(config=zc.Config(gpu=f"fake:{options}"))
        self.run(self.runtime.__aenter__())
        self.actors: dict[str, Any] = {}
        for side in SIDES:
            self.spawn(side)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something on the runtime's loop."""

        async def awaited() -> Any:
            return await awaitable

        return self.runner.run(awaited())

    def spawn(self, side: str) -> None:
        """Start the actor of a side."""
        visible = SIDES[side]
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        self.actors[side] = self.run(Shelf.options(env=env).spawn())

    def close(self) -> None:
        """End the runtime."""
        self.actors.clear()
        self.run(self.runtime.__aexit__(None, None, None))
        self.runner.close()


class Machine(RuleBasedStateMachine):
    """The steps."""

    world: ClassVar[World]
    here = Bundle("here")
    there = Bundle("there")

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Begin without an array. `drawn` begins here, as hypothesis makes no machine outside of its own runs."""
        self.shelves: dict[str, dict[int, Held]] = {side: {} for side in SIDES}
        self.arrays: list[Held] = []
        self.number = 0

    def ask(self, side: str, method: str, *args: Any) -> Any:
        """Call a method of the actor of a side."""
        return self.world.run(getattr(self.world.actors[side], method)(*args))

    def add(self, array: Any, expected: Any, maker: str = "") -> Held:
        """Note an array of this process."""
        held = Held(array, expected, maker)
        self.arrays.append(held)
        return held

    def place(self, side: str) -> tuple[str, int]:
        """The next place on the shelf of an actor. It stays empty where an array could not be had."""
        self.number += 1
        return side, self.number

    def shelve(self, place: tuple[str, int], source: Held) -> None:
        """Note an array that an actor has at a place."""
        held = Held(place[1], source.expected, source.maker)
        held.passed, held.lost = True, source.lost
        self.shelves[place[0]][place[1]] = held

    def on_shelf(self, place: tuple[str, int]) -> Held | None:
        """An array of an actor; None where that was killed since."""
        return self.shelves[place[0]].get(place[1])

    # ---- steps

    @rule(target=here, gpu=gpus, size=sizes, value=numbers, late=st.booleans())
    def allocate(self, gpu: str, size: int, value: int, late: bool) -> Any:
        x = zc.empty(size, "u1", device=gpu)
        if late:
            with zc.gpu.stream(gpu):
                x.fill(value)
        else:
            x.fill(value)
        return self.add(x, np.full(size, value, "u1"))

    @rule(held=here, value=numbers, start=st.integers(0, 500))
    def fill(self, held: Held, value: int, start: int) -> None:
        if held.array is None:
            return
        part = held.array[start:]
        if held.passed:
            with pytest.raises(ValueError, match="read-only"):
                part.fill(value)
            return
        part.fill(value)
        held.expected = held.expected.copy()
        held.expected[start:] = value
        if not start:  # nothing depends on the maker any more
            held.lost, held.maker = False, ""

    @rule(target=here, held=here, gpu=gpus, stream=st.booleans())
    def copy(self, held: Held, gpu: str, stream: bool) -> Any:
        if held.array is None:
            return held
        made: Any = zc.empty(held.expected.shape, "u1", device=gpu)
        try:
            if stream:
                with zc.gpu.stream(gpu):
                    made.copy_from(held.array)
            else:
                made.copy_from(held.array)
        except zc.ObjectLost:
            assert held.lost
            made = None
        added = self.add(made, held.expected, held.maker)
        added.lost = held.lost
        return added

    @rule(target=there, held=here, side=names)
    def give(self, held: Held, side: str) -> Any:
        place = self.place(side)
        if held.array is None:
            return place
        held.passed = True
        try:
            self.ask(side, "keep_as", place[1], held.array)
        except zc.ObjectLost:
            assert held.lost
        else:
            self.shelve(place, held)
        return place

    @rule(target=there, place=there, side=names)
    def give_on(self, place: tuple[str, int], side: str) -> Any:
        held, new = self.on_shelf(place), self.place(side)
        if held is None:
            return new
        try:
            self.ask(place[0], "give", place[1], self.world.actors[side], new[1])
        except zc.ObjectLost:
            assert held.lost
        else:
            self.shelve(new, held)
        return new

    @rule(target=here, place=there)
    def take(self, place: tuple[str, int]) -> Any:
        held = self.on_shelf(place)
        if held is None:
            return self.add(None, np.zeros(0, "u1"))
        try:
            x = self.ask(place[0], "get", place[1])
        except zc.ObjectLost:
            assert held.lost
            x = None
        added = self.add(x, held.expected, held.maker)
        added.passed, added.lost = True, held.lost
        return added

    @rule(target=there, side=names, size=sizes, value=numbers)
    def make(self, side: str, size: int, value: int) -> Any:
        place = self.place(side)
        self.ask(side, "make", place[1], size, value)
        self.shelve(place, Held(0, np.full(size, value, "u1"), side))
        return place

    @rule(held=here)
    def look(self, held: Held) -> None:
        if held.array is None:
            return
        try:
            seen = zc.gpu.to_host(held.array)
        except zc.ObjectLost:
            assert held.lost
            return
        assert np.array_equal(seen, held.expected)

    @rule(place=there)
    def look_there(self, place: tuple[str, int]) -> None:
        held = self.on_shelf(place)
        if held is None:
            return
        try:
            seen = self.ask(place[0], "look", place[1])
        except zc.ObjectLost:
            assert held.lost
            return
        assert np.array_equal(seen, held.expected)

    @rule(held=consumes(here))
    def drop(self, held: Held) -> None:
        if held in self.arrays:
            self.arrays.remove(held)
        held.array = None

    @rule(place=consumes(there))
    def drop_there(self, place: tuple[str, int]) -> None:
        if self.shelves[place[0]].pop(place[1], None) is not None:
            self.ask(place[0], "drop", place[1])

    @rule(side=names, computed=st.booleans(), really=st.sampled_from([True, False, False, False]))
    def kill(self, side: str, computed: bool, really: bool) -> None:
        """Kill an actor now and then, as its successor takes a second to start: before or after all arrays that it
        makes, or that were copied of these, are computed."""
        if not really:
            return
        everywhere = [*self.arrays, *(held for shelf in self.shelves.values() for held in shelf.values())]
        made = [held for held in everywhere if held.maker == side]
        if computed:
            for held in self.arrays:
                if held.maker == side:
                    self.look(held)
            for other, shelf in self.shelves.items():
                for number, held in shelf.items():
                    if held.maker == side:
                        self.look_there((other, number))
        else:
            for held in made:
                held.lost = True
        self.world.run(zc.kill(self.world.actors[side]))
        self.shelves[side].clear()
        self.world.spawn(side)

    # ---- the end

    def teardown(self) -> None:
        for side, shelf in self.shelves.items():
            for number in shelf:
                self.look_there((side, number))
        for held in self.arrays:
            self.look(held)
            held.array = None
        self.arrays.clear()
        for side in SIDES:
            self.ask(side, "clear")
        gc.collect()

        async def is_left() -> bool:
            stats = [zc.stats(), *[await actor.stats() for actor in self.world.actors.values()]]
            return any(each.device_used or each.device_leases for each in stats)

        async def settled() -> None:
            end = asyncio.get_running_loop().time() + 60
            while await is_left():
                assert asyncio.get_running_loop().time() < end, "something was not given back"

        self.world.run(settled())


@pytest.mark.parametrize(
    "options",
    ["devices=2,late=3,seed=1", "devices=2,late=3,seed=2,peer=none", "devices=2,late=9,seed=3,refuse=0.2"],
)
def test_bytes_are_as_in_the_model(options: str) -> None:
    """Every byte is as in the model, and nothing is left."""
    Machine.world = World(options)
    try:
        case: Callable[[], Any] = Machine.TestCase
        case.settings = settings(  # type: ignore[attr-defined]
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=[Phase.generate],  # to look for a shorter failure would take minutes
            suppress_health_check=list(HealthCheck),
        )
        case().runTest()
    finally:
        Machine.world.close()
