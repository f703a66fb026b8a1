"""The order in which calls start: each rule by hand, then random sequences against the rules."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zcactor.errors import RemoteError
from zcactor.execution.eager_task import start_eagerly
from zcactor.execution.mailbox import Mailbox
from zcactor.execution.threads import Threads
from zcactor.interface import MethodKind, MethodSpec
from zcactor.native import hot

SPECS = {
    kind: MethodSpec(0, "Fake", kind.name.lower(), kind, [], {})
    for kind in (MethodKind.SYNC, MethodKind.ASYNC, MethodKind.INLINE, MethodKind.GENERATOR)
}
SYNC, ASYNC, INLINE = MethodKind.SYNC, MethodKind.ASYNC, MethodKind.INLINE


@dataclass(eq=False)
class FakeCall:
    """A stand-in for an `Incoming`; runs until `go` is set."""

    session: Any
    kind: MethodKind
    number: int = 0
    blockers: int = 0
    stepped_out: bool = False
    dropped: bool = False
    cancelled: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    ago: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def let_go(self) -> None:
        self.go.set()
        self.ago.set()


class Bench:
    """A mailbox whose calls log their start and run until the test lets them go."""

    def __init__(
        self,
        sync_limit: int = 1,
        async_limit: int = 1000,
        *,
        steps_out: bool = False,
        eager: bool = False,
        threads: Threads | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.eager = eager
        self.log: list[FakeCall] = []
        self.running = {SYNC: 0, ASYNC: 0}
        self.most = {SYNC: 0, ASYNC: 0}
        self.lock = threading.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        self.entered: list[int] = []
        self.lost: list[BaseException] = []
        self.mailbox = Mailbox(
            "bench",
            self.loop,
            sync_limit,
            async_limit,
            steps_out=steps_out,
            run_sync=self.run_sync,
            start_async=self.start_async,
            run_inline=self.run_inline,
            lost=self.lost.append,
            enter_thread=lambda: self.entered.append(threading.get_ident()),
            threads=threads,
        )

    def count(self, kind: MethodKind, change: int) -> None:
        with self.lock:
            self.running[kind] += change
            self.most[kind] = max(self.most[kind], self.running[kind])

    def run_sync(self, call: Any, spec: MethodSpec, more: bool) -> None:
        if not call.cancelled:
            with self.lock:
                self.log.append(call)
            self.count(SYNC, 1)
            self.loop.call_soon_threadsafe(call.began.set)
            call.go.wait(20)
            self.count(SYNC, -1)
        self.loop.call_soon_threadsafe(call.ended.set)

    def start_async(self, call: Any, spec: MethodSpec, lane: hot.Lane) -> None:
        async def run() -> None:
            if not self.eager:
                begin()
            await call.ago.wait()
            self.count(ASYNC, -1)
            call.ended.set()
            self.mailbox.task_ended()

        def begin() -> None:
            self.mailbox.task_began(lane)
            self.log.append(call)
            self.count(ASYNC, 1)
            call.began.set()

        if self.eager:
            begin()
        self.tasks.append(self.loop.create_task(run()))

    def run_inline(self, call: Any, spec: MethodSpec) -> None:
        self.log.append(call)
        call.began.set()
        call.ended.set()

    # ---- steps of the tests

    def submit(self, session: Any, kind: MethodKind, *, blockers: int = 0, free: bool = False) -> FakeCall:
        call = FakeCall(session, kind, blockers=blockers)
        if free:
            call.let_go()
        self.mailbox.submit(call, SPECS[kind])  # type: ignore[arg-type]
        return call

    def unblock(self, call: FakeCall) -> None:
        if call.blockers:
            call.blockers = 0
            self.mailbox.unblocked(call, SPECS[call.kind])  # type: ignore[arg-type]

    def drop(self, call: FakeCall) -> bool:
        return self.mailbox.drop_held(call)  # type: ignore[arg-type]

    async def began(self, *calls: FakeCall) -> None:
        async with asyncio.timeout(20):
            for call in calls:
                await call.began.wait()

    async def turns(self, number: int = 10) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.mailbox.close()
        assert await self.loop.run_in_executor(None, self.mailbox.join, 20)
        await asyncio.gather(*self.tasks)


def in_order(log: list[FakeCall]) -> bool:
    """Whether calls of one caller started in their order.

    A sync call has started when the thread has taken it. Calls behind it that the loop starts may write into the log
    before the thread does.
    """
    threaded = [call.number for call in log if call.kind is SYNC]
    looped = [call.number for call in log if call.kind is not SYNC]
    late = [
        before.number
        for i, call in enumerate(log)
        if call.kind is SYNC
        for before in log[i + 1 :]
        if before.number < call.number
    ]
    return threaded == sorted(threaded) and looped == sorted(looped) and not late


def started(log: list[FakeCall], *calls: FakeCall) -> bool:
    """Whether exactly `calls` have started, which are of one caller and in this order."""
    for number, call in enumerate(calls):
        call.number = number
    return len(log) == len(calls) and set(log) == set(calls) and in_order(log)


@pytest.mark.parametrize("eager", [False, True])
async def test_starts_in_order_whatever_the_kinds(eager: bool) -> None:
    bench = Bench(eager=eager)
    calls = [bench.submit("a", (SYNC, ASYNC, INLINE)[i * i % 7 % 3], free=True) for i in range(200)]
    await bench.began(*calls)
    assert started(bench.log, *calls)
    await bench.close()


async def test_an_inline_call_waits_for_the_first_step_of_the_task_before_it() -> None:
    bench = Bench()
    first = bench.submit("a", ASYNC)
    second = bench.submit("a", INLINE)
    third = bench.submit("a", SYNC, free=True)
    assert bench.log == []
    await bench.began(first, second, third)
    assert bench.log == [first, second, third]
    first.let_go()
    await bench.close()


async def test_what_is_behind_a_task_starts_after_its_first_step() -> None:
    """A call behind a task does not start within the task's first step: the whole step comes first."""
    bench = Bench()
    order: list[str] = []
    call = FakeCall("a", ASYNC)

    def start(_: Any, spec: MethodSpec, lane: hot.Lane) -> None:
        async def run() -> None:
            bench.mailbox.task_began(lane)
            order.append("first step")
            await asyncio.sleep(0)
            bench.mailbox.task_ended()

        bench.tasks.append(bench.loop.create_task(run()))

    bench.mailbox._start_async = start
    bench.mailbox._run_inline = lambda call, spec: order.append("behind")
    bench.mailbox.submit(call, SPECS[ASYNC])  # type: ignore[arg-type]
    bench.mailbox.submit(FakeCall("a", INLINE), SPECS[INLINE])  # type: ignore[arg-type]
    await bench.turns()
    assert order == ["first step", "behind"]
    await bench.close()


