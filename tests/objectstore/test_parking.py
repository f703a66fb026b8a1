"""Objects that are kept for readers without a connection, and the end of that."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from tests.descriptors import opened
from tests.driver.programs import until
from zcactor.objectstore.parking import Parking
from zcactor.objectstore.store import Store
from zcactor.transport.os_process import OsProcess


class Kept:
    """An object that is parked."""


@contextlib.contextmanager
def reader() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zcactor-parking"]


def test_it_is_kept_until_the_reader_is_gone() -> None:
    before = opened()
    parking = Parking()
    with reader() as first, reader() as second:
        things = [Kept() for _ in range(4)]
        seen = [ref(thing) for thing in things]
        parking.park(OsProcess.of(first.pid), 1, {1: things[0], 2: things[1]})
        parking.park(OsProcess.of(second.pid), 1, {1: things[2]})
        parking.park(OsProcess.of(first.pid), 2, {3: things[3]})
        things.clear()
        assert parking.total == 4 and len(waiting()) == 1
        parking.sweep()
        assert all(thing() for thing in seen)
        first.kill()
        until(lambda: [thing() is None for thing in seen] == [True, True, False, True], "what the first one had")
        assert parking.total == 1
        second.kill()
        until(lambda: seen[2]() is None and not waiting(), "what the second one had")
    assert opened() <= before


def test_it_is_let_go_of_when_the_reader_says_so() -> None:
    before = opened()
    parking = Parking()
    with reader() as child:
        known = OsProcess.of(child.pid)
        for connection in (1, 2, 3):
            parking.park(known, connection, {10: Kept(), 11: Kept(), 20 + connection: Kept()})
        assert parking.total == 9
        parking.hold(known, [1, 2, 99], {11, 22})
        assert parking.total == 1 + 2 + 3, "of the third connection it has not said anything"
        parking.hold(known, [1, 2], ())
        assert parking.total == 3 and len(waiting()) == 1
        parking.hold(OsProcess(0, -1), [3], ())
        assert parking.total == 3
        parking.hold(known, [3], {5})
        assert parking.total == 0 and not waiting()
    assert opened() <= before


def test_one_that_is_gone_already() -> None:
    parking = Parking()
    with reader() as child:
        known = OsProcess.of(child.pid)
    thing = Kept()
    seen = ref(thing)
    parking.park(known, 1, {1: thing})
    del thing
    assert seen() is None and parking.total == 0 and not waiting()


def test_looking_is_enough_for_one_that_has_ended() -> None:
    """A sweep sees the end without the waiting thread."""
    parking = Parking()
    with reader() as child:
        parking.park(OsProcess.of(child.pid), 1, {1: Kept()})
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        parking.sweep()
        assert parking.total == 0 and not waiting()


class Ending(OsProcess):
    """A process that ends, and is waited for, between the first look at it and the second."""

    def open(self) -> int | None:
        fd = super().open()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if fd is not None:  # the first look did not see the end: by this descriptor nobody does
            own = os.pidfd_open(os.getpid())
            os.dup2(own, fd)
            os.close(own)
        return fd


def test_one_that_ends_before_it_is_watched_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcactor.objectstore.parking._RETRY", 3600.0)
    parking = Parking()
    with reader() as child:
        parking.park(Ending(*OsProcess.of(child.pid)), 1, {1: Kept()})
        until(lambda: parking.total == 0 and not waiting(), "what the one that has ended had")


def test_one_that_cannot_be_told_from_others_is_never_gone() -> None:
    parking = Parking()
    parking.park(OsProcess(0, -1), 1, {1: Kept()})
    parking.sweep()
    assert parking.total == 1 and not waiting()
    with reader() as child:
        parking.park(OsProcess.of(child.pid), 1, {1: Kept()})
        child.kill()
        until(lambda: parking.total == 1 and not waiting(), "the other one's")


def test_without_a_descriptor_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "no descriptor is left")

    parking = Parking()
    with reader() as child, monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        patch.setattr(os, "eventfd", refuse)
        parking.park(OsProcess.of(child.pid), 1, {1: Kept()})
        assert parking.total == 1 and len(waiting()) == 1
        patch.undo()
        child.kill()
        until(lambda: parking.total == 0 and not waiting(), "what could not be watched at first")


@pytest.mark.parametrize(("module", "call"), [(os, "eventfd"), (select, "epoll")])
def test_without_a_descriptor_nobody_waits_for_the_thread(
    monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    def refuse(*_: object) -> Any:
        raise OSError(24, "no descriptor is left")

    monkeypatch.setattr("zcactor.objectstore.parking._RETRY", 3600.0)
    monkeypatch.setattr(module, call, refuse)
    parking = Parking()
    with reader() as child:
        parking.park(OsProcess.of(child.pid), 1, {1: Kept()})
        parking.hold(OsProcess.of(child.pid), [1], [])
        assert parking.total == 0 and not waiting()


@pytest.mark.parametrize("nbytes", [1 << 20, 8 << 20])
def test_a_closed_store_keeps_the_bytes_of_what_is_parked(nbytes: int) -> None:
    store = Store(64 << 20, os.urandom(16))
    array = store.empty(nbytes, "u1")
    array[:] = 5
    block = store.block_of(array)
    assert block is not None
    fd = os.dup(store.arena.fd)
    with reader() as child:
        store.parking.park(OsProcess.of(child.pid), 1, {block[0].id: block[0]})
        offset = block[0].offset
        del array, block
        store.close()
        assert os.pread(fd, nbytes, offset) == b"\5" * nbytes
        child.kill()
        until(lambda: store.stats().used == 0 and not waiting(), "the reader's end")
    if nbytes >= 2 << 20:
        assert os.pread(fd, nbytes, offset) == bytes(nbytes), "and then they go back to the system"
    os.close(fd)
