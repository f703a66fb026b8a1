"""The process that forks node agents for tests; see `tests.forked_agents`. It imports what agents do, and
what modules of tests do: most actors of tests have their classes there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from zcactor.node import agent_main
from zcactor.workers.orphans import MARK

__all__ = ["LIMIT", "NOBODY", "fork", "serve"]

LIMIT = 1 << 17
"""The largest size of a request, in bytes."""
NOBODY = "0" * 32
"""The mark of this process: as long as a node's id, which is written in its place."""


def fork(function: Callable[[], int]) -> int:
    """Fork a child that calls `function` and exits with its result, or with 1; return the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = function()
    except BaseException:  # the child has no frame above this one
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(requests: socket.socket) -> int:
    """Fork an agent for each request, until the other end of the socket is closed; then return 0."""
    import numpy  # noqa: F401  # the zygote would import it
    import pytest_asyncio  # noqa: F401  # an actor of a module of tests would import it, and pytest

    import zcactor.assembly.agents
    import zcactor.node.worker_main
    import zcactor.workers.pool  # noqa: F401
    from zcactor.assembly.endpoints import preload

    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401
    preload("", clustered=False)
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, LIMIT, 4)
        if not request:
            return 0
        reading, writing = os.pipe()
        between = fork(partial(_fork_agent, requests, reading, writing, request, descriptors))
        os.close(writing)
        os.waitpid(between, 0)
        requests.send(os.read(reading, 32))
        for each in (reading, *descriptors):
            os.close(each)


def _fork_agent(requests: socket.socket, reading: int, writing: int, request: bytes, descriptors: list[int]) -> int:
    """Fork an agent, and write its pid. Its parent ends at once, so that the process which asked adopts it: that one
    adopts orphans."""
    requests.close()
    os.close(reading)
    os.write(writing, b"%d" % fork(partial(_become_agent, writing, request, descriptors)))
    return 0


def _become_agent(writing: int, request: bytes, descriptors: list[int]) -> int:
    os.close(writing)
    environment, path = pickle.loads(request)
    control, lock, output, errors = descriptors
    os.setsid()
    for target, each in ((1, output), (2, errors)):
        os.dup2(each, target)
        os.close(each)
    _mark(environment[MARK])
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.modules["__main__"] = ModuleType("__main__")
    random.seed()
    agent_main.main(control, lock)
    return 0


def _mark(node: str) -> None:
    """Write a node's id where /proc shows the one that this process was started with."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARK.encode())
    assert place and ctypes.string_at(place) == NOBODY.encode()
    ctypes.memmove(place, node.encode(), len(node))
