"""The sends that a signal's handler interrupts: the bytes that were passed arrive, and later calls work."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from types import CodeType
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.steps import act_at_step
from zcactor.api import remote_actor
from zcactor.graphs import runs, share, values
from zcactor.objects import pushes
from zcactor.peers.connections import Connections
from zcactor.rpc import outgoing, session

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENDING = tuple(inspect.getfile(module) for module in (remote_actor, outgoing, session, pushes, runs, share, values))


class Interrupted(Exception):
    """The exception of a signal's handler."""


def interrupt() -> None:
    raise Interrupted


def is_of_sending(code: CodeType) -> bool:
    return code.co_filename in SENDING


@zc.actor
class Keeper:
    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def take(self, *arrays: Any) -> Any:
        self.seen += [(x.size, float(x[0]), float(x[-1])) for x in arrays]
        return arrays[0]

    def taken(self) -> list[tuple[float, ...]]:
        return self.seen


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runtime() -> AsyncIterator[zc.Runtime]:
    async with zc.init() as started:
        yield started


def outside_the_store(value: float) -> Any:
    with zc.numpy_allocator(False):
        return np.full(5000, value)


async def sees_only(keeper: Any, size: int, value: float) -> None:
    """Wait until the keeper answers; all that it has seen of a size has one value."""
    async with asyncio.timeout(20):
        while True:
            try:
                seen = await keeper.taken()
                break
            except zc.ActorUnavailable:  # the connection has ended, which a handler's exception may do
                await asyncio.sleep(0)
    assert {each for each in seen if each[0] == size} <= {(size, value, value)}


async def interrupted_at_each_step(send: Callable[[], object], check: Callable[[], Any]) -> int:
    step, interrupted = 0, True
    while interrupted:
        interrupted = False
        try:
            act_at_step(send, step, interrupt, is_of_sending, of_handlers=True)
        except Interrupted:
            interrupted = True
        others = [zc.full(5000, 7.0) for _ in range(3)]  # in the memory of a lease that was taken back
        await check()
        del others
        step += 1
    return step


async def test_an_array_is_the_one_that_was_passed(runtime: zc.Runtime) -> None:
    keeper: Any = await zc.spawn(Keeper)
    await keeper.taken()
    steps = await interrupted_at_each_step(
        lambda: keeper.take(outside_the_store(1.0)), lambda: sees_only(keeper, 5000, 1.0)
    )
    assert steps > 30


async def test_a_result_that_is_passed_on_is_the_one_of_its_call(runtime: zc.Runtime) -> None:
    maker: Any = await zc.spawn(Keeper)
    keeper: Any = await zc.spawn(Keeper)
    assert (await keeper.take(maker.take(np.ones(10))))[0] == 1.0

    async def check() -> None:
        await sees_only(maker, 10, 1.0)
        await sees_only(keeper, 10, 1.0)
        async with asyncio.timeout(20):
            assert (await keeper.take(maker.take(np.full(11, 2.0))))[0] == 2.0

    steps = await interrupted_at_each_step(lambda: keeper.take(maker.take(np.ones(10))), check)
    assert steps > 10


@pytest.mark.parametrize("count", [1, 2])
async def test_a_run_of_a_graph_has_its_own_inputs(runtime: zc.Runtime, count: int) -> None:
    left: Any = await zc.spawn(Keeper)
    right: Any = await zc.spawn(Keeper)
    async with zc.graph() as graph:
        inputs = [graph.input() for _ in range(count)]
        graph.output(right.take.bind(left.take.bind(inputs[0]), *inputs[1:]))
    run: Any = await graph.compile()

    async def check() -> None:
        async with asyncio.timeout(20):
            assert (await run(*[np.full(11, 2.0)] * count))[0] == 2.0
            with pytest.raises(TypeError):  # which sends nothing, and is no matter of later runs
                run(*[asyncio.get_running_loop()] * count)
            assert (await run(*[np.full(11, 2.0)] * count))[0] == 2.0

    await check()
    steps = await interrupted_at_each_step(lambda: run(*[np.ones(11)] * count), check)
    assert steps > 10


async def test_a_call_to_a_peer_of_another_version_fails(runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper: Any = await zc.spawn(Keeper)
    await keeper.taken()

    async def refuse(*_: object) -> None:
        raise zc.VersionMismatch("the peer speaks protocol 6, this process 8")

    with monkeypatch.context() as patch:
        patch.setattr(Connections, "_reach", refuse)
        keeper._remote.session.fail(zc.ConnectionLost("cut"))
        async with asyncio.timeout(20):
            ended: Any = await asyncio.gather(keeper.taken(), return_exceptions=True)
            assert ended == [[]] or isinstance(ended[0], zc.ActorUnavailable)  # by a connection that ends a turn later
            with pytest.raises(zc.ActorUnavailable, match="the peer speaks protocol 6, this process 8"):
                await keeper.taken()
    async with asyncio.timeout(20):
        assert await keeper.taken() == []
        await zc.kill(keeper)
