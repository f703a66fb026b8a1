"""Lines out of pipes, and the bounded queue towards the driver."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ConnectionLost
from zcactor.workers import output as output_module
from zcactor.workers.output import CHUNK, LINE_LIMIT, LineReader, Printer


def lines_of(*writes: bytes) -> list[str]:
    """The lines of a reader that reads each of these writes by itself, and the end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    found: list[str] = []
    reader = LineReader(read, found.extend)
    assert reader.read() is None
    for data in writes:
        os.write(write, data)
        while reader.read():
            pass
    os.close(write)
    assert reader.read() is False
    reader.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    return found


@pytest.mark.parametrize(
    ("writes", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"part", b"ly\nrest"], ["partly", "rest"]),
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
        ([b"\xff\xfe\n", b"a\0b\n"], ["\ufffd\ufffd", "a\0b"]),
        ([b"dos\r\n\n"], ["dos", ""]),
        ([b"\r"], [""]),
        ([b"x" * LINE_LIMIT + b"yy", b"z\n"], ["x" * LINE_LIMIT, "yyz"]),
        ([], []),
        ([b"\xc3"], ["\ufffd"]),
    ],
)
def test_lines(writes: list[bytes], lines: list[str]) -> None:
    assert lines_of(*writes) == lines


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_nothing_is_lost(writes: list[bytes]) -> None:
    whole = b"".join(writes).decode(errors="replace")
    lines = whole.split("\n")
    if lines[-1] == "":
        lines.pop()
    assert lines_of(*writes) == [line.removesuffix("\r") for line in lines]


class Driver:
    """A driver that shows text once it is open."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.open = asyncio.Event()
        self.gone = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def show(self, stream: str, text: str) -> None:
        await self.open.wait()
        if self.gone:
            raise ConnectionLost("gone")
        self.shown.append((stream, text))

    def printer(self) -> Printer:
        """A printer that shows text at this driver."""
        return Printer(self.show, lambda coroutine: self.tasks.add(asyncio.ensure_future(coroutine)))

    def text(self, stream: str) -> str:
        return "".join(text for name, text in self.shown if name == stream)


async def test_order_and_size() -> None:
    driver = Driver()
    printer = driver.printer()
    for number in range(20_000):
        printer.write("stdout", "(a) ", [str(number)])
    printer.write("stderr", "(b) ", ["oops", "again"])
    printer.write("stdout", "(a) ", ["last"])
    driver.open.set()
    await printer.flush()
    assert driver.text("stdout") == "".join(f"(a) {number}\n" for number in range(20_000)) + "(a) last\n"
    assert driver.shown[-2:] == [("stderr", "(b) oops\n(b) again\n"), ("stdout", "(a) last\n")]
    assert max(len(text) for _, text in driver.shown) <= CHUNK
    await printer.flush()


async def test_what_exceeds_the_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "HELD", 1000)
    driver = Driver()
    printer = driver.printer()
    for _ in range(100):
        printer.write("stdout", "", ["x" * 99])
    driver.open.set()
    await printer.flush()
    shown = driver.text("stdout").count("x\n")
    assert 10 <= shown <= 12
    assert f"{100 - shown} lines of output were left out" in driver.text("stderr")
    printer.write("stdout", "", ["y"])
    await printer.flush()
    assert driver.text("stdout").endswith("y\n")


async def test_a_driver_that_is_gone() -> None:
    driver = Driver()
    driver.gone = True
    printer = driver.printer()
    printer.write("stdout", "", ["x"] * 1000)
    driver.open.set()
    await printer.flush()
    assert driver.shown == []


async def test_a_driver_that_is_gone_is_not_waited_for() -> None:
    def gone(stream: str, text: str) -> asyncio.Future[None]:
        raise ConnectionLost("gone")

    tasks = []
    start: Callable[..., object] = lambda coroutine: tasks.append(asyncio.ensure_future(coroutine))  # noqa: E731
    printer = Printer(gone, start)
    printer.write("stdout", "", ["x"])
    await printer.flush()
