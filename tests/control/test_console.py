"""The places where lines of workers' output go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import DRIVER, FakeProcess, FakeSession
from zcactor.control.head import Console
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId

WORKER: Any = SimpleNamespace(driver=DRIVER, label="Shop", pid=7)


def console(answer: Any = None, *, log_to_driver: bool = True) -> tuple[Console, FakeProcess]:
    """A console, and its process."""
    process: Any = FakeProcess(answer)
    process.config = SimpleNamespace(log_to_driver=log_to_driver)
    return Console(process), process


async def test_lines_are_shown_at_the_program_that_they_are_for() -> None:
    made, process = console()
    process.sessions.used[DRIVER] = FakeSession(DRIVER)
    made.output("stdout", WORKER, ["one", "two"])
    await made.show_all()
    assert process.asked == [(DRIVER, "log", "stdout", "(Shop pid=7) one\n(Shop pid=7) two\n")]


async def test_a_program_that_wants_none_gets_none() -> None:
    made, process = console(log_to_driver=False)
    process.sessions.used[DRIVER] = FakeSession(DRIVER)
    made.output("stdout", WORKER, ["one"])
    await made.show_all()
    assert not process.asked


@pytest.mark.parametrize("closed", [False, True])
async def test_lines_of_a_program_that_is_gone_go_to_the_log(closed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    made, process = console()
    if closed:
        session = process.sessions.used[DRIVER] = FakeSession(DRIVER)
        session.closed = ConnectionLost("gone")
    made.show(DRIVER, "stdout", "> ", ["one", "two"])
    made.show(DRIVER, "stderr", "", ["three"])
    assert capsys.readouterr() == ("> one\n> two\n", "three\n")
    made.has_log = False
    made.show(DRIVER, "stdout", "", ["four"])
    assert capsys.readouterr() == ("", "") and not process.asked


async def test_what_waits_for_a_program_that_has_gone_is_dropped() -> None:
    made, process = console()
    process.sessions.used[DRIVER] = FakeSession(DRIVER)
    made.output("stdout", WORKER, ["one"])
    del process.sessions.used[DRIVER]
    made.forget(DRIVER)
    await made.show_all()
    assert not process.asked


async def test_one_program_has_shown_its_lines_while_another_one_has_not() -> None:
    shown, goes_on = [], asyncio.Event()

    async def show(driver: bytes, method: str, stream: str, text: str) -> None:
        if driver != DRIVER:
            await asyncio.Event().wait()
        await goes_on.wait()
        shown.append(text)

    made, process = console(show)
    stuck = ProcessId(b"s" * 16)
    for driver in (DRIVER, stuck):
        process.sessions.used[driver] = FakeSession(driver)
        made.show(driver, "stdout", "", ["one"])
    waiting = asyncio.ensure_future(made.show_all(DRIVER))
    await asyncio.sleep(0)
    assert not waiting.done()
    goes_on.set()
    await waiting
    assert shown == ["one\n"]
    await made.show_all(ProcessId(b"n" * 16))  # it has had no lines
    for task in process.begun:
        task.cancel()
    await asyncio.gather(*process.begun, return_exceptions=True)
