"""Calls end to end: order, limits, deadlines, and the end of an actor or of the connection to it."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import tests.api.test_handle as handles
import zcactor as zc
from tests.actors import Caller, Plain, Probe
from tests.api.test_remote_method import Unpicklable
from zcactor.api.remote_actor import RemoteActor
from zcactor.process import context
from zcactor.rpc.session import Session

pytestmark = pytest.mark.asyncio(loop_scope="module")

node = handles.node


def untyped(handle: Any) -> Any:
    """An actor whose handle does not check calls."""
    return handle


# ---------------------------------------------------------------- order


async def test_starts_in_the_order_of_the_calls() -> None:
    probe: Any = await Probe.spawn()
    methods = (probe.note, probe.anote, probe.inote)
    expected = list(range(300))
    refs = [methods[i * i % 7 % 3](i) for i in expected]
    assert await zc.get(refs) == expected
    entries = await probe.entries()
    sync = [i for i in expected if i * i % 7 % 3 == 0]
    assert sorted(entries) == expected
    assert [i for i in entries if i in sync] == sync
    assert [i for i in entries if i not in sync] == [i for i in expected if i not in sync]
    for i in sync:  # a sync call starts when the thread takes it, and calls behind it may log before it does
        assert not [before for before in entries[entries.index(i) :] if before < i]


async def test_async_methods_start_in_order_with_sync_ones_behind_them() -> None:
    probe: Any = await Probe.spawn()
    held = probe.hold("first")
    refs = [probe.anote("a"), probe.note("b"), probe.inote("c"), probe.ahold("d"), probe.note("e")]
    await probe.until("first began", "a")  # "a" starts once "first" has begun
    assert "b" not in await probe.entries()
    await probe.open("first")
    await probe.until("e")
    entries = await probe.entries()
    assert [e for e in entries if e in ("a", "c", "d began")] == ["a", "c", "d began"]
    assert entries.index("a") < entries.index("b") < entries.index("e")
    assert entries.index("d began") < entries.index("e")
    await probe.open("d")
    assert await zc.get([held, *refs]) == ["first", "a", "b", "c", "d", "e"]


async def test_callers_do_not_wait_for_each_other() -> None:
    probe: Any = await Probe.spawn()
    caller: Any = await Caller.spawn()
    held = [probe.ahold("x"), probe.hold("y"), probe.note("mine"), probe.anote("mine too")]
    await probe.until("y began")
    assert await caller.call(probe, "anote", "theirs") == "theirs"
    await probe.open("x")
    await probe.open("y")
    assert await zc.get(held) == ["x", "y", "mine", "mine too"]


async def test_order_across_the_opening_of_the_connection() -> None:
    for _ in range(5):
        probe: Any = await Probe.spawn()
        refs = [probe.anote(0), probe.note(1)]
        await asyncio.sleep(0)
        refs += [probe.anote(2), probe.note(3)]
        await asyncio.sleep(0)
        refs += [probe.inote(4), probe.anote(5)]
        await zc.get(refs)
        entries = await probe.entries()
        assert sorted(entries) == [0, 1, 2, 3, 4, 5]
        assert [i for i in entries if i not in (1, 3)] == [0, 2, 4, 5]
        assert entries.index(0) < entries.index(1) < entries.index(3)


async def test_two_thousand_calls_in_flight() -> None:
    probe: Any = await Probe.spawn()
    plain: Any = await Plain.spawn()
    refs = [probe.anote(i) if i % 2 else plain.echo(i) for i in range(2000)]
    assert await asyncio.gather(*refs) == list(range(2000))
    held = [probe.ahold("all") for _ in range(2000)]  # more than run at the same time
    assert await plain.echo("still there") == "still there"
    await probe.open("all")
    assert await zc.get(held) == ["all"] * 2000


# ---------------------------------------------------------------- limits and deadlines


async def test_max_pending_calls() -> None:
    probe: Any = await Probe.options(max_pending_calls=3).spawn()
    caller: Any = await Caller.spawn()
    refs = [probe.ahold("k") for _ in range(3)]
    for _ in range(2):
        with pytest.raises(zc.MailboxFull, match=r"3 unfinished calls.*max_pending_calls"):
            probe.anote("one more")
    with pytest.raises(zc.MailboxFull):
        probe.acount(1)
    assert await caller.call(probe, "anote", "another caller") == "another caller"
    await caller.call(probe, "open", "k")
    assert await zc.get(refs) == ["k"] * 3
    refs = [probe.anote(i) for i in range(3)]
    assert await zc.get(refs) == [0, 1, 2]
    refs[0] = probe.anote(3)
    with pytest.raises(RuntimeError, match="stays here"):
        probe.anote(Unpicklable())  # a call that was never sent does not count
    cancelled = probe.ahold("cancelled")
    cancelled.cancel()
    failed = probe.raising(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await failed
    assert await refs[0] == 3
    assert await zc.get([probe.anote(i) for i in range(3)]) == [0, 1, 2]


@pytest.mark.parametrize("way", ["native", "python", "queued"])
async def test_calls_that_cannot_be_sent_do_not_count(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Twice as many calls fail as may be unfinished, and then one succeeds."""
    plain: Any = await Plain.options(max_pending_calls=50).spawn()
    if way != "queued":
        await plain.echo(np.ones(1 << 14))  # its dtype is known from here on
    process = context.current()

    def fails(*_: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patched:
        if way == "native":  # calls on the Python path look arrays up in the store as well
            patched.setattr(process.store, "block_at", fails)
        elif way == "python":
            patched.setattr(Session, "send_call", fails)
        else:
            patched.setattr(RemoteActor, "_queue", fails)
        for index in range(100):
            with pytest.raises(MemoryError, match="injected"):
                if way == "native":
                    plain.echo(np.ones(1 << 14))
                else:
                    plain.echo([index]) if index % 2 else plain.echo.options(timeout=60)([index])
    assert not plain._remote.unfinished
    assert await plain.echo(1) == 1


async def test_a_queued_call_that_cannot_be_sent_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = await Plain.spawn()
    send, first = Session.send_call, [True]

    def fails_once(self: Session, call: Any, *rest: Any) -> None:
        if call.label == "Plain.echo" and first:
            first.clear()
            raise zc.ObjectLost("injected")
        send(self, call, *rest)

    monkeypatch.setattr(Session, "send_call", fails_once)
    refs = [plain.echo(index) for index in range(3)]
    async with asyncio.timeout(20):
        with pytest.raises(zc.ObjectLost, match="injected"):
            await refs[0]
        assert await zc.get(refs[1:]) == [1, 2]


async def test_deadline_of_a_call() -> None:
    probe: Any = await Probe.spawn()
    await probe.note("connected")
    ref = probe.ahold.options(timeout=0.05)("k")
    with pytest.raises(zc.DeadlineExceeded, match=r"Probe\.ahold on Probe\(.*0\.05 s"):
        await ref
    with pytest.raises(TimeoutError):
        await ref
    await probe.until("k cancelled")  # the callee was told to cancel
    assert await probe.anote.options(timeout=20)("in time") == "in time"

    class Declared:
        @zc.method(timeout=0.05)
        async def slow(self) -> None:
            await asyncio.Event().wait()

        @zc.method(timeout=0.05)
        async def stream(self) -> AsyncIterator[int]:
            yield 1
            await asyncio.Event().wait()

    declared: Any = await zc.spawn(Declared)
    with pytest.raises(zc.DeadlineExceeded):
        await declared.slow()
    got = []
    with pytest.raises(zc.DeadlineExceeded):
        async for item in declared.stream():
            got.append(item)
    assert got in ([1], [])
    waiting = asyncio.create_task(declared.slow.options(timeout=None)())
    with pytest.raises(zc.DeadlineExceeded):
        await declared.slow()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("seconds", [2e10, 1e300, 10**30])
async def test_a_deadline_that_never_comes(seconds: float) -> None:
    """Frames tell up to 292 years."""

    class Nested:
        async def outer(self, probe: Any) -> str:
            return str(await probe.anote("inherited"))

    probe: Any = await Probe.spawn()
    nested: Any = await zc.spawn(Nested)
    assert await probe.anote.options(timeout=seconds)("async") == "async"
    assert await probe.note.options(timeout=seconds)("sync") == "sync"
    assert await nested.outer.options(timeout=seconds)(probe) == "inherited"


async def test_deadline_of_a_queued_call() -> None:
    probe: Any = await Probe.spawn()
    held = probe.hold("k")
    await probe.until("k began")
    queued = probe.note.options(timeout=0.05)("never")
    with pytest.raises(zc.DeadlineExceeded):
        await queued
    await probe.open("k")
    assert await held == "k"
    assert await probe.note("next") == "next"
    assert "never" not in await probe.entries()


async def test_deadlines_are_inherited() -> None:
    class Nested:
        async def outer(self, probe: Any) -> str:
            return str(await probe.ahold("nested"))

        def outer_sync(self, probe: Any) -> str:
            async def inner() -> str:
                try:
                    return str(await probe.ahold("nested sync"))
                except zc.DeadlineExceeded:
                    await probe.anote.options(timeout=None)("inner deadline")
                    raise

            return asyncio.run(inner())

        async def deadline(self) -> bool:
            from zcactor.process.context import call_deadline

            return call_deadline.get() is None

    probe: Any = await Probe.spawn()
    nested: Any = await zc.spawn(Nested)
    with pytest.raises(zc.DeadlineExceeded):
        await nested.outer.options(timeout=0.1)(probe)
    await probe.until("nested cancelled")
    with pytest.raises(zc.DeadlineExceeded):
        await nested.outer_sync.options(timeout=0.1)(probe)
    await probe.until("nested sync cancelled")
    assert await nested.deadline(), "the next call has no deadline"


# ---------------------------------------------------------------- the end of an actor


async def test_maybe_executed() -> None:
    probe: Any = await Probe.spawn()
    running = probe.ahold("x")
    await probe.until("x began")
    task = asyncio.create_task(zc.kill(probe))
    with pytest.raises(zc.ActorDied) as died:
        await running
    assert died.value.maybe_executed
    assert "may have run" in str(died.value)
    await task
    with pytest.raises(zc.ActorDied) as died:
        await probe.anote(1)
    assert not died.value.maybe_executed
    assert "did not run" in str(died.value)


async def test_a_method_whose_own_call_was_not_sent_has_run_all_the_same() -> None:
    plain: Any = await Plain.spawn()
    callers = [await Caller.spawn() for _ in range(3)]
    first, second, third = map(untyped, callers)
    await plain.echo(1)
    await zc.kill(plain)
    for hops in (
        first.call(plain, "echo", 1),
        second.call(first, "call", plain, "echo", 1),
        third.call(second, "call", first, "call", plain, "echo", 1),
    ):
        with pytest.raises(zc.ActorDied) as died:
            await hops
        assert isinstance(died.value, zc.RemoteError)
        error: Any = died.value
        assert str(error).startswith("actor Plain(")
        assert error.maybe_executed
        assert "did not run" not in str(error)
        assert not error.original.maybe_executed
    with pytest.raises(zc.ActorDied) as own:
        await plain.echo(1)
    assert not own.value.maybe_executed
    with pytest.raises(zc.ActorDied) as argument:
        await first.call(second, "keep", plain.echo(2))
    assert not isinstance(argument.value, zc.RemoteError), "the call was not sent"
    assert not argument.value.maybe_executed


async def test_calls_beyond_the_credit_never_ran() -> None:
    dying: Any = await Dying.options(max_restarts=0).spawn()
    os.kill(await dying.pid(), signal.SIGSTOP)  # no credit comes back from here on
    refs = [dying.pid() for _ in range(4000)]
    await zc.kill(dying)
    outcomes = await asyncio.gather(*refs, return_exceptions=True)
    died = [outcome.maybe_executed for outcome in outcomes if isinstance(outcome, zc.ActorDied)]
    assert len(died) == 4000
    assert died == sorted(died, reverse=True), "those that were not sent are the last ones"
    assert died[0]
    assert not died[-1]


@pytest.mark.slow
async def test_a_connection_that_breaks_is_not_the_actors_death() -> None:
    plain: Any = await Plain.spawn()
    await plain.echo(1)
    session = plain._remote.session
    session.connection.abort()
    with pytest.raises((zc.ActorUnavailable, zc.ActorDied)):
        while True:
            await plain.echo(2)


async def test_failures_of_dead_actors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plain: Any = await Plain.spawn()
    await plain.echo(1)
    await zc.kill(plain)
    with pytest.raises(zc.ActorDied):
        await plain.echo(2)
    ref = plain.echo(3)
    with pytest.raises(zc.ActorDied):
        await ref
    gc.collect()
    assert not caplog.records, "all of them were awaited"
    plain.echo(4)
    gc.collect()
    await asyncio.sleep(0)
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost", "opened", "followed"])
async def test_calls_whose_actor_is_sought_do_not_wait_for_a_head_that_is_away(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    plain: Any = await Plain.spawn()
    await plain.echo(1)
    remote: RemoteActor = plain._remote
    process: Any = context.current()
    session = remote.session
    assert session is not None

    async def away(*_: object, **__: object) -> Any:
        raise zc.HeadUnavailable("/state/log.db", 10.0, "head")

    monkeypatch.setattr(process.head, "locate", away)
    if how == "lost":
        call = plain.echo(2)
        session.connection.abort()
    elif how == "opened":
        remote.leave(session)
        remote._left = True
        call = plain.echo(2)
    else:
        remote._follow(session)
        call = plain.echo(2)
    with pytest.raises(zc.ActorUnavailable, match="head has not answered for 10.0 s") as failed:
        await call
    assert failed.value.maybe_executed == (how == "lost")
    monkeypatch.undo()
    assert await plain.echo(3) == 3, "once the head is there"


@zc.actor(max_restarts=1)
class Dying:
    @zc.method
    def ping(self) -> None: ...

    @zc.method
    def pid(self) -> int:
        return os.getpid()

    @zc.method
    async def die(self) -> None:
        os._exit(3)


def end_unread(remote: RemoteActor, pid: int) -> None:
    """End an actor's process, and let the loop have read nothing of its connection for long."""
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(pid)
        selector.register(ended, selectors.EVENT_READ)
        os.kill(pid, signal.SIGKILL)
        assert selector.select(60.0)
        os.close(ended)
    session: Any = remote.session
    session.wire.heard = 0


@pytest.mark.slow
async def test_a_call_is_sent_at_once_where_nothing_lies_unread() -> None:
    """Also where nothing has come by the connection for long."""
    handle: Any = await Dying.spawn()
    await handle.pid()
    remote: Any = handle._remote
    session = remote.session
    sent, session.wire.heard = session.wire.sent, 0
    call = handle.pid()
    assert remote.session is session
    assert session.wire.sent == sent + 1
    await call


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in frames", "without credit"])
async def test_calls_that_a_busy_loop_has_not_sent_go_where_the_actor_lives_by_then(how: str) -> None:
    """Later calls of a turn are sent at its end, when the peer has ended."""
    handle: Any = await Dying.spawn()
    pid = await handle.pid()
    remote: RemoteActor = handle._remote
    assert remote.session is not None
    if how == "without credit":
        while remote.session.credits.take():
            pass
    first, *later = [handle.pid() for _ in range(5)]
    end_unread(remote, pid)
    if how == "without credit":
        later.append(first)
    else:  # it was sent at once
        await asyncio.wait([asyncio.ensure_future(first)])
    assert pid not in await asyncio.gather(*later)


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["loop", "another"])
async def test_calls_made_after_the_loop_was_busy_go_where_the_actor_lives_by_then(thread: str) -> None:
    """Nothing that the actor's process had to say was read, nor its end."""
    handle: Any = await Dying.spawn()
    pid = await handle.pid()
    end_unread(handle._remote, pid)
    refs: list[Any] = []
    if thread == "loop":
        refs.append(handle.pid())
    else:
        caller = threading.Thread(target=lambda: refs.append(handle.pid()))
        caller.start()
        caller.join()
    assert await refs[0] != pid


@pytest.mark.slow
async def test_a_retry_that_cannot_be_sent_says_what_the_first_attempt_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle: Any = await Dying.spawn()
    await handle.ping()
    process = context.current()
    connect = process.connections.connect

    async def to_the_agent_alone(peer: bytes) -> Any:
        if peer != process.sessions.head:
            raise zc.ConnectionLost("there is no way")
        return await connect(peer)

    call = handle.die.options(retries=1, idempotent=True)()
    monkeypatch.setattr(process.connections, "connect", to_the_agent_alone)
    with pytest.raises(zc.ActorUnavailable, match="there is no way") as failed:
        await call
    assert failed.value.maybe_executed


async def test_a_connection_that_fails_when_nobody_waits_any_more_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = context.current()
    loop = asyncio.get_running_loop()
    asked, answered = asyncio.Event(), asyncio.Event()

    async def connect(_: str) -> Any:
        asked.set()
        await answered.wait()
        raise zc.ConnectionLost("nobody is there")

    monkeypatch.setattr(process.endpoint, "connect", connect)
    told: list[Any] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, what: told.append(what))
    waiting = asyncio.create_task(process.connections.connect(b"nobody has this "))
    await asked.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting  # its traceback refers to the future that it waited for
    answered.set()
    while process.connections._connecting:
        await asyncio.sleep(0)
    gc.collect()
    loop.set_exception_handler(before)
    assert not told
