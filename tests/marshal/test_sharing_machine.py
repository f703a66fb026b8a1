"""Two processes pass, hold, slice, hand over, drop and write to arrays, beside a model of each array's elements.

The test fails on wrong bytes anywhere, on a write to a shared array, and on a move of an array that others look at. It
also fails on memory that is not given back, or given away too early: free memory is filled with junk.
"""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

import zcactor as zc
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.marshal.arrays import byte_bounds, root_of
from zcactor.marshal.move import is_moved
from zcactor.objectstore.heap import use_handler
from zcactor.objectstore.store import Store
from zcactor.process import context
from zcactor.transport.loopback.endpoint import LoopbackEndpoint, LoopbackNetwork

EAGER_LIMIT = 4096
COUNTS = {"inline": 100, "outside": 2000, "large": 10_000}
"""Elements: below the eager limit; above it, but too few for NumPy to allocate them in the store; enough for that."""


class Desk:
    """The actor of one side, which holds the value of the machine's current step."""

    def __init__(self) -> None:
        self.arrived: Any = None

    async def keep(self, array: Any) -> None:
        """Take an argument."""
        self.arrived = array

    async def give(self, take: Any) -> Any:
        """Give the result that the machine has put here."""
        value, self.arrived = self.arrived, None
        return value


class Memory:
    """Memory that some arrays of one side share, as the elements that it should have."""

    def __init__(self, elements: np.ndarray[Any, Any]) -> None:
        self.elements = elements
        self.shared = False
        self.arrays: list[Held] = []


class Held:
    """An array that one side holds, with the elements that it should have."""

    def __init__(self, side: int, memory: Memory, array: Any, part: slice) -> None:
        self.side = side
        self.memory = memory
        self.array = array
        self.part = part
        self.closed = memory.shared
        """Whether a write must be refused. Views from before the sharing keep their own flag, and are left alone."""
        memory.arrays.append(self)

    @property
    def expected(self) -> np.ndarray[Any, Any]:
        return self.memory.elements[self.part]

    def drop(self) -> None:
        self.memory.arrays.remove(self)
        self.array = None


