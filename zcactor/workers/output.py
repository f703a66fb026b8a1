"""Workers' output on its way to the driver: lines out of pipes, and the bounded queue before the driver.

An actor must never wait for the driver to show its output: the driver may be busy, or itself wait for the actor. So the
agent always reads, keeps a bounded amount, and leaves out the rest, with a line that says how much is missing.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import os
from collections import deque
from typing import TYPE_CHECKING

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zcactor.ids import ProcessId

__all__ = ["CHUNK", "HELD", "LINE_LIMIT", "LineReader", "Printer", "Printers"]

_READ = 64 << 10
"""Bytes of one read: the default capacity of a pipe."""
LINE_LIMIT = 16 << 10
"""Characters kept back for the end of a line; a longer line is passed on in pieces."""
CHUNK = 12 << 10
"""Characters at which output is sent to the driver, plus at most one line."""
HELD = 8 << 20
"""The limit of characters that wait for the driver."""


class LineReader:
    """Lines from the reading end of a pipe.

    Args:
        fd: non-blocking; the reader closes it at the end.
        emit: called with whole lines, without line ends.
    """

    def __init__(self, fd: int, emit: Callable[[list[str]], None]) -> None:
        self.fd = fd
        self._emit = emit
        self._rest = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read(self) -> bool | None:
        """Read once and emit the complete lines. Returns None when the pipe is empty now, False at the end."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return None
        *lines, rest = (self._rest + self._decode(data, not data)).split("\n")
        while len(rest) > LINE_LIMIT:
            lines.append(rest[:LINE_LIMIT])
            rest = rest[LINE_LIMIT:]
        if rest and not data:
            lines.append(rest)
            rest = ""
        self._rest = rest
        if lines:
            self._emit([line.removesuffix("\r") for line in lines])
        return bool(data)

    def end(self) -> None:
        """Emit the rest as a line, and close the descriptor."""
        rest, self._rest = self._rest, ""
        if rest:
            self._emit([rest])
        os.close(self.fd)


class Printer:
    """The printer that shows text at the driver in order, one piece at a time.

    Args:
        show: ``await show(stream, text)`` returns once the text is shown.
        start_task: starts a task for a coroutine, and keeps a reference to it.
    """

    def __init__(self, show: Callable[[str, str], Awaitable[object]], start_task: Callable[..., object]) -> None:
        self._show = show
        self._start_task = start_task
        self._waiting: deque[tuple[str, str]] = deque()
        self._held = 0
        self._left_out = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def write(self, stream: str, prefix: str, lines: list[str]) -> None:
        """Queue lines, each with `prefix` before it. Lines beyond the limit are counted instead."""
        if self._held > HELD:
            self._left_out += len(lines)
            return
        group: list[str] = []
        size = 0
        for line in lines:
            group.append(f"{prefix}{line}\n")
            size += len(group[-1])
            if size >= CHUNK:
                self._queue(stream, "".join(group))
                group, size = [], 0
        if group:
            self._queue(stream, "".join(group))
        if self._idle.is_set():
            self._idle.clear()
            self._start_task(self._run())

    def _queue(self, stream: str, text: str) -> None:
        self._waiting.append((stream, text))
        self._held += len(text)

    async def flush(self) -> None:
        """Wait until everything is shown, or the driver is gone."""
        await self._idle.wait()

    async def _run(self) -> None:
        try:
            while self._waiting:
                stream, text = self._next()
                await self._show(stream, text)
        except ZcactorError:  # the driver or its standard output is gone, so the text has no reader
            self._waiting.clear()
            self._held = 0
        finally:
            self._idle.set()

    def _next(self) -> tuple[str, str]:
        stream, text = self._waiting.popleft()
        while self._waiting and len(text) + len(self._waiting[0][1]) <= CHUNK and self._waiting[0][0] == stream:
            text += self._waiting.popleft()[1]
        self._held -= len(text)
        if self._left_out and not self._waiting:
            note = (
                f"(zcactor) {self._left_out} lines of output were left out: they came faster than they could be shown\n"
            )
            self._left_out = 0
            self._queue("stderr", note)
        return stream, text


class Printers:
    """A `Printer` for each program.

    Args:
        show: ``await show(program, stream, text)``, where a program is named by its driver's process id.
        start_task: starts a task for a coroutine, and keeps a reference to it.
    """

    def __init__(
        self, show: Callable[[ProcessId, str, str], Awaitable[object]], start_task: Callable[..., object]
    ) -> None:
        self._show = show
        self._start_task = start_task
        self._by_program: dict[ProcessId, Printer] = {}

    def write(self, program: ProcessId, stream: str, prefix: str, lines: list[str]) -> None:
        """See `Printer.write`."""
        printer = self._by_program.get(program)
        if printer is None:
            printer = Printer(functools.partial(self._show, program), self._start_task)
            self._by_program[program] = printer
        printer.write(stream, prefix, lines)

    def forget(self, program: ProcessId) -> None:
        """Drop the printer of a program that is gone."""
        self._by_program.pop(program, None)

    async def flush_one(self, program: ProcessId) -> None:
        """Wait until a program has shown its output, or is gone."""
        printer = self._by_program.get(program)
        if printer is not None:
            await printer.flush()

    async def flush(self) -> None:
        """Wait until each program has shown its output, or is gone."""
        await asyncio.gather(*(printer.flush() for printer in list(self._by_program.values())))
