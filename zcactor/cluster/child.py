"""A node agent that is a fork of the command that starts it, which has imported already what an agent needs."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from zcactor.runtime.node import SECRETS, main, search_path
from zcactor.runtime.zygote import wait_for_end

if TYPE_CHECKING:
    from typing import IO

__all__ = ["Agent", "Child", "fork_agent"]


class Agent(Protocol):
    """A child process with a node agent in it: a `Child`, or a ``subprocess.Popen``."""

    pid: int

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""


class Child:
    """A forked child process.

    Args:
        pid: its number. Nobody else waits for it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._status is None:
            os.kill(self.pid, sig)  # it is ours until we have waited for it

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            Its exit status, or the negative number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self._status is None:
            if timeout is not None:
                self._wait_at_most(timeout)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def _wait_at_most(self, timeout: float) -> None:
        pidfd = os.pidfd_open(self.pid)
        try:
            if not wait_for_end(pidfd, timeout):
                raise subprocess.TimeoutExpired([f"the agent {self.pid}"], timeout)
        finally:
            os.close(pidfd)


def fork_agent(lock_fd: int, output: IO[bytes] | None = None) -> tuple[Child, socket.socket]:
    """As `zcactor.runtime.node.launch`, by a fork of this process: a third of the time, and of the processors' work.

    For a process that does nothing else: it must have no further threads and no event loop, and what it has open stays
    open in the agent.

    Raises:
        OSError: the process could not be started.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # collecting garbage writes to every object, and what is written to is no longer shared
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid:
        theirs.close()
        return Child(pid), ours
    status = 1
    try:
        ours.close()
        _leave(output)
        main(theirs.detach(), lock_fd)
        status = 0
    except BaseException:  # the last frame of a process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _leave(output: IO[bytes] | None) -> None:
    """Become what a program started anew would be: no terminal, no secrets, nothing of the command."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if output is not None:
        for target in (1, 2):
            os.dup2(output.fileno(), target)
    for name in SECRETS:
        _forget(name)
    sys.path[:] = search_path()
    sys.modules["__main__"] = ModuleType("__main__")


def _forget(name: str) -> None:
    """Take a variable out of the environment, and out of what /proc shows of it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(os.fsencode(name))
    if place:
        ctypes.memset(place, 0, len(ctypes.string_at(place)))
        del os.environ[name]