async def test_sync_calls_run_one_at_a_time_and_hold_up_what_is_behind_them() -> None:
    bench = Bench()
    first, second = bench.submit("a", SYNC), bench.submit("a", SYNC)
    behind, inline = bench.submit("a", ASYNC), bench.submit("a", INLINE)
    await bench.began(first)
    await bench.turns()
    assert bench.log == [first]
    first.let_go()
    await bench.began(second, behind, inline)
    assert started(bench.log, first, second, behind, inline)
    for call in (second, behind):
        call.let_go()
    await bench.close()
    assert bench.most[SYNC] == 1
    assert len(bench.entered) == 1


async def test_callers_do_not_hold_each_other_up() -> None:
    bench = Bench()
    mine, held = bench.submit("a", SYNC), bench.submit("a", ASYNC, blockers=1)
    await bench.began(mine)
    theirs = bench.submit("b", ASYNC)
    await bench.began(theirs)
    assert held not in bench.log
    for call in (mine, held, theirs):
        call.let_go()
    bench.unblock(held)
    await bench.began(held)
    await bench.close()


@pytest.mark.parametrize("limit", [2, 3, 5])
async def test_as_many_threads_as_there_are_calls(limit: int) -> None:
    bench = Bench(sync_limit=limit)
    calls = [bench.submit("a", SYNC) for _ in range(limit + 3)]
    await bench.began(*calls[:limit])  # with one thread too few, this would wait for ever
    await bench.turns()
    assert len(bench.log) == limit
    for call in calls:
        call.let_go()
    await bench.began(*calls)
    await bench.close()
    assert bench.most[SYNC] == limit
    assert len(set(bench.entered)) == limit


