"""Work on a range that is cut into parts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from zcactor.objectstore.parallel import PARALLEL_NBYTES, in_parallel

SIZES = [0, 1, PARALLEL_NBYTES - 1, PARALLEL_NBYTES, PARALLEL_NBYTES + 1, 3 * PARALLEL_NBYTES + 4097]


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_parts_make_the_whole(nbytes: int) -> None:
    parts: list[tuple[int, int]] = []
    in_parallel(lambda start, stop: parts.append((start, stop)), nbytes)
    parts.sort()
    assert parts[0][0] == 0
    assert parts[-1][1] == nbytes
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert all(start % 4096 == 0 for start, _ in parts)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_parts_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=20)
    seen: list[int] = []

    def work(start: int, stop: int) -> None:
        if start in (0, first):
            meeting.wait()
        seen.append(start)

    starts: list[int] = []
    in_parallel(lambda start, stop: starts.append(start), 4 * PARALLEL_NBYTES)
    first = sorted(starts)[1]
    in_parallel(work, 4 * PARALLEL_NBYTES)
    assert len(seen) == len(starts)


def test_a_failure_is_raised_after_every_part_has_ended() -> None:
    ended: list[int] = []

    def work(start: int, stop: int) -> None:
        ended.append(start)
        if start or len(os.sched_getaffinity(0)) == 1:
            raise LookupError(start)

    with pytest.raises(LookupError):
        in_parallel(work, 4 * PARALLEL_NBYTES)
    assert len(ended) == min(4, len(os.sched_getaffinity(0)))


SCRIPT = """
import atexit, os, threading
from zcactor.objectstore.parallel import PARALLEL_NBYTES, in_parallel

def total():
    parts = []
    in_parallel(lambda start, stop: parts.append(stop - start), 2 * PARALLEL_NBYTES)
    return sum(parts) == 2 * PARALLEL_NBYTES

assert total()
if (child := os.fork()) == 0:
    alone = threading.active_count() == 1
    os._exit(0 if alone and total() else 1)
assert os.waitpid(child, 0)[1] == 0
atexit.register(lambda: print("at exit", total()))
"""


@pytest.mark.slow
def test_threads_neither_outlive_a_fork_nor_hold_up_the_exit() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "at exit True\n", "")
