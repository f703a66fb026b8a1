"""Exceptions that are hostile to all that touch them reach the caller, and harm nobody else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import zcactor as zc
from tests import hostile
from zcactor.exception_pickling import is_any

PATIENCE = 60.0
_cause = vars(BaseException)["__cause__"].__get__
_exceptions = vars(BaseExceptionGroup)["exceptions"].__get__
_args = vars(BaseException)["args"].__get__


async def _failure(call: Awaitable[Any]) -> BaseException:
    """The exception of a call that fails."""
    try:
        found = await call
    except BaseException as error:
        return error
    raise AssertionError(f"it gave {found!r}")


async def _second(stream: Any, kind: str, form: str) -> Any:
    """The second item of a stream of two."""
    items = [item async for item in stream(kind, form)]
    assert items[0] == "first" and len(items) == 2
    return items[1]


def _check_kind(error: BaseException, kind: str) -> None:
    """Check that an error is what its actor raised, as far as it can travel."""
    cls: Any = hostile.KINDS[kind]
    if kind == "Leaving":
        assert type(error) is zc.RemoteError and error.remote.type_name == "tests.hostile.Leaving"
        return
    assert is_any(cls, type(error).__mro__), type(error)
    if kind == "Masked":
        assert cls.kept.__get__(error) == 7 and _args(error) == ("masked", 2)
    if kind == "Keeping":
        assert vars(error)["code"] == 7 and "lock" not in vars(error)
        assert "field 'lock' (TypeError: cannot pickle '_thread.lock' object)" in vars(error)["__notes__"][0]
        assert _args(error) == ("keeping", "<generator>")
    if kind == "Ring":
        assert type(_cause(error)) is ValueError
        assert hostile.Ring in type(vars(error)["itself"]).__mro__


async def _check(call: Callable[[str, str], Awaitable[Any]], kind: str, *, lists: bool = True) -> None:
    """Check all forms of one kind in one way to raise."""
    _check_kind(await _failure(call(kind, "alone")), kind)
    group = await _failure(call(kind, "in a group"))
    if kind == "Leaving":
        assert type(group) is zc.RemoteError
    else:
        first, other = _exceptions(group)
        _check_kind(first, kind)
        assert type(other) is ValueError
    outer = await _failure(call(kind, "as a cause"))
    assert isinstance(outer, ValueError)
    if kind == "Leaving":
        assert type(_cause(outer)) is hostile.Leaving
    else:
        _check_kind(_cause(outer), kind)
    if lists:
        found = await call(kind, "in a list")
    else:
        error = await _failure(call(kind, "in a list"))
        assert isinstance(error, ValueError)
        found = error.args[0]
    assert [found[0], found[2]] == [0, 2]
    if kind == "Leaving":
        assert type(found[1]) is hostile.Leaving
    else:
        _check_kind(found[1], kind)


@pytest.mark.parametrize("kind", hostile.KINDS)
async def test_a_hostile_exception_reaches_the_caller_and_harms_no_other_call(kind: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        raiser: Any = await hostile.Raiser.spawn()
        other = raiser.gather()
        for way in (raiser.plain, raiser.early, raiser.late, raiser.inline):
            await _check(way, kind)
        for stream in (raiser.generator, raiser.async_generator):
            await _check(partial(_second, stream), kind)
        await _check(lambda kind, form: hostile.Made.spawn(kind, form), kind, lists=False)
        shared = hostile.Made.options(process="shared")
        neighbour: Any = await shared.spawn(kind, "")
        await _check(lambda kind, form: shared.spawn(kind, form), kind, lists=False)
        async with zc.graph() as graph:
            form = graph.input()
            graph.output(raiser.step.bind(form, kind))
        run = await graph.compile()
        await _check(lambda _, form: run(form), kind)
        assert await run("fine") == "fine"
        assert all(await asyncio.gather(other, raiser.gather())), "each place of async methods is free"
        assert all(await asyncio.gather(raiser.meet(), raiser.meet())), "no thread is missing"
        assert await neighbour.ping() == "pong"
        await run.close()
        await zc.stop(raiser)


async def test_a_constructor_that_finds_no_item_says_so() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        error = await _failure(hostile.Exhausted.spawn())
        assert type(error) is zc.RemoteError and error.remote.type_name == "StopIteration", repr(error)


@pytest.mark.parametrize("logs", [True, False])
async def test_an_actor_whose_thread_ends_dies_with_the_reason(logs: bool) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        struck: Any = await hostile.Struck.spawn()
        assert await struck.ping() == "pong"
        if not logs:
            await struck.spoil_logging()
        await struck.strike()
        with pytest.raises(zc.ActorDied, match=r"a thread of Struck\(.*\) ended by KeyError"):
            await struck.ping()
        await zc.stop(struck)


@pytest.mark.parametrize("way", hostile.AWAITED)
async def test_what_an_async_method_awaits_may_be_hostile(way: str) -> None:
    """The class of an exception out of a future, or of an object that an awaitable yields, raises where it is asked."""
    async with asyncio.timeout(PATIENCE), zc.init():
        awaiting: Any = await hostile.Awaiting.options(max_concurrency=2).spawn()
        held = awaiting.hold()
        for _ in range(3):  # more than there are places
            error = await _failure(awaiting.wait_for(way))
            assert issubclass(type(error), hostile.Proxy | RuntimeError | AttributeError), type(error)
        await awaiting.let_go()
        assert await held == "held"
        await zc.stop(awaiting)


async def test_a_subclass_of_an_error_of_the_package_is_the_users() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        awaiting: Any = await hostile.Awaiting.spawn()
        held = awaiting.hold()
        error = await _failure(awaiting.fail())
        assert hostile.HalfMade in type(error).__mro__
        await awaiting.let_go()
        assert await held == "held"


@pytest.mark.parametrize("kind", ["Proxy", "Stays", "Odd"])
async def test_a_reducers_block_that_a_hostile_exception_leaves_ends_on_all_ranks(kind: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        members: list[Any] = [await hostile.Awaiting.options(num_cpus=0).spawn() for _ in range(2)]
        group = await zc.group(members)
        calls = [member.leave_block(group, kind if rank else "") for rank, member in enumerate(members)]
        other, own = [await _failure(call) for call in calls]
        assert getattr(hostile, kind) in type(own).__mro__ or kind in str(own), own
        assert kind in str(other) + type(other).__name__, other
        totals = [member.total(group) for member in members]
        assert await asyncio.gather(*totals) == [2.0, 2.0], "the group goes on"


async def test_failures_that_nobody_awaits_are_told_whatever_their_class(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        raiser: Any = await hostile.Awaiting.spawn()
        raiser.wait_for("gather")
        await raiser.let_go()
        gc.collect()
        while "its result was never awaited" not in caplog.text:
            await asyncio.sleep(0)
        assert "Exception in callback" not in caplog.text