async def test_work_that_threads_post_at_once_adds_no_thread_beyond_the_limit() -> None:
    for limit in (1, 2):
        bench = Bench(sync_limit=limit)
        together = threading.Barrier(8)
        done = threading.Semaphore(0)

        def post(bench: Bench = bench, together: threading.Barrier = together, done: Any = done) -> None:
            together.wait(20)
            for _ in range(50):
                bench.mailbox.post(done.release)

        threads = [threading.Thread(target=post) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await bench.loop.run_in_executor(None, thread.join, 20)
        for _ in range(400):
            assert done.acquire(timeout=20)
        assert len(bench.mailbox._threads) <= limit
        await bench.close()


async def test_idle_threads_are_used_again() -> None:
    bench = Bench(sync_limit=8)
    for _ in range(20):
        call = bench.submit("a", SYNC, free=True)
        await bench.began(call)
        async with asyncio.timeout(20):
            while bench.mailbox._open:
                await asyncio.sleep(0)
    assert len(bench.entered) == 1
    await bench.close()


async def test_the_limit_of_async_calls() -> None:
    bench = Bench(async_limit=2)
    calls = [bench.submit("a", ASYNC) for _ in range(5)]
    await bench.turns()
    assert bench.log == calls[:2]
    calls[1].let_go()
    await bench.began(calls[2])
    assert bench.log == calls[:3]
    for call in calls:
        call.let_go()
    await bench.began(*calls)
    assert bench.log == calls
    await bench.close()
    assert bench.most[ASYNC] == 2


def test_nothing_starts_after_the_end_of_the_loop() -> None:
    found = list[Bench]()

    async def begin() -> None:
        bench = Bench(async_limit=1)
        first, _ = (bench.submit("a", ASYNC) for _ in range(2))
        await bench.began(first)
        assert bench.log == [first]
        found.append(bench)
        bench.tasks.clear()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    (bench,) = found
    bench.mailbox.task_ended()  # as by the coroutine of a call that the garbage collector closes
    assert [len(lane.held) for lane in bench.mailbox.lanes.values()] == [1]
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    loop.close()


async def test_callers_take_turns_at_the_limit() -> None:
    bench = Bench(async_limit=1)
    gate = bench.submit("a", ASYNC)
    await bench.began(gate)
    greedy = [bench.submit("a", ASYNC, free=True) for _ in range(20)]
    modest = bench.submit("b", ASYNC, free=True)
    gate.let_go()
    await bench.began(modest, *greedy)
    assert bench.log.index(modest) <= 3
    assert [call for call in bench.log if call.session == "a"] == [gate, *greedy]
    await bench.close()


async def test_a_blocked_call_keeps_its_place() -> None:
    bench = Bench()
    first, blocked = bench.submit("a", SYNC, free=True), bench.submit("a", SYNC, blockers=1, free=True)
    behind = [bench.submit("a", kind, free=True) for kind in (SYNC, INLINE)]
    await bench.began(first)
    await bench.turns()
    assert bench.log == [first]
    bench.unblock(blocked)
    await bench.began(*behind)
    assert started(bench.log, first, blocked, *behind)
    await bench.close()


async def test_a_blocked_call_steps_out_where_there_are_async_methods() -> None:
    bench = Bench(steps_out=True)
    blocked = bench.submit("a", ASYNC, blockers=1, free=True)
    behind = [bench.submit("a", kind, free=True) for kind in (SYNC, ASYNC, INLINE)]
    await bench.began(*behind)
    assert started(bench.log, *behind)
    bench.unblock(blocked)
    await bench.began(blocked)
    await bench.close()


async def test_dropping_a_held_call_lets_those_behind_it_go() -> None:
    bench = Bench()
    blocked = bench.submit("a", SYNC, blockers=1)
    behind = bench.submit("a", INLINE)
    assert bench.drop(blocked)
    assert not bench.drop(blocked)
    assert bench.log == [behind]
    running = bench.submit("a", SYNC)
    await bench.began(running)
    assert not bench.drop(running)
    assert not bench.drop(FakeCall("stranger", SYNC))
    running.let_go()
    await bench.close()


async def test_a_caller_that_is_gone() -> None:
    bench = Bench()
    blocked = bench.submit("a", SYNC, blockers=1)
    behind = bench.submit("a", INLINE)
    bench.mailbox.forget("a")
    bench.mailbox.forget("a")
    bench.unblock(blocked)
    await bench.turns()
    assert bench.log == []
    del behind
    assert bench.mailbox.idle
    await bench.close()


async def test_posted_work_runs_in_the_thread_in_turn() -> None:
    bench = Bench()
    done: asyncio.Future[list[Any]] = bench.loop.create_future()
    call = bench.submit("a", SYNC)
    await bench.began(call)
    bench.mailbox.post(lambda: bench.loop.call_soon_threadsafe(done.set_result, [threading.get_ident(), *bench.log]))  # type: ignore[arg-type]
    await bench.turns()
    assert not done.done()
    call.let_go()
    assert await done == [bench.entered[0], call]
    await bench.close()


async def test_a_thread_survives_what_it_runs() -> None:
    bench = Bench()

    def defect() -> None:
        raise SystemExit(3)

    bench.mailbox.post(defect)
    call = bench.submit("a", SYNC, free=True)
    await bench.began(call)
    assert [type(error) for error in bench.lost] == [SystemExit]
    await bench.close()


async def test_an_exception_that_is_set_in_a_thread_is_noticed() -> None:
    """The exception comes up in the first call, and the thread goes on, or behind it, and the thread ends."""
    bench = Bench()
    noticed = asyncio.Event()

    def lost(error: BaseException) -> None:
        bench.lost.append(error)
        bench.loop.call_soon_threadsafe(noticed.set)

    bench.mailbox._lost = lost
    await bench.began(bench.submit("a", SYNC, free=True))
    (thread,) = bench.mailbox._threads
    assert (
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyError)) == 1
    )
    bench.submit("a", SYNC, free=True)
    async with asyncio.timeout(20):
        await noticed.wait()
    assert [type(error) for error in bench.lost] == [KeyError]
    await bench.close()


