"""One thread that waits for many sockets: it reports bytes, ends and timeouts, each once."""

from __future__ import annotations

import os
import queue
import socket
import threading
from functools import partial

import pytest

from zcactor.transport.tcp import crew, serve
from zcactor.transport.tcp.crew import NoThread
from zcactor.transport.tcp.serve import Waiting


def tell(told: queue.SimpleQueue[tuple[int, bool]], i: int, readable: bool) -> None:
    """Record the report to one socket's callback."""
    told.put((i, readable))


def test_each_is_told_once() -> None:
    mine, told = Waiting(), queue.SimpleQueue[tuple[int, bool]]()
    pairs = [socket.socketpair() for _ in range(10)]
    for i, (near, _) in enumerate(pairs):
        mine.until_readable(near.fileno(), 60.0, partial(tell, told, i))
    for i, (_, far) in enumerate(pairs):
        far.send(b"x") if i % 2 else far.close()
        assert told.get(timeout=60) == (i, True)
        far.send(b"more") if i % 2 else None
    while mine._epoll is not None:
        pass
    assert told.empty()
    mine.until_readable(pairs[1][0].fileno(), 60.0, lambda readable: told.put((1, readable)))
    assert told.get(timeout=60) == (1, True)
    for near, far in pairs:
        near.close()
        far.close()


def test_time_is_over() -> None:
    mine, told = Waiting(), queue.SimpleQueue[bool]()
    near, far = socket.socketpair()
    with near, far:
        mine.until_readable(near.fileno(), 0.001, told.put)
        assert told.get(timeout=60) is False
        while mine._epoll is not None:
            pass


def test_going_on_waiting_from_within() -> None:
    mine, done = Waiting(), threading.Event()
    near, far = socket.socketpair()
    with near, far:

        def read(readable: bool) -> None:
            assert readable
            if near.recv(1) == b"z":
                done.set()
            else:
                mine.until_readable(near.fileno(), 60.0, read)

        mine.until_readable(near.fileno(), 60.0, read)
        for letter in (b"a", b"b", b"z"):
            far.send(letter)
        assert done.wait(60)


def test_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise NoThread("can't start new thread")

    mine, before = Waiting(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="can't start"):
        patch.setattr(crew, "run", refuse)
        mine.until_readable(0, 60.0, lambda _: None)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer when leftovers of earlier tests end meanwhile
    told = queue.SimpleQueue[bool]()
    near, far = socket.socketpair()
    with near, far:
        mine.until_readable(near.fileno(), 60.0, told.put)
        far.send(b"x")
        assert told.get(timeout=60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_lets_go() -> None:
    told = queue.SimpleQueue[bool]()
    near, far = socket.socketpair()
    with near, far:
        serve.until_readable(near.fileno(), 60.0, told.put)
        child = os.fork()
        if child == 0:
            here, there = socket.socketpair()
            serve.until_readable(here.fileno(), 60.0, told.put)
            there.send(b"x")
            os._exit(7 if told.get(timeout=60) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert told.empty()
        far.send(b"x")
        assert told.get(timeout=60)
