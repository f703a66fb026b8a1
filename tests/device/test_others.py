"""Other processes, and whether they have ended."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from zcactor.device.event_pages import Other


@pytest.mark.usefixtures("no_leftovers")
def test_another_process() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        process = os.pidfd_open(child.pid)
        other = Other(process)
        os.close(process)
        assert not other.has_ended() and other.fileno() >= 0
        child.communicate()
        assert other.has_ended()
        other.close()
        other.close()
        assert other.has_ended() and other.fileno() < 0


def test_two_threads_look_at_once() -> None:
    process = os.pidfd_open(os.getpid())
    other = Other(process)
    os.close(process)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda _: other.has_ended(), range(2000)))
    other.close()