@pytest.mark.parametrize("threads", [None, Threads("shared", 1)], ids=["own", "shared"])
async def test_a_thread_that_cannot_begin_is_noticed(threads: Threads | None) -> None:
    bench = Bench(threads=threads)
    ended = asyncio.Event()

    def lost(error: BaseException) -> None:
        bench.lost.append(error)
        bench.loop.call_soon_threadsafe(ended.set)

    bench.mailbox._lost = lost
    bench.mailbox._enter_thread = lambda: sys.exit(3)
    bench.submit("a", SYNC, free=True)
    async with asyncio.timeout(20):
        await ended.wait()
    assert [type(error) for error in bench.lost] == [SystemExit]
    bench.mailbox.close()


async def test_a_system_without_threads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench(sync_limit=2)
    await bench.began(bench.submit("a", SYNC))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        waiting = bench.submit("a", SYNC, free=True)
        none = Bench()
        none.submit("a", SYNC, free=True)
    assert not bench.lost, "the thread that there is runs the call"
    bench.log[0].go.set()
    await bench.began(waiting)
    assert [str(error) for error in none.lost] == ["can't start new thread"]
    none.mailbox.close()
    await bench.close()


async def test_closing_ends_the_threads_after_what_is_queued() -> None:
    bench = Bench(sync_limit=2)
    calls = [bench.submit("a", SYNC) for _ in range(4)]
    held = bench.submit("a", INLINE, blockers=1)
    await bench.began(*calls[:2])
    bench.mailbox.close()
    bench.mailbox.close()
    assert not await bench.loop.run_in_executor(None, bench.mailbox.join, 0)
    for call in calls:
        call.let_go()
    await bench.close()
    assert len(bench.log) == 4
    assert set(bench.log) == set(calls), "and the held one is not among them"
    del held


