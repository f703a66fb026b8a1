"""The program of a run: a child process, its exit status as a shell would tell it, and the signals that end it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType, TracebackType

__all__ = ["OF_BATCH_SYSTEMS", "CannotStart", "RunProgram", "Signals"]

OF_BATCH_SYSTEMS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals by which batch systems ask a program to save its work, or to begin anew, and terminals say that they close
(``scancel --signal``, ``sbatch --signal=USR1@60``). Their usual effect would end a rank and leave what it has started.
"""

NOT_THERE: Final = 127
"""The exit status where a program was not found, as shells have it (POSIX, 2.8.2)."""
NOT_EXECUTABLE: Final = 126
"""The exit status where it was found and cannot be executed."""
_BY_SIGNAL: Final = 128
"""Added to a signal's number."""
_BYTES: Final = 4096
"""Bytes of signals that are read at once."""
_PR_SET_PDEATHSIG: Final = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class CannotStart(ZcactorError):
    """A program could not be started.

    Args:
        message: for people.
        status: the exit status that stands for it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RunProgram:
    """A program, started at once. It has this process's standard streams, and is killed if this process is killed.

    Args:
        arguments: the program and its arguments, which no shell sees.
        environ: its environment.

    Raises:
        CannotStart: it is not there, or cannot be executed.
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        parent = os.getpid()

        def end_with_parent() -> None:  # in the child, before the program
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(_BY_SIGNAL + signal.SIGKILL)

        try:
            self._process = subprocess.Popen(list(arguments), env=dict(environ), preexec_fn=end_with_parent)
        except FileNotFoundError as error:
            raise CannotStart(f"{arguments[0]!r} is not there, or its interpreter is not", NOT_THERE) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CannotStart(f"{arguments[0]!r} cannot be executed: {why}", NOT_EXECUTABLE) from error
        self.pidfd = os.pidfd_open(self._process.pid)
        """Readable when the program has ended."""
        self._kill_at: float | None = None

    def status(self) -> int | None:
        """The exit status, 128 + n where signal n has ended it; None while it runs."""
        found = self._process.poll()
        return found if found is None or found >= 0 else _BY_SIGNAL - found

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def end(self, grace: float) -> None:
        """Send SIGTERM. The program has `grace` seconds from the first of these calls; see `patience`."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace
            self._process.terminate()

    def patience(self) -> float | None:
        """Seconds left of its grace; None where it was not told to end. SIGKILL is sent when nothing is left."""
        if self._kill_at is None:
            return None
        left = self._kill_at - time.monotonic()
        if left <= 0:
            self._process.kill()
            return None
        return left

    def close(self) -> None:
        """Kill it if it runs, and reap it. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Signals:
    """SIGTERM, SIGINT and `OF_BATCH_SYSTEMS` as events, inside the context.

    Until `wait` is called they raise ``SystemExit`` with 128 + n, so that what was begun is undone. Signals that are
    ignored at the start (nohup(1)) stay so, here and in the program.

    A handler in Python runs between two steps of the interpreter. One whose signal comes just before a system call that
    waits runs once that call has returned, so such a call must also wait for `fd`.
    """

    def __init__(self) -> None:
        self.number = 0
        """The first signal that came after `wait` and was not handed on; 0 before."""
        self._raises = True
        self._elsewhere: dict[int, Callable[[int], None]] = {}
        self._pid = os.getpid()
        self.fd, self._write = os.pipe()
        """Readable once a signal has come after `wait`, until it was handed on."""
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)

    def __enter__(self) -> Self:
        numbers = [signal.SIGTERM, signal.SIGINT]
        numbers += [number for number in OF_BATCH_SYSTEMS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._came) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._write)

    def _came(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork that has not set its own handlers yet
            return
        if number in self._elsewhere:
            with suppress(BlockingIOError):
                os.read(self.fd, _BYTES)
            self._elsewhere[number](number)
        elif self._raises:
            raise SystemExit(_BY_SIGNAL + number)
        elif not self.number:
            self.number = number

    def hand_on(self, numbers: Iterable[int], to: Callable[[int], None]) -> None:
        """Call `to` with each of these signals from here on, which then ends nothing here."""
        self._elsewhere.update(dict.fromkeys(numbers, to))

    def wait(self) -> None:
        """From here on signals raise nothing, and are waited for."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)  # the interpreter writes, before any handler runs
        self._raises = False

    @property
    def status(self) -> int:
        """The exit status that stands for the signal that came."""
        return _BY_SIGNAL + self.number
