"""Graphs that are written down: options, inputs and outputs, the graphs that cannot be compiled, and failures without
room for them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.graphs.parts import Node


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"in_flight": 0}, ValueError, "in_flight is 0, and must be at least 1"),
        ({"in_flight": 1.0}, TypeError, "in_flight is 1.0"),
        ({"in_flight": True}, TypeError, "in_flight is True"),
        ({"spin_us": -1}, ValueError, "spin_us is -1"),
        ({"spin_us": float("nan")}, ValueError, "spin_us is nan"),
        ({"spin_us": "1"}, TypeError, "spin_us is '1'"),
        ({"depth": 3}, TypeError, "depth"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zc.graph(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("nothing", None), TypeError, "nothing"),
        ((None, 3), TypeError, "shape is 3"),
        ((None, "12"), TypeError, "shape is '12'"),
        ((None, [1.5]), TypeError, "shape is"),
        ((None, (2, -1)), ValueError, "lengths are at least 0"),
    ],
)
def test_bad_inputs(arguments: tuple[Any, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zc.graph().input(*arguments)


async def test_what_cannot_be_compiled(node: zc.Runtime) -> None:
    actor: Any = await Node.spawn()
    async with zc.graph() as other:
        foreign = other.input()
    async with zc.graph() as g:
        x = g.input(np.float32, (3,))
        with pytest.raises(ValueError, match="a graph without outputs has no result"):
            await g.compile()
        with pytest.raises(TypeError, match="Graph.output takes nodes, not int"):
            g.output(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="belongs to another graph"):
            g.output(foreign)
        made = actor.add.bind(x)
        g.output(made)
        with pytest.raises(ValueError, match="is an output already"):
            g.output(made)
        unneeded = actor.add.bind(x)
        with pytest.raises(ValueError, match="no output needs <graph node Node.add>"):
            await g.compile()
        g.output(unneeded)
        run = await g.compile()
    await run.close()


@pytest.mark.slow
async def test_cancelling_a_compilation_leaves_nothing(node: zc.Runtime) -> None:
    actors: list[Any] = [await Node.spawn() for _ in range(2)]
    async with zc.graph() as g:
        g.output(actors[1].add.bind(actors[0].add.bind(g.input())))
    for turns in range(12):
        compiling = asyncio.ensure_future(g.compile())
        for _ in range(turns):
            await asyncio.sleep(0)
        compiling.cancel()
        await asyncio.wait([compiling])
    for actor in actors:
        while (await actor.figures())[0] > 1:  # a message that was sent is taken in
            await asyncio.sleep(0)
    run = await g.compile()
    assert await run(1) == 3
    await run.close()


async def test_without_a_runtime() -> None:
    with pytest.raises(zc.NotInitialized):
        async with zc.graph() as g:
            g.output(g.input())
            await g.compile()


@zc.actor
class Bearer:
    """An actor that raises arrays, in a process whose store can be filled."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def bears(self, nbytes: int) -> None:
        """Raise an array and a text."""
        raise ValueError(np.ones(nbytes, np.uint8), "x" * nbytes)

    def same(self, value: Any) -> Any:
        """Return the value."""
        return value

    def fill(self) -> None:
        """Fill the store of this process."""
        nbytes = 32 << 20
        while nbytes > 64:
            try:
                self.held.append(zc.empty(nbytes, np.uint8))
            except zc.OutOfMemory:
                nbytes //= 2


@pytest.mark.parametrize("nbytes", [8 << 10, 16_000, 16_300, 64 << 10, 1 << 20])
async def test_a_failure_that_does_not_fit_on_its_way_is_answered_by_another(nbytes: int) -> None:
    """The run fails, and the connections and the actors stay."""
    async with asyncio.timeout(20), zc.init(transports=("tcp",), num_cpus=2, store_capacity=64 << 20):
        first: Any = await Bearer.spawn()
        full: Any = await Bearer.spawn()
        async with zc.graph() as g:
            g.output(full.same.bind(first.bears.bind(g.input())))
        run = await g.compile()
        await full.fill()
        for _ in range(3):
            with pytest.raises((zc.OutOfMemory, ValueError, zc.RemoteError)):
                await run(nbytes)
        assert await full.same(1) == await first.same(1) == 1
        await run.close()