# ---------------------------------------------------------------- shared threads


async def test_on_shared_threads_one_at_a_time_and_each_actor_in_its_own_context() -> None:
    threads = Threads("bench", 4)
    benches = [Bench(threads=threads) for _ in range(20)]
    kept: contextvars.ContextVar[list[int]] = contextvars.ContextVar("kept")
    seen: list[list[int]] = [[] for _ in benches]

    def work(index: int, number: int) -> None:
        kept.set([*kept.get([]), number])
        seen[index] = kept.get()

    for number in range(50):
        for index, bench in enumerate(benches):
            bench.mailbox.post(functools.partial(work, index, number))
    async with asyncio.timeout(20):
        while not all(len(each) == 50 for each in seen):
            await asyncio.sleep(0)
    assert seen == [list(range(50))] * 20
    assert all(len(bench.entered) == 1 for bench in benches), "one context each"
    calls = [bench.submit("a", SYNC) for bench in benches for _ in range(2)]
    for call in calls:
        call.let_go()
    await benches[0].began(*calls)
    assert all(bench.most[SYNC] == 1 for bench in benches)
    assert threads.count <= 20
    for bench in benches:
        await bench.close()
    threads.close()


async def test_methods_that_wait_for_each_other_on_shared_threads() -> None:
    threads = Threads("bench", 1)
    benches = [Bench(threads=threads) for _ in range(8)]
    calls = [bench.submit("a", SYNC) for bench in benches]
    await benches[0].began(*calls)  # all of them run at once, on threads that were added
    for bench, call in zip(benches, calls, strict=True):
        call.let_go()
        await bench.close()
    threads.close()


# ---------------------------------------------------------------- random sequences


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.sampled_from("abc"),
            st.sampled_from([SYNC, ASYNC, INLINE]),
            st.booleans(),
            st.booleans(),
        ),
        st.tuples(st.sampled_from(["unblock", "finish", "cancel"]), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=OPERATIONS,
    sync_limit=st.integers(1, 3),
    async_limit=st.integers(1, 4),
    steps_out=st.booleans(),
    eager=st.booleans(),
    shared=st.booleans(),
)
def test_random_sequences(
    operations: list[Any], sync_limit: int, async_limit: int, steps_out: bool, eager: bool, shared: bool
) -> None:
    async def run() -> None:
        threads = Threads("bench", 1) if shared else None
        bench = Bench(sync_limit, async_limit, steps_out=steps_out, eager=eager, threads=threads)
        calls: list[FakeCall] = []
        actions: dict[str, Callable[[FakeCall], Any]] = {"unblock": bench.unblock, "finish": FakeCall.let_go}
        for operation, *arguments in operations:
            if operation == "submit":
                session, kind, blocked, free = arguments
                call = bench.submit(session, kind, blockers=int(blocked), free=free)
                call.stepped_out = blocked and steps_out
                call.number = len(calls)
                calls.append(call)
            elif operation == "turn":
                await bench.turns(arguments[0])
            elif calls:
                call = calls[arguments[0] % len(calls)]
                if operation != "cancel":
                    actions[operation](call)
                elif not call.began.is_set():
                    call.cancelled = call.dropped = bench.drop(call) or call.cancelled
        for call in calls:  # nothing holds a call up from here on: all calls that were not dropped must start
            call.let_go()
            bench.unblock(call)
        wanted = [call for call in calls if not call.dropped]
        async with asyncio.timeout(20):
            for call in wanted:
                await call.ended.wait()
        await bench.close()
        assert sorted(call.number for call in bench.log) == [call.number for call in wanted], "each once, and no other"
        for session in "abc":
            if sync_limit == 1:  # several threads take calls in order, but log them in any order
                assert in_order([call for call in bench.log if call.session == session and not call.stepped_out])
        assert bench.most[SYNC] <= sync_limit
        assert bench.most[ASYNC] <= async_limit
        assert bench.mailbox.idle
        if threads is not None:
            threads.close()

    asyncio.run(run())


