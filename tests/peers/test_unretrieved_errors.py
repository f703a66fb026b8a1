"""Failures that no caller has seen: the number of log lines about them, and their texts."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.driver.programs import Program
from zcactor.errors import ActorDied, make_remote_error
from zcactor.peers.unretrieved_errors import QUIET, UnretrievedErrors
from zcactor.rpc.call import Call


def failed(actor: str, label: str, error: BaseException | None) -> Call:
    call = Call(bytes(16))
    call.actor_label, call.label, call.error = actor, label, error
    return call


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the log lines since the last look."""

    def look() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return look


class Seconds:
    """A stand-in for the running loop, whose time passes when a test says so."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.call_soon_threadsafe, self.is_closed = loop.call_soon_threadsafe, loop.is_closed
        self._timers: list[Callable[[], object]] = []

    def call_later(self, delay: float, callback: Callable[..., object], *arguments: object) -> None:
        assert delay == QUIET
        self._timers.append(functools.partial(callback, *arguments))

    def passes(self) -> None:
        """Let a second pass: run the timers that wait for it."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer()


def make(loop: Any = None) -> UnretrievedErrors:
    return UnretrievedErrors(loop or asyncio.get_running_loop(), lambda call: call.error)


async def quiet(unseen: UnretrievedErrors, seconds: Seconds) -> None:
    """Return once every actor has been without a line for a second."""
    while unseen._noted or unseen._actors:
        await asyncio.sleep(0)
        seconds.passes()


@pytest.mark.slow
async def test_a_line_for_each_actor_and_second(lines: Callable[[], list[str]]) -> None:
    seconds = Seconds()
    unseen = make(seconds)
    for number in range(100_000):
        unseen.note(failed("A(a)", f"A.m{number}", ActorDied("A(a)", "killed", True)))
    unseen.note(failed("B(b)", "B.m", ValueError("first\nsecond")))
    await asyncio.sleep(0)
    assert lines() == [
        "100,000 calls of A(a) failed and their results were never awaited; the first, A.m0: actor A(a) died: killed; "
        "the call may have run",
        r"B.m failed and its result was never awaited: first\nsecond",
    ]
    for number in range(3):
        unseen.note(failed("A(a)", f"A.n{number}", ValueError(f"later {number}")))
        await asyncio.sleep(0)
    assert lines() == [], "within the same second"
    await quiet(unseen, seconds)
    assert lines() == ["3 calls of A(a) failed and their results were never awaited; the first, A.n0: later 0"]
    unseen.note(failed("A(a)", "A.m", None))
    await quiet(unseen, seconds)
    assert lines() == [], "that was no failure"


async def test_what_it_says_of_remote_errors(lines: Callable[[], list[str]]) -> None:
    unseen = make()
    fields = {"message": "m", "remote_traceback": "many\nlines", "actor": "A(a)", "host": "h", "pid": 1}
    error = make_remote_error(ValueError("m"), {**fields, "type_name": "ValueError"})
    unseen.note(failed("", "", error))
    unseen.note(failed("A(a)", "A.m", ValueError()))
    await asyncio.sleep(0)
    assert lines() == [
        "a call failed and its result was never awaited: ValueError: m",
        "A.m failed and its result was never awaited: ValueError",
    ]
    unseen.close()


async def test_the_end(lines: Callable[[], list[str]]) -> None:
    """Failures from before the end are logged, and failures by the end are not."""
    unseen = make()
    unseen.note(failed("A(a)", "A.first", ValueError("told")))
    await asyncio.sleep(0)
    unseen.note(failed("A(a)", "A.second", ValueError("held back")))
    thread = threading.Thread(target=unseen.note, args=[failed("B(b)", "B.m", ValueError("from a thread"))])
    thread.start()
    thread.join()
    unseen.close()
    assert [line.rpartition(": ")[2] for line in lines()] == ["told", "from a thread", "held back"]
    unseen.note(failed("A(a)", "A.third", ValueError("at the end")))
    unseen.close()
    await asyncio.sleep(0)
    assert lines() == []


ENDS = """
@zc.actor
class Held:
    async def hold(self): await asyncio.Event().wait()

async def main():
    async with zc.init():
        held = await Held.spawn()
        refs = [held.hold() for _ in range(2000)]
        tell(begun=True)
        if {killed}:
            await zc.kill(held)
            await asyncio.wait([asyncio.ensure_future(refs[-1])])
            del refs
        tell(waits=True)
        if {interrupted}:
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_programs_end_without_a_word(killed: bool, interrupted: bool) -> None:
    with Program(ENDS.format(killed=killed, interrupted=interrupted)) as program:
        program.told("begun")
        if interrupted:
            program.told("waits")
            program.process.send_signal(signal.SIGINT)
        program.status()
        said = [line for line in program.stderr().splitlines() if "awaited" in line]
        assert len(said) == int(killed)
        if killed:
            assert said[0].startswith("1,999 calls of Held(")
            assert "the first, Held.hold: actor Held(" in said[0]
