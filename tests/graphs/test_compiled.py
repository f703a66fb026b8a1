"""Compiled graphs end to end: results, order, limits, cancelling, and the inputs that are refused."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.graphs.parts import Node, Opened, Refused, failure_of, line

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "one process", "both"])
async def placed(request: pytest.FixtureRequest) -> AsyncIterator[list[Any]]:
    """Three actors in processes of their own, in one, and two of them in one."""
    shared = {"processes": 0, "one process": 3, "both": 2}[request.param]
    actors = [await Node.options(process="shared").spawn() for _ in range(shared)]
    actors += [await Node.spawn() for _ in range(3 - shared)]
    yield actors
    for actor in actors:
        await zc.kill(actor)


# ---------------------------------------------------------------- results


async def test_methods_of_every_kind(placed: list[Any]) -> None:
    a, b, c = placed
    run = await line(a.add, b.inline, c.later)
    assert [await run(number) for number in range(3)] == [3, 4, 5]
    assert (await run(np.arange(3.0))).tolist() == [3.0, 4.0, 5.0]
    await run.close()


async def test_a_fan_out_and_a_fan_in_with_constants_and_names(placed: list[Any]) -> None:
    a, b, c = placed
    async with zc.graph() as g:
        x = g.input()
        left, right = a.add.bind(x, 10), b.add.bind(x, b=100)
        joined = c.later.bind(left, right, c=1000)
        g.output(joined, left)
    run = await g.compile()
    for number in range(4):
        assert await run(number) == (2 * number + 1110, number + 10)
    await run.close()


async def test_methods_without_nodes_run_once_a_run(placed: list[Any]) -> None:
    a, b, _ = placed
    async with zc.graph() as g:
        g.output(b.add.bind(a.add.bind(5)))
    run = await g.compile()
    assert await run() == 7 and await run() == 7
    with pytest.raises(TypeError, match="inputs of the graph is 0, and 1 values were given"):
        run(1)
    await run.close()


async def test_an_input_may_be_an_output(placed: list[Any]) -> None:
    async with zc.graph() as g:
        x, y = g.input(), g.input()
        g.output(x, placed[0].add.bind(y))
    run = await g.compile()
    assert await run("text", 2) == ("text", 3)
    await run.close()


async def test_arrays_are_mapped_and_read_only(placed: list[Any]) -> None:
    a, b, c = placed
    async with zc.graph() as g:
        x = g.input()
        made = a.array.bind(x)
        g.output(made, b.describe.bind(made), c.describe.bind(a.moved.bind(x)), c.describe.bind(made))
    run = await g.compile()
    for number in (1.0, 2.5):
        array, *described = await run(number)
        assert array[0] == number and not array.flags.writeable
        assert described == [(False, number, 1 << 17)] * 3
    await run.close()


async def test_an_input_that_is_moved_is_shared_as_well(two: list[Any]) -> None:
    a, b = two
    async with zc.graph(in_flight=1) as g:
        x = g.input()
        g.output(a.describe.bind(x), b.describe.bind(x), a.describe.bind(x))
    run = await g.compile()
    references = [run(zc.move(np.full(1 << 17, float(number)))) for number in range(3)]
    assert await asyncio.gather(*references) == [((False, float(number), 1 << 17),) * 3 for number in range(3)]


async def test_an_array_goes_in_without_a_copy(two: list[Any]) -> None:
    run = await line(two[0].add, two[1].describe)
    array = zc.full(1 << 17, 3.0)
    before = zc.stats().bytes_copied
    assert await run(array) == (False, 4.0, 1 << 17)
    assert zc.stats().bytes_copied == before
    assert not array.flags.writeable  # shared, as the argument of a call is
    async with asyncio.timeout(20):  # the size of a result is told after the result
        while not run.explain().edges[1].nbytes:
            await asyncio.sleep(0)
    edges = run.explain().edges
    assert [(edge.source, edge.target, edge.transport) for edge in edges] == [
        ("input 0", "Node.add", "local"), ("Node.add", "Node.describe", "local"), ("Node.describe", "output", "local"),
    ]  # fmt: skip
    assert [(edge.nbytes, edge.blocks) for edge in edges] == [(1 << 20, 4), (1 << 20, 4), (0, 0)]
    assert "Node.add -> Node.describe  local" in str(run.explain())


async def test_references_as_inputs_stand_for_their_values(two: list[Any]) -> None:
    a, b = two
    run = await line(b.describe)
    assert await run(zc.put(np.full(9, 2.0))) == (False, 2.0, 9)
    assert await run(a.array(4)) == (False, 4.0, 1 << 17)
    assert isinstance(await failure_of(run(a.raises(1))), KeyError)
    assert await run(a.array(5)) == (False, 5.0, 1 << 17)


async def test_constants_of_any_kind(two: list[Any]) -> None:
    a, b = two
    array = np.arange(1 << 17)
    async with zc.graph() as g:
        x = g.input()
        g.output(a.pair.bind(x, array), a.pair.bind(x, b.add(1)), b.pair.bind({"of": ["them"]}, x))
    run = await g.compile()
    for number in (1, 2):
        first, second, third = await run(number)
        assert (first[0], second, third) == (number, (number, 2), ({"of": ["them"]}, number))
        assert np.array_equal(first[1], array)


async def test_values_above_the_eager_limit_that_are_no_arrays(two: list[Any]) -> None:
    async with zc.graph() as g:
        g.output(two[1].length.bind(two[0].add.bind(g.input(), "!")))
    run = await g.compile()
    assert await run("x" * 100_000) == 100_001


async def test_a_held_result_blocks_nobody(two: list[Any]) -> None:
    run = await line(two[0].array, in_flight=2)
    held = [await run(float(number)) for number in range(8)]
    assert [array[0] for array in held] == list(range(8))


async def test_a_graph_within_an_actor(two: list[Any]) -> None:
    assert await two[0].runs(two[1], [1, 2, 3]) == [3, 4, 5]


async def test_runs_from_another_thread(two: list[Any]) -> None:
    run = await line(two[0].add, two[1].add)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(run(number).result(20) for number in range(3)))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [2, 3, 4]


async def test_actors_serve_other_calls_and_graphs(two: list[Any]) -> None:
    a, b = two
    first, second = await line(a.add, b.add), await line(b.add, a.add)
    found = await asyncio.gather(*[run(n) for n in range(20) for run in (first, second)], *[a.add(n) for n in range(5)])
    assert found == [n + 2 for n in range(20) for _ in range(2)] + [n + 1 for n in range(5)]


async def test_awake_processes_give_the_same(two: list[Any]) -> None:
    run = await line(two[0].inline, two[1].inline, spin_us=200.0)
    assert [await run(number) for number in range(50)] == [number + 2 for number in range(50)]
    await run.close()


# ---------------------------------------------------------------- order and limits


async def test_each_method_sees_the_runs_in_order(two: list[Any]) -> None:
    a, b = two
    async with zc.graph(in_flight=8) as g:
        x = g.input()
        g.output(b.add.bind(x, a.add.bind(x)))
    run = await g.compile()
    await asyncio.gather(*[run(number) for number in range(40)])
    assert await a.seen() == list(range(40)) and await b.seen() == list(range(40))


async def test_no_more_runs_are_under_way_than_allowed(two: list[Any]) -> None:
    run = await line(two[0].passes, in_flight=3)
    references = [run(number) for number in range(5)]
    while await two[0].has_entered() < 3:
        await asyncio.sleep(0)
    assert await two[0].seen() == [0, 1, 2]
    await two[0].open()
    assert await asyncio.gather(*references) == list(range(5))


async def test_too_many_waiting_runs_are_refused(two: list[Any]) -> None:
    few = await Node.options(max_pending_calls=6).spawn()
    run = await line(few.passes, two[0].add)
    references = [run(number) for number in range(6)]
    with pytest.raises(zc.MailboxFull, match="has 6 unfinished runs; .* allows 6"):
        run(6)
    await few.open()
    assert await asyncio.gather(*references) == list(range(1, 7))
    assert await run(7) == 8


async def test_map_gives_results_in_order_and_takes_no_item_early(two: list[Any]) -> None:
    run = await line(two[0].add, two[1].later, in_flight=3)
    taken, came = 0, 0

    def items() -> Any:
        nonlocal taken
        for number in range(10):
            assert taken - came < 3
            taken += 1
            yield number

    async for value in run.map(items()):
        assert value == came + 2
        came += 1
    assert came == 10

    async def later() -> AsyncIterator[int]:
        yield 5

    assert [value async for value in run.map(later())] == [7]
    assert [value async for value in run.map([])] == []


async def test_map_over_several_inputs_and_to_an_error(two: list[Any]) -> None:
    async with zc.graph() as g:
        g.output(two[0].add.bind(g.input(), g.input()))
    run = await g.compile()
    assert [value async for value in run.map([(1, 2), (3, 4)])] == [3, 7]
    odd, seen = await line(two[0].raises), []
    with pytest.raises(KeyError, match="odd 3"):
        async for value in odd.map([2, 4, 3, 6]):
            seen.append(value)
    assert seen == [2, 4]

    def broken() -> Any:
        yield 2
        raise ZeroDivisionError("of the source")

    with pytest.raises(ZeroDivisionError):
        async for value in odd.map(broken()):
            seen.append(value)
    assert seen == [2, 4, 2]


async def test_leaving_a_map_cancels_its_runs(two: list[Any]) -> None:
    run = await line(two[0].passes, in_flight=2)
    iteration = run.map(range(4))
    waiting = asyncio.ensure_future(anext(iteration))
    while await two[0].has_entered() < 2:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await iteration.aclose()
    await asyncio.wait_for(run.close(), 20)


# ---------------------------------------------------------------- failures


async def test_an_exception_skips_the_methods_behind_it_in_its_run_alone(two: list[Any]) -> None:
    a, b = two
    async with zc.graph() as g:
        x = g.input()
        g.output(b.add.bind(a.raises.bind(x), b.add.bind(x)))
    run = await g.compile()
    references = [run(number) for number in range(4)]
    error = await failure_of(references[1])
    assert isinstance(error, zc.RemoteError) and isinstance(error, KeyError)
    assert "odd 1" in str(error) and error.actor.startswith("Node")
    assert [await references[0], await references[2]] == [1, 5]
    assert isinstance(await failure_of(references[3]), KeyError)
    assert sorted(await b.seen()) == [0, 0, 1, 2, 2, 3]


async def outcome_of(reference: Any) -> BaseException:
    """The exception of a run, of any kind."""
    async with asyncio.timeout(20):
        found = await asyncio.gather(reference, return_exceptions=True)
    assert isinstance(found[0], BaseException), found
    return found[0]


async def test_a_run_with_a_cancelled_input_is_cancelled_and_all_who_wait_for_the_input_learn_of_it(
    two: list[Any],
) -> None:
    a, b = two
    run = await line(b.add)
    reference = a.passes(1)
    before, call = run(reference), b.add(reference)
    waiting = asyncio.ensure_future(zc.wait([reference]))
    await a.has_entered()
    assert reference.cancel()
    after = run(reference)
    for dependent in (before, after):
        assert type(await outcome_of(dependent)) is asyncio.CancelledError
    assert "was cancelled" in str(await outcome_of(call))
    async with asyncio.timeout(20):
        assert (await waiting)[0] == [reference]
        assert await run(2) == 3
        await run.close()


async def test_runs_that_take_the_result_of_the_run_before_fail_with_the_first(two: list[Any]) -> None:
    a, b = two
    run = await line(b.add)
    reference = a.passes(1)
    references = [reference]
    for _ in range(400):
        references.append(run(references[-1]))
    await a.has_entered()
    assert references[0].cancel()
    for each in references:
        assert type(await outcome_of(each)) is asyncio.CancelledError
    await asyncio.wait_for(run.close(), 20)


async def test_a_failed_input_is_raised_where_the_run_is_awaited_in_any_thread(two: list[Any]) -> None:
    a, b = two
    run = await line(b.add)
    reference = a.raises(1)
    assert isinstance(await failure_of(reference), KeyError)
    assert isinstance(await outcome_of(run(reference)), KeyError)

    def elsewhere() -> BaseException:
        return asyncio.run(outcome_of(run(reference)))

    assert isinstance(await asyncio.to_thread(elsewhere), KeyError)
    assert await run(2) == 3
    await asyncio.wait_for(run.close(), 20)


async def test_an_input_goes_as_it_was_at_the_call_though_another_is_not_known(two: list[Any]) -> None:
    a, b = two
    async with zc.graph() as g:
        g.output(b.pair.bind(g.input(), g.input()))
    run = await g.compile()
    values = [1]
    reference = run(a.passes("late"), values)
    values.append(2)
    await a.open()
    assert await reference == ("late", [1])
    await run.close()


@pytest.mark.parametrize("kind", [KeyError, GeneratorExit, asyncio.CancelledError, Refused])
async def test_one_of_several_outputs_raises_where_the_run_is_awaited_when_it_is_unpickled(
    two: list[Any], kind: type[BaseException]
) -> None:
    a, b = two
    async with zc.graph(in_flight=1) as g:
        x = g.input()
        g.output(a.opened.bind(x), b.small.bind(x))
    run = await g.compile()
    reference = run(kind)
    for _ in range(2):
        async with asyncio.timeout(20):
            with pytest.raises(kind, match="unpickled"):
                await reference
    async with asyncio.timeout(20):
        found, array = await run(None)
        assert found == {} and array.flags.writeable and array.tolist() == [1.0] * 4
        await run.close()


async def test_several_outputs_are_passed_on_as_a_tuple(two: list[Any]) -> None:
    a, b = two
    async with zc.graph() as g:
        x = g.input()
        g.output(a.array.bind(x), a.pair.bind(x, {"of": "them"}), a.add.bind("x" * 100_000, b="y"), x)
    run = await g.compile()
    reference = run(3)
    for found in ((await a.pair(reference, 1))[0], await reference, (await b.pair(reference, 1))[0]):
        assert found[0][0] == 3.0 and not found[0].flags.writeable
        assert found[1:] == ((3, {"of": "them"}), "x" * 100_000 + "y", 3)
    await run.close()


@pytest.mark.parametrize("kind", [KeyError, zc.ConnectionLost, zc.ObjectLost])
async def test_an_error_of_a_constant_is_raised_as_it_is(two: list[Any], kind: type[Exception]) -> None:
    async with zc.graph() as g:
        g.output(two[0].pair.bind(g.input(), Opened(kind)))
    with pytest.raises(zc.RemoteError, match="unpickled") as raised:
        await g.compile()
    assert type(raised.value.original) is kind and isinstance(raised.value, kind)


async def test_a_constant_that_is_a_failed_reference_raises_its_error(two: list[Any]) -> None:
    async with zc.graph() as g:
        g.output(two[0].pair.bind(g.input(), two[1].raises(1)))
    with pytest.raises(KeyError, match="odd 1"):
        await g.compile()


async def test_a_result_that_cannot_travel(two: list[Any]) -> None:
    run = await line(two[0].unpicklable, two[1].add)
    assert isinstance(await failure_of(run(1)), TypeError)
    assert isinstance(await failure_of(run(2)), TypeError)
    assert await (await line(two[0].add))(1) == 2


async def test_wrong_arguments_within_a_run(two: list[Any]) -> None:
    run = await line(two[0].add, two[1].length)
    assert isinstance(await failure_of(run(1)), TypeError)


async def test_cancelling_frees_the_place_at_once(two: list[Any]) -> None:
    a, b = two
    run = await line(a.passes, b.add, in_flight=1)
    first, second, third = run(1), run(2), run(3)
    while not await a.has_entered():
        await asyncio.sleep(0)
    assert first.cancel() and third.cancel() and not first.cancel()
    while await a.has_entered() < 2:
        await asyncio.sleep(0)
    await a.open()
    assert await second == 3
    for reference in (first, third):
        with pytest.raises(asyncio.CancelledError):
            await reference
    assert await run(4) == 5
    assert await b.seen() == [2, 4]


async def test_a_timeout_gives_the_run_up(two: list[Any]) -> None:
    run = await line(two[0].passes, in_flight=1)
    error = await failure_of(run(1, timeout=0.01))
    assert isinstance(error, zc.DeadlineExceeded) and "0.01 s" in str(error)
    waits = run(2)
    assert isinstance(await failure_of(run(3, timeout=0)), zc.DeadlineExceeded)
    await two[0].open()
    assert await waits == 2


async def test_bad_inputs(two: list[Any]) -> None:
    async with zc.graph() as g:
        x, y = g.input(np.float32, (2, 3)), g.input(shape=[1])
        g.output(two[0].pair.bind(x, y))
    run = await g.compile()
    good = np.zeros((2, 3), np.float32), np.zeros(1)
    for inputs, error, text in [
        (good[:1], TypeError, "graph is 2, and 1 values"),
        ((good[0].astype(float), good[1]), TypeError, "input 0 .* arrays of float32; the value has dtype float64"),
        ((good[0].T, good[1]), ValueError, r"input 0 .* shape \(2, 3\); the value has \(3, 2\)"),
        ((good[0], 7), TypeError, "input 1 .* takes arrays; the value is of type int"),
    ]:
        with pytest.raises(error, match=text):
            run(*inputs)
    wrong: list[Any] = [("1", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)]
    for timeout, error in wrong:
        with pytest.raises(error, match="timeout is"):
            run(*good, timeout=timeout)
    with pytest.raises(TypeError, match="travels nowhere"):
        zc.put(run)
    assert (await run(*good))[1].tolist() == [0.0]


# ---------------------------------------------------------------- ends


async def test_closing_lets_runs_finish(two: list[Any]) -> None:
    run = await line(two[0].passes, two[1].add)
    references = [run(number) for number in range(6)]
    closing = asyncio.ensure_future(run.close())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="the graph is closed"):
        run(7)
    await two[0].open()
    assert await asyncio.gather(*references) == list(range(1, 7))
    await closing
    await run.close()


@pytest.mark.slow
async def test_a_dropped_graph_finishes_its_runs_and_is_forgotten(two: list[Any], node: Any) -> None:
    graphs = node.process.graphs()
    run = await line(two[0].passes, two[1].add)
    reference = run(1)
    del run
    gc.collect()
    await two[0].open()
    assert await reference == 2
    while graphs._all:
        gc.collect()
        await asyncio.sleep(0)
    assert not graphs._shares and not node.process.pushes.expectations.takers


async def test_many_runs_leave_nothing(two: list[Any], node: Any) -> None:
    run = await line(two[0].array, two[1].describe)
    assert await run(0.0)
    for number in range(200):
        assert (await run(float(number)))[1] == number
    share = node.process.graphs()._shares[next(iter(node.process.graphs()._shares))]
    assert not share.open and not any(duty.gathered for duty in share._duties.values())
    await run.close()
    assert not node.process.graphs()._shares and not share.open
    async with asyncio.timeout(20):  # messages are under way that give the last leases back
        for actor in two:
            while await actor.figures() != (0, 0):
                await asyncio.sleep(0)


class Unpackable:
    """A value that cannot travel."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@pytest.mark.parametrize("how", ["packing fails", "a method fails", "an input fails", "cancelled", "succeeds"])
