"""The suite that every path of a `Session` must pass.

A path joins by a subclass that has the fixture ``connections``: two connected ends that are not started. Where they
map the arenas it is one of `MappingSessionSuite`, and the processes have the names of the ``stores``; otherwise it is
one of `SessionSuite`.
After every case the two ends are held against the model of `tests.conformance.talk`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.conformance.connection import turns
from tests.conformance.talk import (
    ACTOR,
    DEPTH,
    STORE_NBYTES,
    WATCHDOG,
    Held,
    Promise,
    Talk,
    TalkHub,
    parts_of,
    plain,
)
from tests.conformance.violations import KEY, NONE, TARGET, VIOLATIONS, WORD, Peer
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.objectstore.store import Store
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Status

__all__ = ["MappingSessionSuite", "SessionSuite"]


def abort_near(talk: Talk) -> None:
    """Abort at the caller's end."""
    talk.a.connection.abort()


def abort_far(talk: Talk) -> None:
    """Abort at the callee's end."""
    talk.b.connection.abort()


def break_the_protocol(talk: Talk) -> None:
    """A release of nothing, which the caller refuses."""
    talk.b.release(99)


ENDS = [abort_near, abort_far, break_the_protocol]


class SessionSuite:
    """The tests that every path of a session must pass.

    Fixtures of a subclass:
        connections: see the module.
    """

    maps = False
    """Whether arrays of the stores go by reference."""

    @pytest.fixture
    def stores(self) -> tuple[Store | None, Store | None]:
        """The stores of both ends; None where arrays do not go by reference."""
        if not self.maps:
            return None, None
        return Store(STORE_NBYTES, secrets.token_bytes(16)), Store(STORE_NBYTES, secrets.token_bytes(16))

    @pytest.fixture
    async def talk(self, connections: tuple[Any, Any], stores: Any) -> AsyncIterator[Talk]:
        """The two sessions, which are held against the model at the end."""
        talk = Talk(connections, stores)
        yield talk
        await talk.check()
        await talk.close()

    # ---- calls and answers

    async def test_calls_and_answers(self, talk: Talk) -> None:
        values = [None, True, -5, 1 << 40, 2.5, "text", b"bytes", "\u00e4" * 300, b"x" * 3000]
        calls = [talk.call(value, number) for number, value in enumerate(values)]
        for incoming in await talk.received(len(values)):
            talk.answer(incoming, plain(incoming)[0])
            talk.answer(incoming, "again")  # ignored: a call is answered once
        await talk.check()
        assert [call.result() for call in calls] == values
        assert [plain(incoming)[1] for incoming in talk.hubs[1].received] == list(range(len(values))), "in order"

    async def test_errors(self, talk: Talk) -> None:
        statuses = [int(status) for status in (Status.ERROR, Status.NO_SUCH_ACTOR, Status.CANCELLED)]
        calls = [talk.call(status) for status in statuses]
        for incoming in await talk.received(3):
            talk.answer(incoming, "why", status=plain(incoming)[0])
        await talk.check()
        assert [call.status for call in calls] == statuses

    async def test_more_calls_than_credits(self, talk: Talk) -> None:
        def echo(incoming: Incoming) -> None:
            talk.answer(incoming, plain(incoming)[0])

        talk.hubs[1].answer = echo
        calls = [talk.call(number) for number in range(20 * DEPTH)]
        await talk.check()
        assert [call.result() for call in calls] == list(range(20 * DEPTH))
        assert [plain(incoming)[0] for incoming in talk.hubs[1].received] == list(range(20 * DEPTH))

    async def test_what_is_not_answered_stays_open(self, talk: Talk) -> None:
        calls = [talk.call(number) for number in range(DEPTH // 2)]
        for incoming in (await talk.received(DEPTH // 2))[::2]:
            talk.answer(incoming)
        await talk.check()
        assert [call.done for call in calls] == [True, False] * (DEPTH // 4)

    async def test_cancel(self, talk: Talk) -> None:
        first, second, third = (talk.call(number) for number in range(3))
        talk.a.cancel(first)
        talk.a.cancel(first)
        await talk.received(3)
        await talk.until(lambda: talk.hubs[1].cancelled)
        assert talk.hubs[1].cancelled == talk.hubs[1].received[:1]
        for incoming, status in zip(talk.hubs[1].received, (Status.CANCELLED, Status.OK, Status.OK), strict=True):
            talk.answer(incoming, status=status)
        await talk.check()
        talk.a.cancel(second)  # too late: does nothing
        await talk.check()
        assert (first.status, second.status, third.status) == (Status.CANCELLED, Status.OK, Status.OK)
        assert len(talk.hubs[1].cancelled) == 1

    # ---- promises that are arguments elsewhere

    async def test_pushes(self, talk: Talk) -> None:
        values = [None, 7, "text", b"x" * 3000]
        for number, value in enumerate(values, 1):
            talk.push(KEY + number, WORD, value)
        await talk.until(lambda: len(talk.hubs[1].pushed) == len(values))
        await talk.check()
        assert [entry[:4] for entry in talk.hubs[1].pushed] == [
            (WORD, KEY + number, Status.OK, value) for number, value in enumerate(values, 1)
        ]
        assert talk.hubs[0].counters.pushes == len(values)

    async def test_publications(self, talk: Talk) -> None:
        taken: list[tuple[int, Any]] = []
        talk.hubs[1].takers[WORD] = lambda key, values, parts, flags: taken.append((key, values))
        sent: list[tuple[Any, ...]] = [(), (None,), ("text", b"x" * 3000), (1, 2.5, True, "text", None)]
        for number, values in enumerate(sent, 1):
            talk.publish(KEY + number, WORD, *values)
        talk.publish(KEY, WORD + 1, 7)  # of another word: no publication
        await talk.until(lambda: len(taken) == len(sent) and talk.hubs[1].pushed)
        await talk.check()
        assert taken == [(KEY + number, list(values)) for number, values in enumerate(sent, 1)]
        assert [entry[:4] for entry in talk.hubs[1].pushed] == [(WORD + 1, KEY, Status.OK, [7])]
        assert talk.hubs[0].counters.pushes == 0

    async def test_more_publications_than_credits(self, talk: Talk) -> None:
        taken: list[int] = []
        talk.hubs[1].takers[WORD] = lambda key, values, parts, flags: taken.append(key)
        for number in range(1, 5 * DEPTH):
            talk.publish(number, WORD, number)
        await talk.until(lambda: len(taken) == 5 * DEPTH - 1)
        await talk.check()
        assert taken == list(range(1, 5 * DEPTH)), "in order"

    async def test_more_pushes_than_credits(self, talk: Talk) -> None:
        for number in range(1, 5 * DEPTH):
            talk.push(number, WORD, number)
        await talk.until(lambda: len(talk.hubs[1].pushed) == 5 * DEPTH - 1)
        await talk.check()
        assert [entry[1] for entry in talk.hubs[1].pushed] == list(range(1, 5 * DEPTH)), "in order"

    async def test_a_push_without_a_result(self, talk: Talk) -> None:
        talk.a.push(KEY, WORD, Status.ERROR, b"", (), 0)
        await talk.until(lambda: talk.hubs[1].pushed)
        assert talk.hubs[1].pushed == [(WORD, KEY, Status.ERROR, None, ())]
        assert talk.hubs[0].counters.pushes == 0

    async def test_a_push_with_leases(self, talk: Talk) -> None:
        third = secrets.token_bytes(16)
        talk.a.push(KEY, WORD, Status.OK, NONE, parts_of(Held(5), Held(6, third)), 0)
        await talk.until(lambda: talk.hubs[1].late)
        assert not talk.hubs[1].pushed, "one part is still to come"
        talk.hubs[1].arrive()
        await talk.until(lambda: talk.hubs[1].pushed)
        await talk.check()
        assert talk.a.leases.total == 2
        talk.hubs[1].pushed.clear()
        await talk.check()
        assert talk.a.leases.total == 0

    async def test_a_push_that_cannot_be_leased(self, talk: Talk) -> None:
        lost = Held(3)
        lost.lost = True
        with pytest.raises(ObjectLost):
            talk.a.push(KEY, WORD, Status.OK, NONE, parts_of(Held(1), lost), 0)
        await talk.check()
        assert talk.a.leases.total == talk.hubs[0].counters.pushes == 0

    async def test_forwards(self, talk: Talk) -> None:
        call = talk.call(3)
        (incoming,) = await talk.received(1)
        for number in range(2):
            talk.a.forward(call, KEY + number, TARGET)
            call.forwarded += 1
        await talk.until(lambda: len(talk.hubs[1].forwards) == 2)
        assert talk.hubs[1].forwards == [(incoming.id, number, KEY + number, TARGET) for number in range(2)]
        talk.answer(incoming, 8, pushed=0b10)
        await talk.check()
        assert (call.result(), call.pushed) == (8, 0b10)
        talk.a.forward(call, KEY + 2, TARGET)  # too late: nobody waits
        await talk.check()
        assert len(talk.hubs[1].forwards) == 2

    async def test_a_call_with_debts_reports_that_it_is_sent(self, talk: Talk) -> None:
        call = Promise(talk.a.process, talk.a.loop, talk.a.thread)
        call.refs, call.pushes, call.forwarded = 1, [], 3
        talk.a.send_call(call, ACTOR, 0, 0, 0, b"\x90", ())
        talk.calls.append(call)
        talk.unfinished.add(call)
        call.on_done = talk.unfinished.discard
        assert talk.hubs[0].again == [call]
        assert call.forwarded == 0, "the numbers begin again"

    # ---- streams

    async def test_stream(self, talk: Talk) -> None:
        call = talk.call(stream=True)
        (incoming,) = await talk.received(1)
        granted: list[int] = []
        incoming.stream = SimpleNamespace(credit=granted.append)
        for number in range(9):
            talk.b.send_item(incoming, number, msgspec.msgpack.encode(number), (), 0)
        assert [await call.stream.next() for _ in range(9)] == list(range(9))
        await talk.until(lambda: granted)
        talk.answer(incoming, status=Status.STREAM_END)
        with pytest.raises(StopAsyncIteration):
            await call.stream.next()
        await talk.check()
        assert granted == [8]

    async def test_items_with_leases_of_a_stream_that_is_left(self, talk: Talk) -> None:
        call = talk.call(stream=True)
        (incoming,) = await talk.received(1)
        for number in range(4):
            talk.b.send_item(incoming, number, NONE, parts_of(Held(number + 1)), 0)
        await talk.check()
        assert talk.b.leases.total == 4
        call.stream = None
        talk.a.cancel(call)
        await talk.until(lambda: incoming.cancelled)
        talk.answer(incoming, status=Status.CANCELLED)
        await talk.check()
        assert talk.b.leases.total == 0

    # ---- leases

    async def test_releases(self, talk: Talk) -> None:
        call = talk.call(parts=parts_of(Held(5), Held(6), Held(5)))
        (incoming,) = await talk.received(1)
        await talk.check()
        assert talk.a.leases.total == 3
        talk.answer(incoming, parts=parts_of(Held(7), Held(7)))
        await talk.check()
        assert talk.b.leases.total == 2
        talk.drop(incoming, call)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    async def test_more_leases_than_a_frame_holds(self, talk: Talk) -> None:
        call = talk.call(parts=parts_of(*(Held(1000 + number) for number in range(300))))
        (incoming,) = await talk.received(1)
        talk.answer(incoming)
        await talk.check()
        assert talk.a.leases.total == 300
        talk.drop(incoming, call)
        await talk.check()

    async def test_an_argument_that_cannot_be_leased(self, talk: Talk) -> None:
        lost = Held(3)
        lost.lost = True
        with pytest.raises(ObjectLost):
            talk.call(parts=parts_of(Held(1), Held(2), lost))
        await talk.check()
        assert talk.a.leases.total == 0

    async def test_pins_and_late_parts(self, talk: Talk) -> None:
        third = secrets.token_bytes(16)
        call = talk.call(parts=parts_of(Held(3, third), Held(4)))
        (incoming,) = await talk.received(1)
        unblocked: list[Incoming] = []
        incoming.host = SimpleNamespace(unblocked=unblocked.append)
        assert incoming.blockers == 1
        talk.hubs[1].arrive()
        await talk.until(lambda: unblocked)
        await talk.check()
        assert talk.a.leases.total == 2, "a pin, and an object of ours"
        talk.answer(incoming, parts=parts_of(Held(3, third)))
        await talk.until(lambda: talk.hubs[0].late)
        assert not call.done
        talk.hubs[0].arrive()
        await talk.until(lambda: call.done)
        await talk.check()
        talk.drop(incoming, call)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    @pytest.mark.parametrize("rounds", [20, pytest.param(400, marks=pytest.mark.slow)])
    async def test_threads_pass_and_answer_at_once(self, talk: Talk, rounds: int) -> None:
        """Frames of several threads, with references, while the loop sends, receives and gives leases back."""
        home = asyncio.get_running_loop()
        before = sys.getswitchinterval()
        answering = threading.Lock()

        def answer_all() -> None:
            while talk.hubs[1].received:
                with answering:
                    some = talk.hubs[1].received[:]
                    # One step, as the loop's thread may have appended meanwhile: its calls stay.
                    del talk.hubs[1].received[: len(some)]
                for incoming in some:
                    if self.maps:
                        talk.answer(incoming, talk.array(1.0, 1))
                    else:
                        talk.answer(incoming, parts=parts_of(Held(9)))
                    talk.drop(incoming)

        def ask(count: int) -> list[Promise]:
            return [
                talk.call(talk.array(2.0), number) if self.maps else talk.call(parts=parts_of(Held(8)))
                for number in range(count)
            ]

        sys.setswitchinterval(1e-6)
        try:
            for _ in range(rounds):
                asking = [home.run_in_executor(None, ask, 10) for _ in range(2)]
                pool: list[asyncio.Future[None]] = []
                while not all(task.done() for task in asking) or any(not call.done for call in talk.calls):
                    assert talk.a.closed is None and talk.b.closed is None, (talk.a.closed, talk.b.closed)
                    if talk.hubs[1].received and len(pool) < 2:
                        pool.append(home.run_in_executor(None, answer_all))
                    threads: list[asyncio.Future[Any]] = [*pool, *asking]
                    for thread in threads:
                        if thread.done():
                            thread.result()  # raises: a thread that failed has calls that never end
                    pool = [task for task in pool if not task.done()]
                    await asyncio.sleep(0)
                await asyncio.gather(*pool, *asking)
                talk.drop(*talk.calls)
                assert all(call.ends == 1 for call in talk.calls)
                talk.calls.clear()
        finally:
            sys.setswitchinterval(before)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    # ---- the end

    @pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
    @pytest.mark.parametrize(
        "point",
        ["greeting", "called", "received", "backlog", "answered", "stream", "leased", "late argument", "late result"],
    )
    async def test_loss(self, talk: Talk, point: str, end: Callable[[Talk], None]) -> None:
        third = secrets.token_bytes(16)
        if point == "called":
            talk.call(1)
        elif point == "backlog":
            for number in range(3 * DEPTH):
                talk.call(number)
        elif point in ("late argument", "late result"):
            call = talk.call(parts=parts_of(Held(3, third)))
            (incoming,) = await talk.received(1)
            if point == "late result":
                talk.hubs[1].arrive()
                talk.answer(incoming, parts=parts_of(Held(4, third)))
                await talk.until(lambda: talk.hubs[0].late)
        elif point != "greeting":
            call = talk.call(7, parts=parts_of(Held(3)) if point == "leased" else (), stream=point == "stream")
            (incoming,) = await talk.received(1)
            if point == "stream":
                talk.b.send_item(incoming, 0, NONE, parts_of(Held(5)), 0)
            elif point == "answered":
                talk.answer(incoming, 8)
            elif point == "leased":
                talk.answer(incoming, 8, parts=parts_of(Held(4)))
                await talk.until(lambda: call.done)
        end(talk)
        with contextlib.suppress(ConnectionLost):
            talk.call("between its end and the report")
        await talk.until(lambda: talk.hubs[0].lost and talk.hubs[1].lost)
        for hub in talk.hubs:
            hub.arrive()
        await talk.check()
        assert all(call.done for call in talk.calls)
        assert not talk.unfinished
        with pytest.raises(ConnectionLost if end is not break_the_protocol else (ConnectionLost, ProtocolError)):
            talk.call("too late")

    @pytest.mark.parametrize("name", VIOLATIONS)
    async def test_violations_end_the_connection(self, connections: tuple[Any, Any], name: str) -> None:
        near, far = connections
        hub = TalkHub(far.peer.process, None)
        peer = Peer(near, far, hub)
        peer.hello()
        with contextlib.suppress(ConnectionLost):  # a path may refuse what comes after the end
            VIOLATIONS[name](peer)
        async with asyncio.timeout(WATCHDOG):
            while not hub.lost:
                await asyncio.sleep(0)
        session = peer.session
        assert isinstance(session.closed, ProtocolError)
        assert [type(cause) for cause in hub.lost] == [ProtocolError]
        assert [call.ends for call in peer.opened] == [1] * len(peer.opened), "once, by an answer or by the end"
        assert not session.pending
        assert not session.incoming
        assert session.leases.total == 0
        far.abort()
        await turns(10)


class MappingSessionSuite(SessionSuite):
    """The same where arrays of the stores go by reference."""

    maps = True

    async def test_arrays_by_reference(self, talk: Talk) -> None:
        for value in range(3):  # the first may bring the dtype
            mine = talk.array(value)
            call = talk.call(mine, value)
            incoming = (await talk.received(value + 1))[-1]
            await talk.check()
            assert talk.a.leases.total == 1
            talk.answer(incoming, talk.array(value + 0.5, 1))
            await talk.check()
            assert talk.b.leases.total == 1
            if call.decoded:
                assert set(np.unique(call.value)) == {value + 0.5}
            talk.drop(incoming, call)
            await talk.check()
            assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)
