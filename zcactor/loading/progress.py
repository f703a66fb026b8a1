"""The progress of reading a file, reported to a callable or shown on the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Progress", "Shown"]

Progress = bool | Callable[[int, int], object] | None

_LARGE_NBYTES: Final = 256 << 20
"""Bytes from which reading takes long enough that a person at a terminal wants to see its progress."""
_REDRAWN: Final = 0.1
"""Seconds between two updates of the line on the terminal."""


class _Line:
    """One line on a terminal, drawn over itself: name, percent, GB/s."""

    def __init__(self, stream: TextIO, path: str) -> None:
        name = os.path.basename(path)
        self._name = name if name.isprintable() else ascii(name)  # a name must not steer the terminal
        self._stream = stream
        self._began = time.perf_counter()
        self._drawn = -_REDRAWN

    def draw(self, done: int, total: int) -> None:
        """Draw the line, but not so often that the terminal slows the reading down."""
        elapsed = time.perf_counter() - self._began
        if done < total and elapsed - self._drawn < _REDRAWN:
            return
        self._drawn = elapsed
        percent = 100 * done // total if total else 100
        rate = done / elapsed / 1e9 if elapsed else 0.0
        self._stream.write(f"\r{self._name}: {percent:3d} %  {rate:6.2f} GB/s")
        self._stream.flush()

    def end(self) -> None:
        """End the line, so that later output begins on a line of its own."""
        self._stream.write("\n")
        self._stream.flush()


class Shown:
    """The progress of one file, as `load` was asked to report it.

    Args:
        path: path of the file.
        total: number of bytes that will be read.
        progress: see `load`.
    """

    def __init__(self, path: str, total: int, progress: Progress) -> None:
        self._done = 0
        self._total: Final = total
        self._line: _Line | None = None
        self._report: Callable[[int, int], object] | None = None
        stream: TextIO | None = sys.stderr  # None in programs without a console
        if callable(progress):
            self._report = progress
        elif stream is not None and (progress or (progress is None and total >= _LARGE_NBYTES and stream.isatty())):
            self._line = _Line(stream, path)
            self._report = self._line.draw

    def __enter__(self) -> Self:
        self.advance(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.end()

    def advance(self, count: int) -> None:
        """Note that `count` more bytes were read."""
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)