class SharingMachine(RuleBasedStateMachine):
    """The machine of this module's docstring."""

    maps: bool
    arrays = Bundle("arrays")

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.all: list[Held] = []
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        network = LoopbackNetwork(seed=5, maps=self.maps)
        self.processes: list[Process] = []
        self.desks: list[Desk] = []
        for _ in range(2):
            name = os.urandom(16)
            store = Store(64 << 20, name, extent_nbytes=1 << 20)
            endpoint = LoopbackEndpoint(
                network, name, (store.arena.address, store.arena.nbytes, store.arena), 64, EAGER_LIMIT
            )
            config = zc.Config(eager_limit=EAGER_LIMIT, recv_depth=64)
            process = Process(name, "worker", config, asyncio.get_running_loop(), store, endpoint)
            await endpoint.start(process.connections.accepted)
            process.hosts.add(process.hosts.take_index(), Desk, "Desk").adopt(desk := Desk())
            self.processes.append(process)
            self.desks.append(desk)
        places = [(process.process, 2) for process in self.processes]
        interface = Interface.of(Desk)
        self.actors = [
            RemoteActor(self.processes[side], new_actor(), interface, places[1 - side], None, "default", 100, 0)
            for side in range(2)
        ]
        """The other side's desk, by the calling side."""

    # ---------------------------------------------------------------- rules

    @rule(
        target=arrays, side=st.integers(0, 1), size=st.sampled_from(list(COUNTS)), stored=st.booleans(),
        first=st.integers(0, 1000),
    )  # fmt: skip
    def make(self, side: int, size: str, stored: bool, first: int) -> Held:
        elements = np.arange(first, first + COUNTS[size]) * 1.0
        store = self.processes[side].store
        if stored:
            array = store.empty(elements.size)
            array[:] = elements
        else:
            before = store.heap.use(65536)
            try:
                array = elements.copy()
            finally:
                use_handler(before)
        return self._hold(side, Memory(elements), array)

    @rule(target=arrays, held=arrays, start=st.integers(0, 5), step=st.sampled_from([1, 2, -1]))
    def cut(self, held: Held, start: int, step: int) -> Held:
        if held.array is None:
            return held
        part = np.arange(held.memory.elements.size)[held.part][start::step]
        if part.size < 2:
            return held
        stop = int(part[-1]) + (1 if part[1] > part[0] else -1)
        whole = slice(int(part[0]), stop if stop >= 0 else None, int(part[1] - part[0]))
        view = Held(held.side, held.memory, held.array[start::step], whole)
        view.closed = held.closed
        self.all.append(view)
        return view

    @rule(target=arrays, held=arrays, result=st.booleans())
    def share(self, held: Held, result: bool) -> Held:
        if held.array is None:
            return held
        in_place = self._is_in_store(held)
        there = self._carry(held.side, held.array, result=result)
        if held.array.nbytes >= EAGER_LIMIT:
            held.closed = not held.array.flags.writeable
            assert held.closed or held.part != slice(None), "only a piece of an open array stays open"
            if held.closed and in_place:  # a copied array can be written to through its base: nobody else sees that
                held.memory.shared = True
                for each in held.memory.arrays:  # the array that all of them are views of is closed, too
                    each.closed |= each.part == slice(None)
        memory = Memory(held.expected.copy())
        memory.shared = result or held.array.nbytes >= EAGER_LIMIT  # a small argument is the method's own
        assert there.flags.writeable is not memory.shared
        return self._hold(1 - held.side, memory, there)

    @rule(target=arrays, held=arrays, result=st.booleans())
    def move(self, held: Held, result: bool) -> Held:
        if held.array is None:
            return held
        others = [each for each in held.memory.arrays if each is not held]
        # An array of NumPy's own memory is copied where others look at it.
        if held.closed or (root_of(held.array) is not None and (held.memory.shared or others)):
            with pytest.raises(ValueError, match="read-only here|other views"):
                self._carry(held.side, zc.move(held.array), result=result)
            gc.collect()  # a cycle of asyncio's frames and the error keeps the array, as a view would
            assert not is_moved(held.array)
            return held
        there = self._carry(held.side, zc.move(held.array), result=result)
        assert is_moved(held.array)
        with pytest.raises(ValueError, match=r"zc\.move"):
            held.array.sum()
        memory = Memory(held.expected.copy())
        held.drop()
        self._litter()
        assert there.flags.writeable
        return self._hold(1 - held.side, memory, there)

    @rule(held=arrays, value=st.integers(-1000, -1))
    def write(self, held: Held, value: int) -> None:
        if held.array is None:
            return
        if held.closed:
            with pytest.raises(ValueError, match="read-only"):
                held.array[...] = value
            if root_of(held.array) is not None:  # NumPy lets an array that owns its memory be opened
                with pytest.raises(ValueError, match="WRITEABLE"):
                    held.array.flags.writeable = True
        elif not held.memory.shared:
            held.array[...] = value
            held.expected[...] = value

    @rule(held=consumes(arrays))
    def drop(self, held: Held) -> None:
        if held.array is not None:
            held.drop()
            self._litter()

    @invariant()
    def all_hold_what_they_should(self) -> None:
        for held in getattr(self, "all", ()):
            if held.array is not None:
                np.testing.assert_array_equal(held.array, held.expected)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self._end())
            self.loop.close()

    async def _end(self) -> None:
        for held in self.all:
            held.array = None
        async with asyncio.timeout(20):
            while any(process.store.stats().used or self._leases(process) for process in self.processes):
                gc.collect()
                for process in self.processes:
                    process.placements.clear()  # memory that is kept for the next pull
                    for session in process.sessions.all():
                        session._send_releases()  # releases of pulled arrays wait a second for a frame
                await asyncio.sleep(0)
        for process in self.processes:
            await process.close()

    # ---------------------------------------------------------------- parts of the rules

    def _leases(self, process: Process) -> int:
        return sum(len(session.leases) for session in process.sessions.all())

    def _is_in_store(self, held: Held) -> bool:
        store = self.processes[held.side].store
        return root_of(held.array) is not None or store.contains(*byte_bounds(held.array))

    def _hold(self, side: int, memory: Memory, array: Any) -> Held:
        held = Held(side, memory, array, slice(None))
        self.all.append(held)
        return held

    def _carry(self, side: int, value: Any, *, result: bool) -> Any:
        """Carry `value` to the other side: as an argument of its method, or as a result of this side's."""
        return self.loop.run_until_complete(self._carried(side, value, result=result))

    async def _carried(self, side: int, value: Any, *, result: bool) -> Any:
        caller = 1 - side if result else side
        context.set_current(self.processes[caller])
        desk = self.desks[1 - caller]
        try:
            if result:
                desk.arrived = value
                return await self._call(caller, "give", None)
            await self._call(caller, "keep", value)
            value, desk.arrived = desk.arrived, None
            return value
        finally:
            context.clear_current()

    def _call(self, caller: int, method: str, value: Any) -> ObjectRef[Any]:
        actor = self.actors[caller]
        return ObjectRef(actor.call(actor.interface.by_name[method], (value,), {}, None, 0))

    def _litter(self) -> None:
        """Let releases arrive, then overwrite free memory."""
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))
        for process in self.processes:
            for count in COUNTS.values():
                for junk in [process.store.empty(count) for _ in range(3)]:
                    junk.fill(-1e9)


class Mapped(SharingMachine):
    """Peers map each other's arenas."""

    maps = True


class Pulled(SharingMachine):
    """Peers pull bytes, as between hosts."""

    maps = False


Mapped.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
Pulled.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestMapped = pytest.mark.slow(Mapped.TestCase)
TestPulled = pytest.mark.slow(Pulled.TestCase)
