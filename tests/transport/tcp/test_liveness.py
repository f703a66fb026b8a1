"""`zcactor.transport.tcp.liveness`: the signs of life, and the moment when a socket is given up.

`tests/hosts/test_links.py` tests that cuts of real links are noticed in time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from zcactor.transport.tcp import liveness
from zcactor.transport.tcp.liveness import AGAIN, RESET_ON_CLOSE, SILENCE, Liveness, tune


class Clock:
    """A stand-in for a loop: timers run when a test lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Clock:
        self.timers.append((self.now + delay, callback))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def run_next(self) -> None:
        (when, callback), *self.timers = self.timers
        self.now = when
        callback()


class Wire:
    """A stand-in for a socket: the facts that the system has about it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.heard = 0.0
        self.questions = 0
        self.unconfirmed = 0
        self.options: list[Any] = []

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        assert nbytes == liveness._INFO.size
        since = round((self.clock.now - self.heard) * 1000)
        return liveness._INFO.pack(self.questions, self.unconfirmed, since + 7, since)

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)


@pytest.fixture
def wire() -> Wire:
    return Wire(Clock())


def watched(wire: Wire) -> list[str]:
    said: list[str] = []
    Liveness(wire, wire.clock, said.append)  # type: ignore[arg-type]
    return said


@pytest.mark.parametrize("owed", ["questions", "unconfirmed"])
def test_a_peer_that_owes_a_sign_of_life_is_given_up_at_the_second_look(wire: Wire, owed: str) -> None:
    said = watched(wire)
    setattr(wire, owed, 3)
    wire.clock.run_next()
    assert said == [] and wire.options == []
    wire.clock.run_next()
    assert said == ["broke: its host has not answered for 5.0 s"]
    assert wire.clock.now == SILENCE + AGAIN
    assert wire.clock.timers == []
    assert wire.options == [(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)]


def test_one_that_was_heard_is_looked_at_when_it_can_be_silent_for_too_long(wire: Wire) -> None:
    said = watched(wire)
    wire.unconfirmed = 1
    wire.heard = 3.0
    wire.clock.run_next()
    wire.clock.run_next()
    assert wire.clock.now == pytest.approx(3.0 + SILENCE)
    assert said == []
    wire.clock.run_next()
    assert said


def test_one_that_answers_between_two_looks_lives(wire: Wire) -> None:
    said = watched(wire)
    wire.questions = 1
    for _ in range(20):  # each look asks a question, which is answered before the next look
        wire.clock.run_next()
        wire.heard = wire.clock.now
    assert said == []


def test_one_that_owes_nothing_may_be_silent(wire: Wire) -> None:
    said = watched(wire)
    for _ in range(20):
        wire.clock.run_next()
    assert said == []
    assert wire.clock.now == pytest.approx(SILENCE + 19 * AGAIN)


def test_nothing_is_looked_at_after_stop(wire: Wire) -> None:
    watch = Liveness(wire, wire.clock, lambda _: None)  # type: ignore[arg-type]
    watch.stop()
    watch.stop()
    assert wire.clock.timers == []


def test_what_the_system_tells_of_a_peer_that_is_there() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as left,
        listener.accept()[0] as right,
    ):
        tune(left)
        for _ in range(3):
            left.sendall(b"question")
            right.sendall(right.recv(8))
            assert left.recv(8) == b"question"
        told = left.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, liveness._INFO.size)
        questions, _, data, confirmation = liveness._INFO.unpack(told)
        assert questions == 0
        assert 0 <= data < 60_000 and 0 <= confirmation < 60_000
