"""Arrays passed, held, sliced, moved and dropped while holders end, crash and lose connections, against a model.

Holders are actors, the driver and, in every other runtime, a second program that has joined the same cluster. Every
reader looks at all of its bytes after each step. Draws are seeded: ``--rounds N`` runs N times as many of them, and a
failure names the seed and the steps that led to it.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import zcactor as zc
from tests.cluster.hosts import Hosts
from tests.memory_holders import ASYNC, Holder, Model, Root, Slot, pattern
from tests.memory_program import CAPACITY, Joined

PARTS, DRAWS = 5, 50
"""Tests, each of which has one of the loops, and draws of each test."""
RUNTIME = 25
"""Draws of one runtime; the next runtime begins while the driver still holds the arrays of the last draw."""
STEPS = 14
ENDS, CUTS = 0.04, 0.003
"""Shares of all steps. After a cut, callers wait for two seconds until the node agent says that the actor lives."""
ACTORS = ("a", "b", "c")
LENGTHS = (4096, 8192, 12_000, 100_000, 400_000)
"""Elements: above the eager limit of 16 KiB, below and above the size from which NumPy's own arrays lie in the store,
and
larger than a huge page."""
LEAST_NBYTES = 32 << 10
"""Bytes of the smallest array that is passed here; an array in a frame would be another array at its receiver."""
WAYS = ("store", "numpy", "malloc", "reshaped", "subclass")
DRAWN = {"take from program", "give to program", "end program"}
"""Steps in which the second program takes part; each test draws all of them."""

NamedHolder: Any = zc.actor(Holder)


class Runtime:
    """A runtime of this program, and its holders that outlive a draw."""

    def __init__(self, address: str | None) -> None:
        self.driver = Holder()
        self.actors: dict[str, Any] = {}
        self.program: Joined | None = None
        """The second program, where there is a cluster."""
        self._address = address

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, joined: bool) -> AsyncIterator[Runtime]:
        """Start a node of this program's own, or a cluster that a second program joins as well."""
        if not joined:
            async with zc.init():
                yield cls(None)
            return
        with Hosts() as hosts:
            address = hosts.start(store_capacity=CAPACITY).record.address
            with hosts.on("a"):
                async with zc.init(address, store_capacity=CAPACITY):
                    runtime = cls(address)
                    runtime.program = await Joined.start(address)
                    try:
                        yield runtime
                    except BaseException:
                        await runtime.program.kill()
                        raise
                    await runtime.program.stop()

    async def replace_program(self, killed: bool) -> None:
        """End the second program, in order or by a kill, and start another."""
        assert self.program is not None and self._address is not None
        await (self.program.kill() if killed else self.program.stop())
        self.program = await Joined.start(self._address)


