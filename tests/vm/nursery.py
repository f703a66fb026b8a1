"""Processes that are forked from one that has everything imported, and neither threads nor loops nor a device.

To start an interpreter takes a guest ten seconds, and a process that uses a device is not to be forked: its child would
hold its connections open. So `phases.py` has a nursery for each run of pytest, from before anything else happens in it.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Child", "fork", "start_nursery"]

_LIMIT = 1 << 16
"""Bytes of a request at most."""

_nursery: socket.socket | None = None
"""What leads to it."""


def fork(function: Callable[[], int]) -> int:
    """A child that calls `function` and exits with the status that it returns, or with 1; its pid."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = function()
    except BaseException:  # the last frame of a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start_nursery() -> None:
    """Fork one, from which this process may have children from now on. It ends with this process."""
    global _nursery
    _nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork(partial(_serve, theirs))
    theirs.close()


class Child:
    """A child of the nursery, which calls ``function(pipe, *arguments)`` with the other end of `pipe`.

    Args:
        function: one of a module, as `pickle` takes it.
        arguments: are pickled.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        assert _nursery is not None, "phases.py runs this"
        self.pipe, theirs = multiprocessing.connection.Pipe()
        with theirs:
            socket.send_fds(_nursery, [pickle.dumps((function, arguments))], [theirs.fileno()])
            self.pid = int(_nursery.recv(_LIMIT))
        self._alive = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended."""
        if self._alive >= 0:
            signal.pidfd_send_signal(self._alive, signal.SIGKILL)
            select.select([self._alive], [], [])
            os.close(self._alive)
            self._alive = -1


def _serve(requests: socket.socket) -> int:
    """The nursery. Its children stay zombies until it ends: there are few."""
    global _nursery
    assert _nursery is not None
    _nursery.close()  # the other end: else no end of file would come
    _nursery = None
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LIMIT, 1)
        if not request:
            return 0
        function, arguments = pickle.loads(request)  # which imports what the children need, once for all of them
        pid = fork(partial(_child, requests, descriptors[0], function, arguments))
        os.close(descriptors[0])
        requests.send(b"%d" % pid)


def _child(requests: socket.socket, descriptor: int, function: Callable[..., None], arguments: Any) -> int:
    requests.close()
    function(Connection(descriptor), *arguments)
    return 0
