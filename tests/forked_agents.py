"""Node agents as forks of a process that has imported their modules.

More than a thousand tests start a runtime in their own process, and the agent's interpreter spends a fifth of a second
of CPU on imports each time. So the agents of most tests are forked, as `zcactor.cluster.child` forks those of clusters.
The tests of how agents start, live and end have interpreters of their own, as programs do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any
from unittest import mock

from tests.forker import LIMIT, NOBODY
from zcactor.cluster.child import Child
from zcactor.driver import driver
from zcactor.node import agent_main
from zcactor.workers.orphans import MARK

__all__ = ["forked_agents", "start_forker"]


class _Agent(Child):
    """A forked agent, which is our child as one that is started by ``subprocess.Popen``."""

    returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """See `Child.wait`."""
        self.returncode = super().wait(timeout)
        return self.returncode


class _Forker:
    """The process that forks agents for this one, and ends with it.

    Args:
        requests: the socket to it.
        process: the object that stands for it, which is kept.
    """

    def __init__(self, requests: socket.socket, process: object) -> None:
        self._requests = requests
        self._process = process
        self._pid = os.getpid()
        self._like = _surroundings()

    def can_fork(self) -> bool:
        """Whether an agent that is forked is as one that this process would start now."""
        return self._pid == os.getpid() and self._like == _surroundings()

    def fork(self, lock_fd: int, node: str) -> tuple[_Agent, socket.socket]:
        """Fork an agent, with the environment and the output that this process has now."""
        ours, theirs = socket.socketpair()
        hidden = agent_main.SECRETS
        environment = {key: value for key, value in os.environ.items() if key not in hidden} | {MARK: node}
        request = pickle.dumps((environment, agent_main.search_path()))
        with theirs:
            socket.send_fds(self._requests, [request], [theirs.fileno(), lock_fd, 1, 2])
        answer = self._requests.recv(LIMIT)
        assert answer, "the process that forks agents has ended"
        return _Agent(int(answer)), ours


_forker: _Forker | None = None


def start_forker(start: Callable[[socket.socket, socket.socket], object]) -> None:
    """Start the process that forks agents from now on.

    Args:
        start: starts it, with the variable `MARK` with `NOBODY`. It gets the socket for `tests.forker.serve`, and the
            other end, which that process may not keep.
    """
    global _forker
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _forker = _Forker(ours, start(theirs, ours))


def _start_interpreter(requests: socket.socket, _: socket.socket) -> object:
    path, flags = agent_main.search_path(), subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = (
        f"import socket, sys; sys.path[:] = {path!r}; from tests.forker import serve; "
        f"serve(socket.socket(fileno={requests.fileno()}))"
    )
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        pass_fds=(requests.fileno(),), stdin=subprocess.DEVNULL, env={**os.environ, MARK: NOBODY},
        start_new_session=True,
    )  # fmt: skip


def _surroundings() -> tuple[object, ...]:
    """All that an agent inherits, and that is not sent to it."""
    limits = [
        resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_AS)
    ]
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    variables = {key: value for key, value in os.environ.items() if key.startswith(("PYTHON", "LD_", "MALLOC_"))}
    return limits, spaces, variables, os.sched_getaffinity(0), os.geteuid(), sys.flags, list(sys.warnoptions)


def _launch(
    lock_fd: int, output: IO[bytes] | None = None, node: str = "", *, bound: bool = False
) -> tuple[Any, socket.socket]:
    """Fork an agent where it would be as one that `zcactor.node.agent_main.launch` starts; call that elsewhere."""
    if output is not None or bound or len(node) != len(NOBODY):
        return agent_main.launch(lock_fd, output, node, bound=bound)
    if _forker is None:
        start_forker(_start_interpreter)
    if _forker is None or not _forker.can_fork():
        return agent_main.launch(lock_fd, output, node, bound=bound)
    return _forker.fork(lock_fd, node)


@contextlib.contextmanager
def forked_agents() -> Iterator[None]:
    """Let runtimes that are started in the block have forked agents."""
    with mock.patch.object(driver, "launch", _launch):
        yield
