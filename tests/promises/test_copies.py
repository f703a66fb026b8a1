"""Copies of arrays from outside the store: one for all receivers of a step, and a warning where they come again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import zcactor as zc

MIB = 1 << 20
PATIENCE = 60
OUTSIDE = "argument outside the store"


@zc.actor
class Reader:
    """Reads arrays."""

    def first(self, x: np.ndarray) -> int:
        return int(x[0])

    def both(self, x: np.ndarray, y: object) -> int:
        return int(x[0])


def mapped(folder: Path, nbytes: int) -> np.ndarray:
    """A writable memory map, which is no array of the store and owns no memory."""
    return np.memmap(folder / "values", np.uint8, "w+", shape=(nbytes,))


def copies() -> int:
    found = zc.stats().copies.get(OUTSIDE)
    return 0 if found is None else found.count


@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_one_array_for_many_receivers_is_copied_once(tmp_path: Path, transport: str) -> None:
    memory = mapped(tmp_path, 4 * MIB)
    async with asyncio.timeout(PATIENCE), zc.init(transports=(transport,), log_to_driver=False):
        actors: list[Any] = [await Reader.spawn() for _ in range(3)]
        view = np.asarray(memory)
        before = copies()
        assert await asyncio.gather(*(actor.first(view) for actor in actors)) == [0] * 3
        assert copies() - before == 1
        # The bytes of that moment are passed, also where nobody could see the write.
        first = actors[0].first(view)
        memory[0] = 7
        second = actors[1].first(view)
        assert [await first, await second] == [0, 7]
        # Another array over the same bytes.
        before = copies()
        near, far = actors[0].first(memory.view(np.ndarray)), actors[1].first(memory.view(np.ndarray)[:])
        assert [await near, await far] == [7, 7]
        assert copies() - before <= 1


async def test_the_copy_lives_no_longer_than_its_receivers_hold_it(tmp_path: Path) -> None:
    memory = mapped(tmp_path, 4 * MIB)
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        actor: Any = await Reader.spawn()
        used = zc.stats().store_used
        assert await actor.first(np.asarray(memory)) == 0
        while zc.stats().store_used > used:
            await asyncio.sleep(0)


async def test_the_third_large_copy_of_a_line_warns_once(tmp_path: Path) -> None:
    large, small = mapped(tmp_path, 16 * MIB), np.asarray(mapped(tmp_path / "..", 16 * MIB - 1))
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        actor: Any = await Reader.spawn()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for number in range(5):
                large[0] = number
                assert await actor.first(np.asarray(large)) == number
                assert await actor.first(small) == 0
        (warning,) = seen
        assert warning.category is zc.CopyWarning and warning.filename == __file__
        assert "x = zc.asarray(x)" in str(warning.message)
        line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
        assert "actor.first(np.asarray(large))" in line


async def test_a_warning_that_is_an_error_comes_before_anything_is_sent(tmp_path: Path) -> None:
    large = mapped(tmp_path, 16 * MIB)
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        actor: Any = await Reader.spawn()

        def first(view: np.ndarray) -> zc.ObjectRef[int]:
            return actor.first(view)  # type: ignore[no-any-return]

        with warnings.catch_warnings():
            warnings.simplefilter("error", zc.CopyWarning)
            for number in range(4):
                large[0] = number
                view = np.asarray(large)
                before = zc.stats().calls, copies()
                if number == 2:
                    with pytest.raises(zc.CopyWarning):
                        await first(view)
                    assert (zc.stats().calls, copies()) == before and view.flags.writeable
                else:
                    assert await first(view) == number


@pytest.mark.parametrize("make", [np.ones, zc.ones], ids=["numpy", "zcactor"])
async def test_a_call_that_is_not_sent_leaves_its_arrays_writable(make: Callable[[int], np.ndarray]) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        actor: Any = await Reader.spawn()
        x = make(100_000)
        for values in ((x, threading.Lock()), (x, [x[:50_000], threading.Lock()])):
            with pytest.raises(TypeError):
                await actor.both(*values)
            x[0] = 5
            assert x.flags.writeable and x[:].flags.writeable
        with pytest.raises(TypeError):
            zc.put([x, threading.Lock()])
        x[0] = 6
        assert await actor.both(x, 0) == 6
        assert not x.flags.writeable
        with pytest.raises(TypeError):  # it was closed before, by a call that was sent
            await actor.both(x, threading.Lock())
        assert not x.flags.writeable
        y = make(100_000)
        await zc.kill(actor)
        with pytest.raises(zc.ActorDied):
            await actor.first(y)
        y[0] = 1


@zc.actor(max_restarts=3)
class Step:
    """A step of a graph, which changes one of its constants."""

    def run(self, x: float, values: np.ndarray, options: dict[str, int], large: list[np.ndarray]) -> float:
        options["runs"] = options.get("runs", 0) + 1
        return float(x + values[0] + options["runs"] + large[0][0])

    def one(self, options: dict[str, int]) -> int:
        options["runs"] = options.get("runs", 0) + 1
        return options["runs"]


@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_constants_of_a_graph_are_those_of_its_first_compilation(transport: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(transports=(transport,), log_to_driver=False):
        actor: Any = await Step.spawn()
        values, large = np.ones(10), [np.ones(100_000)]
        options: dict[str, int] = {}
        put = zc.put({"runs": 0})
        async with zc.graph() as graph:
            start = graph.input()
            graph.output(actor.run.bind(start, values, options, large), actor.one.bind(options), actor.one.bind(put))
        run = await graph.compile()
        assert await run(1.0) == (4.0, 1, 1)
        values[0], options["runs"] = 100, 100
        assert [await run(1.0) for _ in range(3)] == [(4.0, 1, 1)] * 3
        (info,) = await zc.actors()
        os.kill(info.pid, signal.SIGKILL)
        for _ in range(1000):
            try:
                found = await run(1.0)
            except zc.errors.ActorError:
                await asyncio.sleep(0.01)
            else:
                break
        assert found == (4.0, 1, 1)


@dataclass
class Box:
    """An object with an array."""

    x: Any


class Pair(NamedTuple):
    """A tuple with a name."""

    x: Any
    y: int


WITHIN: dict[str, Any] = {
    "containers": lambda x: {"x": [(x,)]},
    "an object": Box,
    "a named tuple": lambda x: Pair(x, 1),
    "an ordered dict": lambda x: OrderedDict(x=x),
    "an object in a list": lambda x: [Box({"x": x})],
}
"""The values that an array lies in."""


def inner(value: Any, kind: str) -> Any:
    """The array in a value of `WITHIN`."""
    if kind == "containers":
        return value["x"][0][0]
    if kind == "an object in a list":
        return value[0].x["x"]
    return value["x"] if kind == "an ordered dict" else value.x


@zc.actor
class Mover:
    """Hands arrays over."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def move(self, size: int) -> np.ndarray:
        return zc.move(np.ones(size))

    async def move_when_open(self, size: int) -> np.ndarray:
        await self.opened.wait()
        return zc.move(np.ones(size))

    async def open(self) -> None:
        self.opened.set()

    def within(self, size: int, kind: str) -> Any:
        return WITHIN[kind](zc.move(np.ones(size)))

    def first(self, x: np.ndarray) -> float:
        return float(x[0])

    def first_within(self, value: Any, kind: str) -> float:
        return float(inner(value, kind)[0])


