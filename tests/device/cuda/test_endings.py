"""The ends of other processes: the thread tells of each, and ends itself."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

import pytest

from zcactor.device.cuda.flags import Endings
from zcactor.device.event_pages import EventPage, Other
from zcactor.device.sealed import sealed_memory


def page_of(process: subprocess.Popen[bytes] | None) -> EventPage:
    """A page of a process; of this one for None."""
    owner = None
    if process is not None:
        pidfd = os.pidfd_open(process.pid)
        owner = Other(pidfd)
        os.close(pidfd)
    fd = sealed_memory("zcactor-test", 4096)
    page = EventPage(fd, owner)
    os.close(fd)
    return page


def waiting() -> subprocess.Popen[bytes]:
    """A process that ends with its standard input."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


@pytest.mark.usefixtures("no_leftovers")
def test_it_tells_of_each_end() -> None:
    told, seen = threading.Event(), list[Any]()

    def ended(page: EventPage) -> None:
        seen.append(page)
        told.set()

    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    endings = Endings(ended)
    endings.watch(page_of(None))
    assert threading.active_count() <= threads, "nothing is to be watched"
    first, second, third = processes = [waiting() for _ in range(3)]
    pages = [page_of(each) for each in processes]
    for each in (*pages, *pages):
        endings.watch(each)
    endings.forget(pages[2])
    third.communicate()
    assert not seen
    for process, page in ((second, pages[1]), (first, pages[0])):
        told.clear()
        process.communicate()
        assert told.wait(60) and seen[-1] is page
    assert len(seen) == 2
    late = page_of(None)
    endings.close()
    endings.close()
    for each in (*pages, late):
        each.close()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_process_that_had_ended_before() -> None:
    told = threading.Event()
    process = waiting()
    page = page_of(process)
    process.communicate()
    endings = Endings(lambda page: told.set())
    endings.watch(page)
    assert told.wait(60)
    endings.close()
    page.close()
