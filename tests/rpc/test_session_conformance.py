"""Each path of a session joins the suite, and two paths side by side keep equal tables."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.conformance.connection import connect, finish
from tests.conformance.session import MappingSessionSuite, SessionSuite
from tests.conformance.talk import DEPTH, STORE_NBYTES, WATCHDOG, Held, Talk, parts_of
from tests.rpc.sessions import no_arena
from tests.transport.verbs.sides import draw_seeds, drawn_sides, fake_sides
from zcactor.errors import ConnectionLost
from zcactor.objectstore.store import Store
from zcactor.rpc.messages import Status
from zcactor.transport.frames import PeerInfo
from zcactor.transport.local.endpoint import LocalConnection
from zcactor.transport.loopback.endpoint import loopback_pair
from zcactor.transport.mapping import Mapped


def _of_this_process(arena: Any, offset: int, nbytes: int) -> Mapped:
    return Mapped(arena.address + offset, nbytes, arena, arena)


def native_socket(stores: Any) -> tuple[Any, Any]:
    """Two ends of a unix socket, each with the other's arena mapped."""
    sockets = socket.socketpair()
    ends = []
    for sock, peer in zip(sockets, reversed(stores), strict=True):
        sock.setblocking(False)
        arena = peer.arena
        mapping: Any = SimpleNamespace(map=partial(_of_this_process, arena))
        info = PeerInfo(peer.process, os.getpid(), os.getuid(), arena.nbytes)
        end = LocalConnection(
            sock, info, recv_depth=DEPTH, eager_limit=16384, mapping=mapping, map_writable=no_arena,
        )  # fmt: skip
        ends.append(end)
    return ends[0], ends[1]


def native_slots(stores: Any) -> tuple[Any, Any]:
    """Two ends of a loopback connection."""
    arenas = tuple((store.arena.address, store.arena.nbytes, store.arena) for store in stores)
    names = tuple(store.process for store in stores)
    return loopback_pair(processes=names, arenas=arenas, recv_depth=DEPTH)  # type: ignore[arg-type]


def python(stores: Any) -> tuple[Any, Any]:
    """The same two ends, where the native part leaves all frames to Python."""
    ends = native_slots(stores)
    for end in ends:
        end.native_out.declines = True
    return ends


class TestNativeSocket(MappingSessionSuite):
    @pytest.fixture
    async def connections(self, stores: tuple[Store, Store]) -> tuple[Any, Any]:
        return native_socket(stores)

    async def test_loss_while_an_array_is_shared(self, talk: Talk) -> None:
        talk.call(talk.array(1.0))
        await talk.received(1)
        home = asyncio.get_running_loop()

        def lose() -> None:
            home.call_soon_threadsafe(talk.a.connection.abort)
            assert talk.hubs[0].ended.wait(WATCHDOG)

        talk.hubs[0].sharing = lose
        call = await home.run_in_executor(None, talk.call, np.ones(4096))
        assert isinstance(call.error, ConnectionLost)
        assert not call.error.maybe_executed
        assert not talk.unfinished


class TestMessages(SessionSuite):
    @pytest.fixture
    async def connections(self) -> AsyncIterator[tuple[Any, Any]]:
        with fake_sides(recv_depth=DEPTH) as (left, right):
            pair = await connect(left, right)
            yield pair.left, pair.right
            await finish(pair)


