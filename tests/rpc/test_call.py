"""Promises: each ends once, and every waiter learns of the end, in any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.errors import ConnectionLost
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.messages import Status


def new_call() -> Call:
    return Call(bytes(16), asyncio.get_running_loop(), threading.get_ident())


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Calls that were reported as failed without a waiter."""
    calls: list[Call] = []
    monkeypatch.setattr(Call, "unretrieved_errors", staticmethod(calls.append))
    yield calls


ENDINGS: list[Callable[[Call], None]] = [
    lambda call: call.complete(Status.OK, b"first", (), 3),
    lambda call: call.complete_plain("first"),
    lambda call: call.fail(ConnectionLost("first")),
]


@pytest.mark.parametrize("first", ENDINGS)
@pytest.mark.parametrize("second", ENDINGS)
async def test_a_call_ends_once(first: Callable[[Call], None], second: Callable[[Call], None]) -> None:
    call = new_call()
    call.refs = 1
    ended: list[Call] = []
    call.on_done = ended.append
    called: list[Call] = []
    call.add_callback(called.append)
    assert not call.done
    first(call)
    outcome = (call.status, call.payload, call.value, call.error, call.flags)
    second(call)
    assert (call.status, call.payload, call.value, call.error, call.flags) == outcome
    assert call.done
    assert call.state is CallState.DONE  # type: ignore[unreachable]
    assert ended == called == [call]


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("number", [1, 2, 5])
async def test_every_waiter_is_woken(end: Callable[[Call], None], number: int) -> None:
    call = new_call()
    call.refs = 1
    waiters = [asyncio.get_running_loop().create_future() for _ in range(number)]
    for waiter in waiters:
        call.add_waiter(waiter)
    assert call.awaited
    waiters[-1].cancel()
    end(call)
    assert all(waiter.done() for waiter in waiters)
    assert not call.awaited


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError])
async def test_a_callback_that_raises_keeps_nobody_from_the_outcome(
    end: Callable[[Call], None], kind: type[BaseException]
) -> None:
    call, loop = new_call(), asyncio.get_running_loop()
    call.refs = 1
    told: list[BaseException] = []
    known: list[Call] = []
    done: list[Call] = []
    waiter = loop.create_future()
    error = kind("of a callback")

    def raises(_: Call) -> None:
        raise error

    call.when_known(raises)
    call.when_known(known.append)
    call.add_callback(raises)
    call.add_callback(done.append)
    call.add_waiter(waiter)
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    try:
        end(call)
        assert known == done == [call] and waiter.done()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(before)
    assert told == [error, error]


async def test_waiters_that_give_up() -> None:
    call = new_call()
    loop = asyncio.get_running_loop()
    a, b, c = (loop.create_future() for _ in range(3))
    for waiter in (a, b, c):
        call.add_waiter(waiter)
    call.remove_waiter(b)
    call.remove_waiter(b)
    assert call.awaited
    call.remove_waiter(a)
    assert call.awaited
    call.complete(Status.OK, b"", (), 0)
    assert c.done()
    assert not a.done()
    assert not b.done()
    lonely = new_call()
    d = loop.create_future()
    lonely.add_waiter(d)
    lonely.remove_waiter(d)
    assert not lonely.awaited


async def test_a_waiter_that_comes_too_late_is_woken() -> None:
    call = new_call()
    call.complete(Status.OK, b"", (), 0)
    waiter = asyncio.get_running_loop().create_future()
    call.add_waiter(waiter)
    assert waiter.done()


@pytest.mark.parametrize("end", ENDINGS)
async def test_waiters_of_other_loops(end: Callable[[Call], None]) -> None:
    call = new_call()
    call.refs = 1
    ready = threading.Barrier(4)
    woken: list[int] = []

    def elsewhere(number: int) -> None:
        async def wait() -> None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            home.call_soon_threadsafe(call.add_waiter, future)
            home.call_soon_threadsafe(added.release)
            await future
            woken.append(number)

        ready.wait(20)
        asyncio.run(wait())

    home = asyncio.get_running_loop()
    added = asyncio.Semaphore(0)
    threads = [threading.Thread(target=elsewhere, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(20)
    mine = home.create_future()
    call.add_waiter(mine)
    for _ in threads:
        await added.acquire()
    end(call)
    assert mine.done()
    for thread in threads:
        await home.run_in_executor(None, thread.join, 20)
    assert sorted(woken) == [0, 1, 2]


async def test_callbacks() -> None:
    call = new_call()
    order: list[Any] = []
    call.add_callback(lambda c: order.append(1))
    call.add_callback(lambda c: order.append(2))
    call.add_callback(lambda c: c.add_callback(lambda _: order.append("nested, at once")))
    call.fail(ValueError())
    call.add_callback(lambda c: order.append("late, at once"))
    assert order == [1, 2, "nested, at once", "late, at once"]


async def test_what_is_needed_is_fetched_once() -> None:
    for need in ("waiter", "callback"):
        call = new_call()
        fetched: list[Call] = []
        call.fetch = fetched.append
        for _ in range(2):
            if need == "waiter":
                call.add_waiter(asyncio.get_running_loop().create_future())
            else:
                call.add_callback(lambda _: None)
        assert fetched == [call]
    call = new_call()
    call.fetch = fetched.append
    call.complete(Status.OK, b"", (), 0)
    call.add_callback(lambda _: None)
    assert len(fetched) == 1, "nothing is fetched for a call that has ended"


async def test_the_timer_is_cancelled() -> None:
    for end in ENDINGS:
        call = new_call()
        call.refs = 1
        call.timer = asyncio.get_running_loop().call_later(1000, pytest.fail, "too late")
        timer = call.timer
        end(call)
        assert timer.cancelled()
        assert call.timer is None
        assert call.resend is None  # type: ignore[unreachable]


async def test_who_sees_a_failure(unseen: list[Call]) -> None:
    failure = ValueError()
    nobody = new_call()
    nobody.fail(failure)
    assert unseen == [nobody]
    held, told, seen, streamed, awaited = (new_call() for _ in range(5))
    held.refs = 1
    told.add_callback(lambda _: None)
    seen.retrieved = True
    streamed.stream = object()
    awaited.add_waiter(asyncio.get_running_loop().create_future())
    for call in (held, told, seen, streamed, awaited):
        call.fail(failure)
    assert unseen == [nobody]


async def test_a_finished_call_lets_go_of_the_actor() -> None:
    for end in ENDINGS:
        call = new_call()
        call.refs = 1
        call.target = SimpleNamespace(label="A(a)")
        end(call)
        assert call.target is None
        awaited = new_call()
        awaited.refs = 1
        awaited.target = SimpleNamespace(label="A(a)")
        awaited.add_waiter(asyncio.get_running_loop().create_future())
        end(awaited)
        assert awaited.target is None