async def test_a_run_keeps_its_inputs_and_results_no_longer_than_its_reference(two: list[Any], how: str) -> None:
    """Without the garbage collector."""
    a, b = two
    async with zc.graph(in_flight=1) as g:
        g.output(b.pair.bind(a.passes.bind(g.input()), b.raises.bind(g.input())))
    run = await g.compile()
    kept: list[weakref.ref[Any]] = []
    others: dict[str, Callable[[], Any]] = {
        "packing fails": Unpackable, "a method fails": lambda: 1, "an input fails": lambda: b.raises(1),
        "succeeds": lambda: 2,
    }  # fmt: skip

    async def begin() -> None:
        array = zc.freeze(np.ones(1 << 17))
        kept.append(weakref.ref(array))
        if how == "cancelled":
            first, waits = run(0, 0), run(array, 2)
            waits.cancel()
            await a.open()
            await first
        else:
            await a.open()
            value = await run(array, others[how]())
            kept.append(weakref.ref(value[0]))

    gc.collect()
    gc.disable()
    try:
        if how in ("cancelled", "succeeds"):
            await begin()
        else:
            with pytest.raises((TypeError, KeyError)):
                await begin()
        async with asyncio.timeout(20):  # messages are under way that give leases back
            while any(each() is not None for each in kept):
                await asyncio.sleep(0)
    finally:
        gc.enable()
    await asyncio.wait_for(run.close(), 20)