class TestMessagesOnDrawnCards(SessionSuite):
    """The suite on networks that seeds draw. ``--rounds N`` draws N times as many."""

    @pytest.fixture
    async def connections(self, seed: int) -> AsyncIterator[tuple[Any, Any]]:
        with drawn_sides(seed, recv_depth=DEPTH) as (left, right):
            pair = await connect(left, right)
            yield pair.left, pair.right
            await finish(pair)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the seeds of `TestMessagesOnDrawnCards`."""
    draw_seeds(metafunc)


class TestNativeSlots(MappingSessionSuite):
    @pytest.fixture
    async def connections(self, stores: tuple[Store, Store]) -> tuple[Any, Any]:
        return native_slots(stores)


class TestPython(MappingSessionSuite):
    @pytest.fixture
    async def connections(self, stores: tuple[Store, Store]) -> tuple[Any, Any]:
        return python(stores)


# ---------------------------------------------------------------- two paths side by side

KINDS = ["plain", "array", "parts", "both"]


class SideBySide(RuleBasedStateMachine):
    """Equal calls, answers, cancels and losses on the native path and on Python's; their tables stay equal."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.talks: list[Talk] = []

    def run(self, step: Any) -> None:
        async def both() -> None:
            for talk in self.talks:
                step(talk)
            for talk in self.talks:
                await talk.check()

        self.runner.run(both())
        ours, theirs = (talk.tables() for talk in self.talks)
        assert ours == theirs

    @initialize()
    def connect(self) -> None:
        async def begin() -> None:
            for path in (native_socket, python):
                stores = Store(STORE_NBYTES, secrets.token_bytes(16)), Store(STORE_NBYTES, secrets.token_bytes(16))
                self.talks.append(Talk(path(stores), stores))

        self.runner.run(begin())
        self.run(lambda talk: None)

    @property
    def received(self) -> int:
        return len(self.talks[0].hubs[1].received) if self.talks else 0

    @property
    def made(self) -> int:
        return len(self.talks[0].calls) if self.talks else 0

    def is_open(self) -> bool:
        return bool(self.talks) and self.talks[0].a.closed is None

    @precondition(is_open)
    @rule(kind=st.sampled_from(KINDS), count=st.sampled_from([1, 1, 2, 2 * DEPTH]))
    def call(self, kind: str, count: int) -> None:
        def step(talk: Talk) -> None:
            for number in range(count):
                values = [talk.array(number)] if kind in ("array", "both") else []
                parts = parts_of(Held(5), Held(number + 6)) if kind == "parts" else ()
                talk.call(number, *values, *([talk.array(1.0)] if kind == "both" else []), parts=parts)

        self.run(step)

    @precondition(lambda self: self.is_open() and self.received)
    @rule(data=st.data(), kind=st.sampled_from([*KINDS, "error"]), count=st.integers(1, DEPTH))
    def answer(self, data: Any, kind: str, count: int) -> None:
        first = data.draw(st.integers(0, self.received - 1))

        def step(talk: Talk) -> None:
            for incoming in talk.hubs[1].received[first : first + count]:
                if kind == "error":
                    talk.answer(incoming, "why", status=Status.ERROR)
                elif kind == "array":
                    talk.answer(incoming, talk.array(2.0, 1))
                else:
                    talk.answer(incoming, first, parts=parts_of(Held(3)) if kind != "plain" else ())

        self.run(step)

    @precondition(lambda self: self.is_open() and self.made)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        index = data.draw(st.integers(0, self.made - 1))
        self.run(lambda talk: talk.a.cancel(talk.calls[index]))

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        index = data.draw(st.integers(0, self.received - 1))
        self.run(lambda talk: talk.drop(talk.hubs[1].received[index], talk.calls[index]))

    @precondition(lambda self: self.is_open() and self.made)
    @rule(far=st.booleans())
    def lose(self, far: bool) -> None:
        self.run(lambda talk: (talk.b if far else talk.a).connection.abort())

    def teardown(self) -> None:
        async def end() -> None:
            for talk in self.talks:
                await talk.close()

        self.runner.run(end())
        self.runner.close()


TestSideBySide = pytest.mark.slow(SideBySide.TestCase)
TestSideBySide.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("path", [native_socket, native_slots, python])
async def test_leases_of_a_self_session_return_to_0(path: Any) -> None:
    store = Store(STORE_NBYTES, secrets.token_bytes(16))
    talk = Talk(path((store, store)), (store, store))
    before = store.stats().used
    for value in range(120):
        call = talk.call(talk.array(value))
        incoming = (await talk.received(1)).pop()
        talk.answer(incoming, talk.array(value, 1))
        await talk.until(lambda call=call: call.done)  # type: ignore[misc]
        talk.drop(call, incoming)
        talk.calls.clear()
    await talk.check()
    assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)
    assert store.stats().used == before
    await talk.close()
