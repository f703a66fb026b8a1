"""Processes that are forked from one that has imported everything, and has neither threads nor loops nor a device.

A guest takes ten seconds to start an interpreter, and a process that uses a device cannot be forked: its child would
hold its connections open. So `phases.py` starts a nursery for each run of pytest, before anything else happens in it.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.forker import fork

__all__ = ["Child", "start_nursery"]

_LIMIT = 1 << 16
"""The largest size of a request, in bytes."""

_nursery: socket.socket | None = None
"""The socket to the nursery."""


def start_nursery() -> None:
    """Fork a nursery, which makes children for this process from now on, and ends with this process."""
    global _nursery
    _nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork(partial(_serve, theirs))
    theirs.close()


class Child:
    """A child of the nursery, which calls ``function(pipe, *arguments)`` with the other end of `pipe`.

    Args:
        function: a function of a module, as `pickle` takes it.
        arguments: its arguments, which are pickled.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        assert _nursery is not None, "phases.py runs this"
        self.pipe, theirs = multiprocessing.connection.Pipe()
        with theirs:
            socket.send_fds(_nursery, [pickle.dumps((function, arguments))], [theirs.fileno()])
            self.pid = int(_nursery.recv(_LIMIT))
        self._alive = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Send SIGKILL to the child, and wait until it has ended."""
        if self._alive >= 0:
            signal.pidfd_send_signal(self._alive, signal.SIGKILL)
            select.select([self._alive], [], [])
            os.close(self._alive)
            self._alive = -1


def _serve(requests: socket.socket) -> int:
    """Serve as the nursery. Its children stay zombies until it ends: there are few."""
    global _nursery
    assert _nursery is not None
    _nursery.close()  # closes the other end: otherwise no end of file would come
    _nursery = None
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LIMIT, 1)
        if not request:
            return 0
        function, arguments = pickle.loads(request)  # this imports the modules of the children, once for all of them
        pid = fork(partial(_child, requests, descriptors[0], function, arguments))
        os.close(descriptors[0])
        requests.send(b"%d" % pid)


def _child(requests: socket.socket, descriptor: int, function: Callable[..., None], arguments: Any) -> int:
    requests.close()
    function(Connection(descriptor), *arguments)
    return 0
