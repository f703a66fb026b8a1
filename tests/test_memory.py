"""Arrays passed, held, sliced, moved and dropped while holders end, crash and lose connections, against a model.

Every reader looks at all of its bytes after each step. Draws are seeded: ``--rounds N`` runs N times as many of them,
and a failure names the seed and the steps that led to it.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

import zcactor as zc
from tests.memory_holders import Holder, Model, Root, Slot, pattern

PARTS, DRAWS = 5, 50
"""Tests of each loop, and draws of each test."""
RUNTIME = 25
"""Draws until the next runtime begins, in which the driver still holds what the last of them has left."""
STEPS = 14
ENDS, CUTS = 0.04, 0.003
"""Of all steps. After a cut callers wait for two seconds, until the node agent says that the actor lives."""
ACTORS = ("a", "b", "c")
LENGTHS = (4096, 8192, 12_000, 100_000, 400_000)
"""Elements: above the eager limit of 16 KiB, below and above what NumPy's own arrays need to lie in the store, and more
than a huge page."""
LEAST_NBYTES = 32 << 10
"""Bytes that an array has to have to be passed here; what rides in frames is another array at its receiver."""
WAYS = ("store", "numpy", "malloc", "reshaped", "subclass")


class Scene:
    """One runtime's holders, and what they have to see."""

    def __init__(self, seed: int, driver: Holder, actors: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.model = Model({"driver": {}})
        self.driver = driver
        self.actors = actors
        self.steps: list[str] = []
        self.names = 0

    async def spawn(self, name: str) -> None:
        """Have an actor of that name, without arrays."""
        self.actors[name] = await zc.spawn(Holder)
        self.model.holders[name] = {}

    def new(self) -> str:
        """A name that no array has had."""
        self.names += 1
        return f"x{self.names}"

    async def at(self, holder: str, method: str, *arguments: Any) -> Any:
        """Run a method of a holder where it is."""
        if holder == "driver":
            result = getattr(self.driver, method)(*arguments)
            return await result if method in ("send", "move", "cut") else result
        return await getattr(self.actors[holder], method)(*arguments)

    def any_slot(self, least: int = 0) -> tuple[str, str] | None:
        """A holder and the name of an array of it, at least so many bytes large."""
        found = [
            (holder, name)
            for holder, slots in self.model.holders.items()
            for name, slot in slots.items()
            if slot.elements.nbytes >= least
        ]
        return self.random.choice(found) if found else None

    # ---- steps

    async def make(self) -> None:
        """A new array somewhere."""
        holder = self.random.choice(list(self.model.holders))
        name, value = self.new(), self.random.randrange(1 << 40)
        length, how = self.random.choice(LENGTHS), self.random.choice(WAYS)
        self.steps.append(f"make {holder}.{name} of {length}, {how}")
        await self.at(holder, "make", name, value, length, how)
        elements = pattern(value, length)
        self.model.holders[holder][name] = Slot(
            Root(subclass=how == "subclass"), elements.reshape(2, -1) if how == "reshaped" else elements
        )

    async def share(self) -> None:
        """An array goes to another holder, and both see the same from then on."""
        chosen = self.any_slot(LEAST_NBYTES)
        if chosen is None:
            return
        holder, name = chosen
        other = self.random.choice([one for one in self.model.holders if one != holder])
        new, slot = self.new(), self.model.holders[holder][name]
        self.steps.append(f"share {holder}.{name} as {other}.{new}")
        if other == "driver":
            self.driver.take(new, await self.actors[holder].give(name))
        else:
            await self.at(holder, "send", name, self.actors[other], new)
        slot.root.shared = slot.passed = True
        self.model.holders[other][new] = Slot(slot.root, slot.elements, passed=True)

    async def move(self) -> None:
        """An array is handed over, or that is refused because others see it."""
        chosen = self.any_slot(LEAST_NBYTES)
        if chosen is None:
            return
        holder, name = chosen
        slots = self.model.holders[holder]
        slot = slots[name]
        alone = sum(one.root is slot.root for one in slots.values()) == 1
        if slot.root.subclass or (not slot.root.shared and not alone):
            return  # `zc.move` takes arrays of NumPy's own class; what views of moved memory see is said nowhere
        other = self.random.choice([one for one in self.actors if one != holder])
        new = self.new()
        self.steps.append(f"move {holder}.{name} to {other}.{new}")
        moved = await self.at(holder, "move", name, self.actors[other], new)
        assert not moved if slot.passed else moved or slot.root.shared
        if moved:  # beside a part that was shared the receiver gets a copy, where it is not refused
            del slots[name]
            of_its_own = Root(slot.root.subclass), slot.elements.copy()
            self.model.holders[other][new] = Slot(*(of_its_own if slot.root.shared else (slot.root, slot.elements)))

    async def part(self) -> None:
        """A view of an array."""
        chosen = self.any_slot()
        if chosen is None:
            return
        holder, name = chosen
        slot, new = self.model.holders[holder][name], self.new()
        start, step = self.random.randrange(3), self.random.choice((1, 1, 2, 5))
        self.steps.append(f"part {holder}.{name}[..., {start}::{step}] as {new}")
        await self.at(holder, "part", name, new, start, step)
        view = Slot(slot.root, slot.elements[..., start::step], passed=slot.passed)
        self.model.holders[holder][new] = view

    async def write(self) -> None:
        """A write, which is refused where the array was passed."""
        chosen = self.any_slot()
        if chosen is None:
            return
        holder, name = chosen
        slot, value = self.model.holders[holder][name], self.random.randrange(1, 100)
        if slot.root.shared and not slot.passed:
            return  # a view that was taken before the sharing keeps its own flag
        self.steps.append(f"write {holder}.{name} += {value}")
        written = await self.at(holder, "write", name, value)
        assert written == (not slot.root.shared)
        if written:
            slot.elements += value

    async def drop(self) -> None:
        """An array is let go."""
        chosen = self.any_slot()
        if chosen is None:
            return
        holder, name = chosen
        self.steps.append(f"drop {holder}.{name}")
        await self.at(holder, "drop", name)
        del self.model.holders[holder][name]

    async def fill(self) -> None:
        """Whatever memory is free is written to."""
        holder = self.random.choice(list(self.model.holders))
        length = self.random.choice(LENGTHS)
        self.steps.append(f"fill {holder} by {length}")
        await self.at(holder, "fill", length, 6)

    async def end(self) -> None:
        """An actor ends, in order or not, and another takes its place."""
        name = self.random.choice(list(self.actors))
        way = self.random.choice((zc.stop, zc.kill))
        self.steps.append(f"{way.__name__} {name}")
        await way(self.actors.pop(name))
        await self.spawn(name)

    async def cut(self) -> None:
        """A connection ends though both processes live."""
        one, other = self.random.sample(list(self.model.holders), 2)
        if other == "driver":
            one, other = other, one
        self.steps.append(f"cut {one} from {other}")
        await self.at(one, "cut", self.actors[other])
        if one != "driver":
            for holder in (one, other):
                await self.driver.reach(self.actors[holder])
            await self.at(other, "reach", self.actors[one])

    async def check(self) -> None:
        """Every reader sees what it has to."""
        for holder in self.model.holders:
            assert await self.at(holder, "look") == self.model.expected(holder), holder

    async def run(self) -> None:
        """Draw steps and take them."""
        kinds = [self.make, self.make, self.share, self.share, self.share, self.move, self.part, self.write, self.drop]
        kinds += [self.drop, self.fill, self.fill]
        for _ in range(STEPS):
            drawn = self.random.random()
            await (self.cut if drawn < CUTS else self.end if drawn < CUTS + ENDS else self.random.choice(kinds))()
            await self.check()


async def _draw(scene: Scene, driver_keeps: bool) -> None:
    """Take one draw's steps with actors that hold nothing, and leave them so."""
    for name in ACTORS:
        if name in scene.actors:
            scene.model.holders[name] = {}
        else:
            await scene.spawn(name)
    await scene.run()
    for holder, slots in scene.model.holders.items():
        if not (driver_keeps and holder == "driver"):
            for name in slots:
                await scene.at(holder, "drop", name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
async def test_every_reader_sees_its_bytes(part: int, rounds: int) -> None:
    driver = Holder()
    for begin in range(part * DRAWS * rounds, (part + 1) * DRAWS * rounds, RUNTIME):
        kept = {name: (array, array.copy()) for name, array in driver.arrays.items()}
        actors: dict[str, Any] = {}
        driver = Holder()
        async with zc.init():
            another: Any = await zc.spawn(Holder)
            for array, expected in kept.values():  # of the runtime before
                assert (array == expected).all()
                assert (await another.same(array) == expected).all()
            kept.clear()
            for seed in range(begin, begin + RUNTIME):
                scene = Scene(seed, driver, actors)
                try:
                    await _draw(scene, driver_keeps=seed + 1 == begin + RUNTIME)
                except Exception as error:
                    error.add_note(f"seed {seed}: " + "; ".join(scene.steps))
                    raise
            gc.collect()