async def test_work_of_the_process_runs_behind_the_calls_that_are_queued() -> None:
    bench = Bench()
    call = bench.submit("a", SYNC)
    ran: list[int] = []

    def fails() -> None:
        ran.append(threading.get_ident())
        raise StopIteration(7)

    waiting = asyncio.ensure_future(bench.mailbox.run(fails))
    await asyncio.sleep(0)
    assert not ran
    call.let_go()
    with pytest.raises(RemoteError, match="StopIteration: 7"):
        await waiting
    assert ran != [threading.get_ident()]
    assert await bench.mailbox.run(lambda: 5) == 5
    bench.mailbox.close()


class EndingAtOnce:
    """A mailbox with a limit of one call, whose calls end in their first step. Those with a negative number wait for
    the gate, and those with `LATER` for a turn of the loop."""

    LATER = 1000

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ran: list[tuple[int, int]] = []
        self.depths: set[int] = set()
        self.gate: asyncio.Future[None] = loop.create_future()

        def start(call: Any, _: MethodSpec, lane: hot.Lane) -> None:
            start_eagerly(self._run(call, lane), loop, contextvars.copy_context())

        def nothing(*_: Any) -> None: ...

        self.mailbox = Mailbox(
            "bench", loop, 1, 1, steps_out=True, run_sync=nothing, start_async=start, run_inline=nothing, lost=nothing,
            enter_thread=nothing, threads=None,
        )  # fmt: skip

    async def _run(self, call: Any, lane: hot.Lane) -> None:
        self.mailbox.task_began(lane)
        if call.number < 0:
            await self.gate
        elif call.number == self.LATER:
            await asyncio.sleep(0)
        self.ran.append((call.session, call.number))
        self.depths.add(len(inspect.stack(0)))
        self.mailbox.task_ended()

    def submit(self, caller: int, number: int) -> None:
        call: Any = FakeCall(caller, ASYNC, number)
        self.mailbox.submit(call, SPECS[ASYNC])

    async def until_ran(self, count: int) -> None:
        """Let the first call end, and wait until so many have run."""
        self.gate.set_result(None)
        async with asyncio.timeout(20):
            while len(self.ran) < count:
                await asyncio.sleep(0)
        assert self.mailbox.idle and self.mailbox.tasks.running == 0


async def test_calls_of_many_callers_that_end_in_their_first_step() -> None:
    """Each of them frees the limit for the next: they run one behind the other, and not inside of each other."""
    bench = EndingAtOnce()
    callers = 400
    for number in (-1, 0, 1):
        for caller in range(1 if number < 0 else callers):
            bench.submit(caller, number)
    await bench.until_ran(1 + 2 * callers)
    ran = bench.ran
    assert len(bench.depths) <= 3, "the stack does not grow with the callers"
    assert ran[0] == (0, -1) and {number for _, number in ran[1 : callers + 1]} == {0}, "callers take turns"


@pytest.mark.parametrize("others", ["idle", "blocked"])
async def test_a_call_that_waits_for_the_limit_costs_as_many_steps_however_many_other_callers_there_are(
    others: str,
) -> None:
    """Callers without calls, or with calls that wait for their arguments."""
    waiting = 50

    async def steps_beside(callers: int) -> int:
        bench, steps = EndingAtOnce(), 0
        bench.mailbox.steps_out = False
        for caller in range(callers):
            call: Any = FakeCall(caller, INLINE, blockers=int(others == "blocked"))
            bench.mailbox.submit(call, SPECS[INLINE])
        bench.submit(-1, -1)
        for caller in range(waiting):
            bench.submit(callers + caller, 0)
            bench.submit(callers + caller, bench.LATER)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal steps
            if frame.f_code.co_filename != inspect.getfile(Mailbox):
                return None
            steps += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            bench.gate.set_result(None)
            while len(bench.ran) < 1 + 2 * waiting:
                await asyncio.sleep(0)
        finally:
            sys.settrace(before)
        bench.mailbox.close()
        return steps

    assert await steps_beside(400) < 2 * await steps_beside(10)