class Scene:
    """The holders of one runtime, and the arrays that they have to see."""

    def __init__(self, seed: int, runtime: Runtime) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.runtime = runtime
        self.driver = runtime.driver
        self.actors = runtime.actors
        self.model = Model({"driver": {}, "program": {}} if runtime.program else {"driver": {}})
        self.steps: list[str] = []
        self.drawn: set[str] = set()
        self.names = 0

    async def spawn(self, name: str) -> None:
        """Spawn an actor of that name, without arrays."""
        self.actors[name] = await NamedHolder.options(name=self.new(name)).spawn()
        self.model.holders[name] = {}

    def new(self, kind: str = "x") -> str:
        """A name that no array and no actor of the runtime has had."""
        self.names += 1
        return f"{kind}{self.names}" if kind == "x" else f"{kind}{self.seed}-{self.names}"

    async def at(self, holder: str, method: str, *arguments: Any) -> Any:
        """Run a method of a holder in the holder's process."""
        if holder == "driver":
            result = getattr(self.driver, method)(*arguments)
            return await result if method in ASYNC else result
        if holder == "program":
            assert self.runtime.program is not None
            named = [one if isinstance(one, int | str) else {"actor": one._remote.name} for one in arguments]
            return await self.runtime.program.call(method, *named)
        return await getattr(self.actors[holder], method)(*arguments)

    def any_slot(self, least: int = 0) -> tuple[str, str] | None:
        """A random array of at least `least` bytes, as its holder and its name."""
        found = [
            (holder, name)
            for holder, slots in self.model.holders.items()
            for name, slot in slots.items()
            if slot.elements.nbytes >= least
        ]
        return self.random.choice(found) if found else None

    # ---- steps

    async def make(self) -> None:
        """Make an array at a random holder."""
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
        """Share an array with another holder; both see the same from then on, or the other sees a snapshot."""
        chosen = self.any_slot(LEAST_NBYTES)
        if chosen is None:
            return
        holder, name = chosen
        reached = self.model.holders if holder in self.actors else self.actors  # a program calls only actors
        other = self.random.choice([one for one in reached if one != holder])
        new, slot = self.new(), self.model.holders[holder][name]
        self.steps.append(f"share {holder}.{name} as {other}.{new}")
        if other in self.actors:
            self.drawn.add(f"take from {holder}")
            await self.at(holder, "send", name, self.actors[other], new)
        else:
            self.drawn.add(f"give to {other}")
            await self.at(other, "fetch", name, self.actors[holder], new)
        if await self.at(holder, "write", name, 0):  # a piece of an open array: the other has a copy of its own
            assert not slot.passed
            self.model.holders[other][new] = Slot(
                Root(slot.root.subclass, shared=True), slot.elements.copy(), passed=True
            )
            return
        slot.root.shared = slot.passed = True
        self.model.holders[other][new] = Slot(slot.root, slot.elements, passed=True)

    async def move(self) -> None:
        """Hand an array over, or see the refusal because others see it."""
        chosen = self.any_slot(LEAST_NBYTES)
        if chosen is None:
            return
        holder, name = chosen
        slots = self.model.holders[holder]
        slot = slots[name]
        alone = sum(one.root is slot.root for one in slots.values()) == 1
        if slot.root.subclass or (not slot.root.shared and not alone):
            return  # `zc.move` takes arrays of NumPy's own class; no contract says what views of moved memory show
        other = self.random.choice([one for one in self.actors if one != holder])
        new = self.new()
        self.steps.append(f"move {holder}.{name} to {other}.{new}")
        self.drawn.add(f"move from {holder}")
        moved = await self.at(holder, "move", name, self.actors[other], new)
        assert not moved if slot.passed else moved or slot.root.shared
        if moved:  # where other parts of the memory were shared, the receiver gets a copy, unless the move is refused
            del slots[name]
            of_its_own = Root(slot.root.subclass), slot.elements.copy()
            self.model.holders[other][new] = Slot(*(of_its_own if slot.root.shared else (slot.root, slot.elements)))

    async def part(self) -> None:
        """Take a view of an array."""
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
        """Write to an array; NumPy refuses that where the array was passed."""
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
        """Let go of an array."""
        chosen = self.any_slot()
        if chosen is None:
            return
        holder, name = chosen
        self.steps.append(f"drop {holder}.{name}")
        await self.at(holder, "drop", name)
        del self.model.holders[holder][name]

    async def fill(self) -> None:
        """Overwrite free memory."""
        holder = self.random.choice(list(self.model.holders))
        length = self.random.choice(LENGTHS)
        self.steps.append(f"fill {holder} by {length}")
        await self.at(holder, "fill", length, 6)

    async def end(self) -> None:
        """End an actor or the second program, in order or by a kill, and start another in its place."""
        name = self.random.choice([one for one in self.model.holders if one != "driver"])
        way = self.random.choice((zc.stop, zc.kill))
        self.steps.append(f"{way.__name__} {name}")
        self.drawn.add(f"end {name}")
        if name in self.actors:
            await way(self.actors.pop(name))
            await self.spawn(name)
        else:
            await self.runtime.replace_program(killed=way is zc.kill)
            self.model.holders[name] = {}

    async def cut(self) -> None:
        """End a connection while both processes live."""
        other = self.random.choice(list(self.actors))  # programs are connected to actors, not to each other
        one = self.random.choice([holder for holder in self.model.holders if holder != other])
        self.steps.append(f"cut {one} from {other}")
        await self.at(one, "cut", self.actors[other])
        if one in self.actors:
            for holder in (one, other):
                await self.driver.reach(self.actors[holder])
            await self.at(other, "reach", self.actors[one])

    async def check(self) -> None:
        """Compare the arrays of every holder with the model."""
        for holder in self.model.holders:
            assert await self.at(holder, "look") == self.model.expected(holder), holder

    async def run(self) -> None:
        """Draw steps, take them, and check after each."""
        kinds = [self.make, self.make, self.share, self.share, self.share, self.move, self.part, self.write, self.drop]
        kinds += [self.drop, self.fill, self.fill]
        for _ in range(STEPS):
            drawn = self.random.random()
            await (self.cut if drawn < CUTS else self.end if drawn < CUTS + ENDS else self.random.choice(kinds))()
            await self.check()


async def _draw(scene: Scene, driver_keeps: bool) -> None:
    """Take one draw's steps with actors that hold nothing, and drop all arrays at the end."""
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
    drawn: set[str] = set()
    for begin in range(part * DRAWS * rounds, (part + 1) * DRAWS * rounds, RUNTIME):
        kept = {name: (array, array.copy()) for name, array in driver.arrays.items()}
        async with Runtime.start(joined=begin // RUNTIME % 2 == 1) as runtime:
            driver = runtime.driver
            another: Any = await zc.spawn(Holder)
            for array, expected in kept.values():  # arrays of the runtime before
                assert (array == expected).all()
                assert (await another.same(array) == expected).all()
            kept.clear()
            for seed in range(begin, begin + RUNTIME):
                scene = Scene(seed, runtime)
                try:
                    await _draw(scene, driver_keeps=seed + 1 == begin + RUNTIME)
                except Exception as error:
                    error.add_note(f"seed {seed}: " + "; ".join(scene.steps))
                    raise
                drawn |= scene.drawn
            gc.collect()
    assert drawn >= DRAWN, f"never drawn: {DRAWN - drawn}"
