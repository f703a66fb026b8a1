"""An actor's methods end to end: threads, tasks, limits, groups, and exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Faulty, Plain, Probe, Unusual
from zcactor.api.remote_method import RemoteMethod
from zcactor.process import context
from zcactor.process.cluster import WorkerService
from zcactor.rpc.session import Session

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2) as node:
        yield node


# ---------------------------------------------------------------- where methods run


async def test_sync_methods_share_the_constructors_thread() -> None:
    probe: Any = await Probe.spawn()
    assert await zc.get([probe.threads() for _ in range(20)]) == [(True, False)] * 20
    assert await probe.on_loop()


async def test_sync_methods_run_one_at_a_time_and_async_ones_meanwhile() -> None:
    probe: Any = await Probe.spawn()
    caller: Any = await Caller.spawn()
    first, second = probe.hold("1"), probe.hold("2")
    await probe.until("1 began")
    assert await caller.call(probe, "anote", "meanwhile") == "meanwhile"
    assert await caller.call(probe, "inote", "inline") == "inline"
    assert "2 began" not in await probe.entries()
    await probe.open("2")
    await probe.open("1")
    assert await zc.get([first, second]) == ["1", "2"]
    assert await probe.entries() == ["1 began", "meanwhile", "inline", "1 ended", "2 began", "2 ended"]


async def test_a_method_that_is_not_there_with_an_argument_that_comes_later() -> None:
    probe: Any = await Probe.spawn()
    caller: Any = await Caller.spawn()
    known = probe.anote
    spec = copy.copy(known._spec)
    spec.code = 200
    value, another = caller.call(probe, "ahold", "k"), caller.call(probe, "ahold", "another")
    with pytest.raises(AttributeError, match="no method number 200"):
        await RemoteMethod(known._actor, spec)(value)
    await probe.open("k")
    assert await value == "k"
    await probe.open("another")
    assert await another == "another", "by the connection on which the value came"


async def test_async_methods_interleave() -> None:
    probe: Any = await Probe.spawn()
    refs = [probe.ahold(str(i)) for i in range(50)]
    await probe.until(*(f"{i} began" for i in range(50)))
    for i in reversed(range(50)):
        await probe.open(str(i))
    assert await zc.get(refs) == [str(i) for i in range(50)]


async def test_max_concurrency_of_async_methods() -> None:
    probe: Any = await Probe.options(max_concurrency=3).spawn()
    refs = [probe.ahold(str(i)) for i in range(6)]
    await probe.until("0 began", "1 began", "2 began")
    assert not {"3 began", "4 began"} & set(await probe.entries())
    await probe.open("1")
    await probe.until("3 began")
    assert "4 began" not in await probe.entries()
    for i in range(6):
        await probe.open(str(i))
    assert await zc.get(refs) == [str(i) for i in range(6)]


async def test_max_concurrency_of_sync_methods() -> None:
    @zc.actor(max_concurrency=3)
    class Parallel:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(3)
            self.running = 0
            self.most = 0
            self.lock = threading.Lock()

        def meet(self) -> int:
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
            self.barrier.wait(20)
            with self.lock:
                self.running -= 1
            return threading.get_ident()

        def report(self) -> int:
            return self.most

    handle: Any = await Parallel.spawn()
    threads = set(await zc.get([handle.meet() for _ in range(3)]))
    assert len(threads) == 3
    threads |= set(await zc.get([handle.meet() for _ in range(30)]))
    assert len(threads) == 3
    assert await handle.report() == 3


@pytest.mark.parametrize("named", [False, True])
async def test_leases_on_arguments_of_third_processes_go_back_ahead_of_the_answer(named: bool) -> None:
    @zc.actor
    class Maker:
        def make(self) -> np.ndarray[Any, Any]:
            return np.ones(1 << 16)

    @zc.actor
    class Watched:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []
            self.thread = 0
            send = Session.send_releases

            def note(session: Any) -> None:
                unanswered = any(other.incoming for other in context.current().sessions.all())
                self.seen.append((threading.get_ident(), unanswered))
                send(session)

            Session.send_releases = note  # type: ignore[method-assign, assignment]

        def total(self, array: Any) -> float:
            self.thread = threading.get_ident()
            return float(array.sum())

        def found(self) -> list[bool]:
            return [each == (self.thread, True) for each in self.seen]

    maker: Any = await Maker.spawn()
    watched: Any = await Watched.spawn()
    for _ in range(4):  # the first results come by way of this process, until the two are connected
        result = maker.make()
        assert await (watched.total(array=result) if named else watched.total(result)) == 1 << 16
        del result
    found = await watched.found()
    assert found and all(found)


@pytest.mark.slow
async def test_a_thousand_shared_actors_have_few_threads() -> None:
    class Small:
        def __init__(self, number: int) -> None:
            self.kept = np.full(1 << 14, number)

        def work(self) -> tuple[int, int, bool]:
            array = np.full(1 << 14, 2)  # an array from the store: NumPy allocates there in the actor's context
            inside = context.current().store.block_at(array.ctypes.data, array.ctypes.data + array.nbytes) is not None
            return threading.active_count(), int(self.kept[0]), inside

    spawn = zc.actor(process="shared")(Small).spawn  # type: ignore[attr-defined, unused-ignore]
    actors: list[Any] = await asyncio.gather(*(spawn(number) for number in range(1000)))
    told = await zc.get([actor.work() for actor in actors])
    assert max(count for count, _, _ in told) <= 64
    assert [number for _, number, _ in told] == list(range(1000))
    assert all(inside for _, _, inside in told)


async def test_fair_between_callers_at_the_limit() -> None:
    probe: Any = await Probe.options(max_concurrency=1).spawn()
    caller: Any = await Caller.spawn()
    mine = [probe.ahold("gate"), *(probe.anote_after("gate", ("mine", i)) for i in range(50))]
    await probe.until("gate began")
    theirs = caller.call(probe, "anote", "theirs")
    await caller.call(probe, "entries")  # the call has arrived
    await probe.open("gate")
    assert await theirs == "theirs"
    await zc.get(mine)
    entries = await probe.entries()
    assert entries.index("theirs") < entries.index(("mine", 49))


async def test_concurrency_groups() -> None:
    @zc.actor(concurrency_groups={"io": 2, "solo": 1}, max_concurrency=1)
    class Grouped:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(3)
            self.opened = asyncio.Event()
            self.io = 0
            self.most = 0

        def meet(self) -> str:
            self.barrier.wait(20)
            return "default"

        @zc.method(concurrency_group="io")
        def meet_io(self) -> str:
            self.barrier.wait(20)
            return "io"

        @zc.method(concurrency_group="solo")
        async def solo(self) -> int:
            self.io += 1
            self.most = max(self.most, self.io)
            await self.opened.wait()
            self.io -= 1
            return self.most

        async def open(self) -> None:
            self.opened.set()

    handle: Any = await Grouped.spawn()
    assert await zc.get([handle.meet(), handle.meet_io(), handle.meet_io()]) == ["default", "io", "io"]
    refs = [handle.solo() for _ in range(5)]
    await handle.open()  # in the default group, which the other calls do not hold up
    assert await zc.get(refs) == [1] * 5


async def test_unusual_methods() -> None:
    handle: Any = await zc.spawn(Unusual)
    assert await handle.inherited() == "inherited"
    assert await handle.wrapped(3) == 3
    with pytest.raises(ValueError, match="wrapped"):
        await handle.wrapped_failing()
    with pytest.raises(TypeError):
        handle.wrapped()
    assert await handle.cached(4) == 4
    with pytest.raises(TypeError):
        handle.cached(4, 5)
    assert await handle.add_five(3) == 8
    assert await handle.kind(3) == "int"
    assert await handle.kind("x") == "anything"
    assert await handle.get("a") == 1
    assert await handle.get("b", 7) == 7
    assert await handle.returns_nothing() is None
    assert await handle.nested(3) == 6
    cancelled = handle.wrapped(1)
    cancelled.cancel()
    assert await handle.wrapped(2) == 2


async def test_sync_calls_run_between_the_steps_of_a_generator() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.count(10_000)
    assert await anext(stream) == 0
    async with asyncio.timeout(20):
        assert await probe.note("between") == "between"
    assert await anext(stream) == 1
    items = [e for e in await probe.entries() if type(e) is tuple]
    assert len(items) < 100
    await stream.aclose()
    await probe.until("stream closed")


async def test_generators_that_will_not_close() -> None:
    class Stubborn:
        def stubborn(self) -> Any:
            while True:
                try:
                    yield 1
                except GeneratorExit:
                    yield 2

        async def raising(self) -> AsyncIterator[int]:
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                raise ValueError("while closing")

        def not_a_generator(self) -> Any:
            return iter([1])

        def fine(self) -> str:
            return "fine"

    handle: Any = await zc.spawn(Stubborn)
    for method in (handle.stubborn, handle.raising):
        stream = method()
        assert await anext(stream) == 1
        await stream.aclose()
        async with asyncio.timeout(20):
            assert await handle.fine() == "fine"
    async with asyncio.timeout(20):
        await zc.stop(handle)


async def test_the_current_task_is_a_task_from_the_first_step() -> None:
    class Curious:
        async def look(self) -> tuple[Any, ...]:
            task: Any = asyncio.current_task()
            return task.get_loop() is asyncio.get_running_loop(), bool(repr(task)), task.done(), len(task.get_stack())

        async def coroutine(self) -> bool:
            task: Any = asyncio.current_task()
            return asyncio.iscoroutine(task.get_coro())

        async def callback(self) -> str:
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def other() -> str:
                return await done

            task: Any = asyncio.current_task()
            task.add_done_callback(lambda _: None)
            waiter = asyncio.create_task(other())
            done.set_result("done")
            return await waiter

        async def cancels_itself(self) -> str:
            task: Any = asyncio.current_task()
            task.cancel()
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                return "cancelled"
            return "not cancelled"

        async def tools(self) -> str:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.001)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(asyncio.sleep(0, "tools"))
            return task.result()

    handle: Any = await zc.spawn(Curious)
    assert await handle.tools() == "tools"
    assert await handle.cancels_itself() == "cancelled"
    assert await handle.callback() == "done"
    *looks, frames = await handle.look()
    assert looks == [True, True, False] and frames >= 1  # from Python 3.12 on also those that run the task
    assert await handle.coroutine()


# ---------------------------------------------------------------- exceptions


class Strange(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("only a message")
        self.sum = a + b


@pytest.mark.slow
async def test_exceptions_keep_their_type_and_tell_where() -> None:
    class Raiser:
        def sync(self) -> None:
            raise Strange(1, 2)

        async def coroutine(self) -> None:
            await self._deeper()

        async def _deeper(self) -> None:
            try:
                raise KeyError("cause")
            except KeyError as error:
                raise FileNotFoundError(2, "no such", "name.txt") from error

        @zc.method(inline=True)
        def inline(self) -> None:
            raise ZeroDivisionError

        def pid(self) -> int:
            import os

            return os.getpid()

    handle: Any = await zc.actor(Raiser).options(name="raiser").spawn()  # type: ignore[attr-defined, unused-ignore]
    with pytest.raises(Strange) as strange:
        await handle.sync()
    error: Any = strange.value
    assert isinstance(error, zc.RemoteError)
    assert error.sum == 3  # type: ignore[attr-defined]
    assert error.type_name.endswith("Strange")
    assert error.message == "only a message"
    assert error.actor == "Raiser(raiser)"
    assert error.pid == await handle.pid()
    assert error.host
    assert "raise Strange(1, 2)" in error.remote_traceback
    assert "zcactor/execution" not in error.remote_traceback
    assert error.remote_traceback.splitlines()[-1] in error.__notes__[-1]
    with pytest.raises(FileNotFoundError) as missing:
        await handle.coroutine()
    assert (missing.value.errno, missing.value.filename) == (2, "name.txt")
    assert "KeyError: 'cause'" in missing.value.remote_traceback  # type: ignore[attr-defined]
    assert "_deeper" in missing.value.remote_traceback  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        await handle.inline()
    await zc.stop(handle)


async def test_an_exception_passed_on_names_where_it_began() -> None:
    plain: Any = await Plain.spawn()
    caller: Any = await Caller.spawn()
    with pytest.raises(ValueError, match="deep") as caught:
        await caller.call(caller, "call", plain, "fail", "deep")
    error: Any = caught.value
    assert isinstance(error, zc.RemoteError)
    assert error.type_name == "ValueError"
    assert error.message == "deep"
    assert "in fail" in error.remote_traceback
    assert "in call" in error.remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        BaseException("base"),
        StopIteration(1),
        StopAsyncIteration(),
        BaseExceptionGroup("group", [SystemExit(1), ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_exceptions_that_would_end_the_caller(error: BaseException) -> None:
    probe: Any = await Probe.spawn()
    for method in (probe.raising, probe.araising):
        with pytest.raises(Exception, match=type(error).__name__) as caught:
            await method(error)
        assert isinstance(caught.value, zc.RemoteError | RuntimeError)
        assert not isinstance(caught.value, StopIteration | StopAsyncIteration)
        assert await zc.get([probe.note(1), probe.anote(2)]) == [1, 2]


async def test_recursion_and_big_messages() -> None:
    class Deep:
        def recurse(self) -> Any:
            return self.recurse()

        async def arecurse(self) -> Any:
            return await self.arecurse()

        def big(self, n: int) -> None:
            raise ValueError("x" * n)

        def surrogate(self) -> None:
            raise ValueError("\ud800")

        def exits(self) -> None:
            sys.exit(3)

        def with_array(self, n: int) -> None:
            error = ValueError("array")
            error.array = np.arange(n)  # type: ignore[attr-defined]
            raise error

        def fine(self) -> str:
            return "fine"

    handle: Any = await zc.spawn(Deep)
    for method in (handle.recurse, handle.arecurse):
        with pytest.raises(RecursionError):
            await method()
    with pytest.raises(ValueError, match="xxx") as caught:
        await handle.big(1_000_000)
    assert len(caught.value.args[0]) == 1_000_000
    with pytest.raises(ValueError, match="ud800"):
        await handle.surrogate()
    with pytest.raises(zc.RemoteError, match="SystemExit: 3"):
        await handle.exits()
    with pytest.raises(ValueError, match="array") as caught:
        await handle.with_array(50_000)
    np.testing.assert_array_equal(caught.value.array, np.arange(50_000))  # type: ignore[attr-defined]
    assert await handle.fine() == "fine"


async def test_an_actor_method_that_raises_our_own_errors() -> None:
    class Own:
        async def nested(self, handle: Any) -> Any:
            return await handle.echo(1)

        def memory(self) -> None:
            zc.empty(1 << 50)

    plain: Any = await Plain.spawn()
    await zc.kill(plain)
    own: Any = await zc.spawn(Own)
    with pytest.raises(zc.ActorDied) as died:
        await own.nested(plain)
    assert "Plain(" in died.value.actor or "Own(" in died.value.actor
    with pytest.raises(zc.OutOfMemory) as full:
        await own.memory()
    assert full.value.requested >= 1 << 50
    assert isinstance(full.value, MemoryError)


@pytest.mark.parametrize("step", ["pack", "share", "export", "grant", "encode", "reserve"])
@pytest.mark.parametrize("name", ["sync", "coroutine", "inline", "stream", "astream"])
async def test_an_answer_that_cannot_be_sent_is_an_error_at_the_caller(name: str, step: str) -> None:
    handle: Any = await zc.spawn(Faulty)
    with pytest.raises(MemoryError, match="injected"):
        await finished(getattr(handle, name)(step, 1))
    assert await handle.fine() == "fine"
    await zc.kill(handle)


@pytest.mark.slow
async def test_where_no_answer_can_be_sent_the_connection_ends() -> None:
    async def ends(name: str, step: str) -> None:
        handle: Any = await zc.spawn(Faulty)
        with pytest.raises(zc.ActorUnavailable) as caught:
            await finished(getattr(handle, name)(step, 1 << 30))
        assert caught.value.maybe_executed
        await zc.kill(handle)

    names, steps = ("sync", "coroutine", "inline", "stream", "astream"), ("encode", "reserve", "flush_now")
    await asyncio.gather(*(ends(name, step) for name in names for step in steps))


async def finished(answer: Any) -> None:
    """Wait for the end of a call or a stream."""
    async with asyncio.timeout(20):
        if isinstance(answer, zc.ObjectRef):
            await answer
        else:
            async for _ in answer:
                pass


# ---------------------------------------------------------------- output


async def test_output_is_shown_with_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    class Printer:
        def say(self, text: str) -> int:
            import os

            print(text)
            print(f"err {text}", file=sys.stderr)
            return os.getpid()

    handle: Any = await zc.spawn(Printer)
    pid = await handle.say("hello\nworld")
    await zc.stop(handle)
    out = err = ""
    async with asyncio.timeout(20):
        while f"(Printer pid={pid}) world" not in out or f"(Printer pid={pid}) world" not in err:
            await zc.nodes()
            captured = capfd.readouterr()
            out, err = out + captured.out, err + captured.err
    assert f"(Printer pid={pid}) hello\n(Printer pid={pid}) world\n" in out
    assert f"(Printer pid={pid}) err hello\n" in err


async def test_names_that_terminals_would_obey(capfd: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[31mRed\n\u202e" + "x" * 100
    label = "\\x1b[31mRed\\n\\u202e" + "x" * 100

    class Body:
        def fail(self) -> None:
            raise ValueError("text")

        def comm(self) -> str:
            print("printed", flush=True)
            return Path("/proc/self/comm").read_text()

    actor: Any = await zc.actor(name=f"name{bad}")(type(bad, (Body,), {})).spawn()  # type: ignore[attr-defined, unused-ignore]
    shown_class, shown_name = label[:77] + "...", f"name{label}"[:77] + "..."
    assert repr(actor) == f"<handle of {shown_class}({shown_name})>"
    with pytest.raises(ValueError, match="text") as caught:
        await actor.fail()
    assert caught.value.actor == f"{shown_class}({shown_name})"  # type: ignore[attr-defined]
    assert (await actor.comm()).startswith("zc \\x1b[31mRed")
    with pytest.raises(AttributeError) as missing:
        actor.missing
    out = ""
    async with asyncio.timeout(20):
        while "printed" not in out:
            await zc.nodes()
            out += capfd.readouterr().out
    for text in (out, str(missing.value), *caught.value.__notes__):
        assert "\x1b" not in text
        assert "\u202e" not in text
    (told,) = [each for each in await zc.actors() if each.name == f"name{bad}"]
    assert told.class_name == shown_class
    await zc.stop(actor)


async def test_a_call_that_is_refused_does_not_run_when_its_argument_comes() -> None:
    caller: Any = await Caller.spawn()
    probe: Any = await Probe.spawn()
    running = caller.call(probe, "ahold", "1")
    await probe.until("1 began")
    stopping = asyncio.ensure_future(zc.stop(caller))
    with contextlib.suppress(zc.ActorDied):
        while True:  # until the stop has begun
            await caller.call(probe, "anote", "before")
    later = probe.ahold("2")
    with pytest.raises(zc.ActorDied, match="stopped before the call started") as refused:
        await caller.call(probe, "anote", later)
    assert not refused.value.maybe_executed
    await probe.until("2 began")
    await probe.open("2")
    assert await later == "2"
    await probe.open("1")
    assert await running == "1"
    await stopping
    assert "2" not in await probe.entries()


async def test_a_call_that_comes_while_the_process_leaves_is_answered_by_who_knows_of_restarts(tmp_path: Path) -> None:
    @zc.actor(max_restarts=1)
    class Slow:
        async def pid(self) -> int:
            return os.getpid()

        async def close(self) -> None:
            (tmp_path / "closing").touch()
            while not (tmp_path / "go on").exists():
                await asyncio.sleep(0.001)

    actor: Any = await Slow.spawn()
    pid = await actor.pid()
    process = context.current()
    leaving = process.requests.ask(process.sessions.used[actor._remote.location[0]], WorkerService.leave, 20.0)
    while not (tmp_path / "closing").exists():
        await asyncio.sleep(0.001)
    late = actor.pid()
    (tmp_path / "go on").touch()
    with pytest.raises(zc.ActorUnavailable, match="it is being restarted"):
        await late
    with contextlib.suppress(zc.ConnectionLost):  # the process may have answered before it ended
        await leaving
    while True:
        with contextlib.suppress(zc.ActorUnavailable):
            assert await actor.pid() != pid
            break
    await zc.kill(actor)