@pytest.mark.parametrize("size", [1, 511, 512, 8191, 8192, 8193, 100_000])
@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_a_moved_result_that_was_changed_is_passed_on_as_it_is(transport: str, size: int) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(transports=(transport,), log_to_driver=False):
        one: Any = await Mover.spawn()
        other: Any = await Mover.spawn()
        ref = one.move(size)
        x = await ref
        x[0] = 5
        assert await ref is x
        assert await other.first(ref) == 5
        unread = one.move(size)
        assert await other.first(unread) == 1
        for kind in WITHIN:
            ref = one.within(size, kind)
            inner(await ref, kind)[0] = 5
            assert await other.first_within(ref, kind) == 5, kind


@pytest.mark.parametrize("way", ["result", "put", "promise", "promise that is awaited"])
@pytest.mark.parametrize("size", [1, 511, 512, 8191, 8192, 8193, 100_000])
@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_a_reference_that_was_passed_on_has_one_value(transport: str, size: int, way: str) -> None:
    """Also where its moved array is awaited and written to afterwards."""
    async with asyncio.timeout(PATIENCE), zc.init(transports=(transport,), log_to_driver=False):
        one: Any = await Mover.spawn()
        other: Any = await Mover.spawn()
        ref: Any = zc.put(zc.move(np.ones(size))) if way == "put" else one.move(size)
        if way == "result":
            await zc.wait([ref])
        if way == "promise that is awaited":
            ref = one.move_when_open(size)
            first = other.first(ref)
            await one.open()
            here = await ref
            assert await first == 1
        else:
            assert await other.first(ref) == 1  # as a promise where it is not done
            here = await ref
        assert not here.flags.writeable
        assert await other.first(ref) == 1
        ref = one.move(size)
        here = await ref
        here[0] = 5
        assert await other.first(ref) == 5
        assert not here.flags.writeable
        for kind in WITHIN:
            ref = one.within(size, kind)
            here = inner(await ref, kind)
            here[0] = 5
            assert await other.first_within(ref, kind) == 5
            assert not here.flags.writeable, kind
