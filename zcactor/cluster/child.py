"""A node agent as a fork of the command that starts it, which has imported the agent's modules already."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from zcactor.node.agent_main import SECRETS, main, search_path
from zcactor.workers.zygote import wait_for_end

if TYPE_CHECKING:
    from typing import IO

__all__ = ["Agent", "Child", "fork_agent"]


_controls: WeakSet[socket.socket] = WeakSet()
"""The sockets to the agents that this process has forked."""


class Agent(Protocol):
    """A child process with a node agent in it: a `Child`, or a ``subprocess.Popen``."""

    pid: int

    def send_signal(self, sig: int) -> None:
        """Send the child a signal, unless it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the child has ended, and return its exit status; see `Child.wait`."""


class Child:
    """A forked child process.

    Args:
        pid: its pid. Only this object waits for the child.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def send_signal(self, sig: int) -> None:
        """Send the child a signal, unless it has ended."""
        if self._status is None:
            os.kill(self.pid, sig)  # the pid is the child's until we have waited for it

    def terminate(self) -> None:
        """Send SIGTERM, unless the child has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the child has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the child has ended.

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            The exit status, or the negative number of the signal that ended the child.

        Raises:
            subprocess.TimeoutExpired: the child still runs after `timeout` seconds.
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


def _import_all() -> None:
    """Import the modules of a cluster's agents and heads, so that forks of this process have them. To look for garbage
    meanwhile would take a tenth of the time, and all that is imported stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        import zcactor.assembly.agents
        import zcactor.node.worker_main
        import zcactor.workers.pool  # noqa: F401
        from zcactor.assembly.endpoints import preload

        with contextlib.suppress(ImportError):
            import uvloop  # noqa: F401
        preload("", clustered=True)
    finally:
        if collects:
            gc.enable()


def fork_agent(lock_fd: int, output: IO[bytes] | None = None) -> tuple[Child, socket.socket]:
    """Start a node agent by a fork of this process: in a third of the time and the CPU time of
    `zcactor.node.agent_main.launch`.

    The caller must do nothing else: it must have no further threads and no event loop, and its open descriptors stay
    open in the agent, but for the sockets to other agents that this function has returned.

    Raises:
        OSError: the process could not be started.
    """
    _import_all()  # once for all agents of this process
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a garbage collection writes to every object, and pages that are written to are not shared
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    _controls.add(ours)
    if pid:
        theirs.close()
        return Child(pid), ours
    status = 1
    try:
        for control in list(_controls):  # or another agent would not notice the end of this process's parent
            control.close()
        _leave(output)
        main(theirs.detach(), lock_fd)
        status = 0
    except BaseException:  # the last frame of a process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _leave(output: IO[bytes] | None) -> None:
    """Become like a program started anew: no terminal, no secrets, nothing of the command."""
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
    """Take a variable out of the environment, and erase it in /proc as well."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(os.fsencode(name))
    if place:
        ctypes.memset(place, 0, len(ctypes.string_at(place)))
        del os.environ[name]
