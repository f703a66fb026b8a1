"""Flows: bytes that a thread takes as they arrive, and how they end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.connection import PullKeeper
from zcactor.errors import ObjectLost, ProtocolError
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.tcp import crew
from zcactor.transport.tcp import flow as module
from zcactor.transport.tcp.flow import AHEAD, TcpFlow, take_flows

CONTENT = random.Random(3).randbytes(10_000)


class FakeSocket:
    """A data socket to an owner that has `CONTENT`, and answers so many requests."""

    def __init__(self, answers: int = 1000, error: Exception | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.most_ahead = self._answered = 0
        self.ended = self.rests = 0
        self.lasts: list[int] = []
        self._answers = answers
        self._error = error
        self._left = 0
        self._at = 0

    def ask(self, region: RemoteRegion, start: int, nbytes: int) -> None:
        self.asked.append((region.offset + start, nbytes))
        self.most_ahead = max(self.most_ahead, len(self.asked) - self._answered)

    def answered(self) -> bool:
        assert not self._left, "the bytes of the request before are taken"
        if self._answered == self._answers:
            if self._error is not None:
                raise self._error
            return False
        self._at, self._left = self.asked[self._answered]
        self._answered += 1
        return True

    def take(self, view: memoryview, *, last: bool) -> None:
        assert 0 < len(view) <= self._left
        view[:] = CONTENT[self._at : self._at + len(view)]
        self._at += len(view)
        self._left -= len(view)
        if last:
            self.lasts.append(self._at)

    def end(self) -> None:
        self.ended += 1

    def rest(self) -> None:
        self.rests += 1


Ends = list[tuple[bool, ProtocolError | None]]


def flow_of(sock: FakeSocket, start: int, nbytes: int) -> tuple[TcpFlow, Ends]:
    ends: Ends = []
    return TcpFlow(sock, RemoteRegion(1, start, nbytes), lambda _, whole, error: ends.append((whole, error))), ends


@given(
    start=st.integers(0, 100), nbytes=st.integers(1, 2_000), part=st.integers(50, 700),
    pieces=st.lists(st.integers(1, 500), min_size=1),
)  # fmt: skip
def test_any_pieces_of_any_parts(start: int, nbytes: int, part: int, pieces: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_NBYTES", part)
        sock = FakeSocket()
        flow, ends = flow_of(sock, start, nbytes)
        assert not sock.asked, "the thread asks"
        flow.begin()
        into, at = bytearray(nbytes), 0
        while at < nbytes:
            assert not sock.lasts
            piece = pieces[len(sock.asked) % len(pieces)]
            flow.take(memoryview(into)[at : at + piece])
            at += piece
        assert into == CONTENT[start : start + nbytes]
        assert sum(asked for _, asked in sock.asked) == nbytes
        assert sock.most_ahead <= AHEAD
        assert sock.lasts == [start + nbytes]
        flow.left()
        assert (ends, sock.rests) == ([(True, None)], 1)


def test_an_owner_that_refuses_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_NBYTES", 100)
    flow, ends = flow_of(FakeSocket(answers=2), 0, 300)
    flow.begin()
    flow.take(memoryview(bytearray(200)))
    with pytest.raises(ObjectLost, match="does not have object 1 any more"):
        flow.take(memoryview(bytearray(1)))
    flow.left()
    assert ends == [(False, None)]


def test_an_owner_that_violates_the_protocol() -> None:
    error = ProtocolError("forged")
    flow, ends = flow_of(FakeSocket(0, error), 0, 300)
    flow.begin()
    with pytest.raises(ProtocolError):
        flow.take(memoryview(bytearray(1)))
    flow.left()
    assert ends == [(False, error)]


# ---------------------------------------------------------------- the thread


async def taken(use: Callable[[], Any], count: int = 2) -> tuple[Any, list[FakeSocket], list[Ends]]:
    """The result, or the error, of a thread that calls `use` with that many flows."""
    sockets = [FakeSocket() for _ in range(count)]
    made = [flow_of(sock, 0, 10) for sock in sockets]
    try:
        result: Any = await take_flows([flow for flow, _ in made], use)
    except ZeroDivisionError as error:
        result = error
    return result, sockets, [ends for _, ends in made]


async def test_a_thread_takes_them() -> None:
    threads: list[int] = []
    result, sockets, ends = await taken(lambda: threads.append(threading.get_ident()))
    assert result is True
    assert threads != [threading.get_ident()]
    assert [sock.rests for sock in sockets] == [1, 1]
    assert ends == [[(False, None)], [(False, None)]], "nothing was taken"


@pytest.mark.parametrize("error", [OSError("broken"), ObjectLost("gone"), ProtocolError("forged")])
async def test_bytes_that_do_not_come_are_to_be_taken_in_another_way(error: Exception) -> None:
    def use() -> None:
        raise error

    result, sockets, _ = await taken(use)
    assert result is False
    assert [sock.rests for sock in sockets] == [1, 1]
    assert error.__traceback__ is None, "its frames would keep the memory"


async def test_other_errors_of_the_thread_are_raised() -> None:
    result, sockets, _ = await taken(lambda: 1 // 0)
    assert type(result) is ZeroDivisionError
    assert [sock.rests for sock in sockets] == [1, 1]


async def test_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: object) -> None:
        raise crew.NoThread("can't start new thread")

    monkeypatch.setattr(crew, "run", none_left)
    result, sockets, _ = await taken(lambda: None)
    assert result is False
    assert [(sock.ended, sock.rests) for sock in sockets] == [(1, 1), (1, 1)]


async def test_cancelling_ends_the_sockets_and_lets_go_of_the_memory_later() -> None:
    begun, go_on = threading.Event(), threading.Event()
    keeper = PullKeeper()
    held = weakref.ref(keeper)

    def use(keeper: object = keeper) -> None:
        begun.set()
        go_on.wait(20)

    sock = FakeSocket()
    flow, ends = flow_of(sock, 0, 10)
    taking = asyncio.ensure_future(take_flows([flow], use))
    del keeper, use
    await asyncio.to_thread(begun.wait, 20)
    taking.cancel()
    await asyncio.wait([taking])
    assert (sock.ended, sock.rests) == (1, 0)
    gc.collect()
    assert held() is not None, "the thread may still write"
    go_on.set()
    while held() is not None or not ends:
        await asyncio.sleep(0.001)
    assert (taking.cancelled(), sock.rests, ends) == (True, 1, [(False, None)])
