"""The event loop stays free while arrays of gigabytes arrive: its thread takes no memory from the system for them."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.objectstore.arena import Arena
from zcactor.process.context import current
from zcactor.testing.waiting import until

MIB = 1 << 20
PATIENCE = 60


@zc.actor
class Maker:
    """A maker of arrays of bytes, which its caller pulls."""

    def make(self, nbytes: int) -> np.ndarray:
        made = zc.empty(nbytes, np.uint8)
        made[:] = np.arange(nbytes, dtype=np.uint8)
        return made


class Commits:
    """The requests for memory in the arenas of this process: the thread, and the range."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.refused = False
        commit = Arena.commit

        def watched(arena: Arena, offset: int, nbytes: int) -> None:
            self.seen.append((threading.get_ident(), offset, nbytes))
            if self.refused:
                raise zc.OutOfMemory(nbytes, 0, arena.nbytes, 0, "the test refuses") from OSError(errno.ENOSPC, "full")
            commit(arena, offset, nbytes)

        monkeypatch.setattr(Arena, "commit", watched)

    def outside(self, array: np.ndarray) -> int:
        """The bytes of an array for which other threads than this one asked, and none on this one."""
        low = array.ctypes.data - current().store.arena.address
        inside = [each for each in self.seen if each[1] < low + array.nbytes and low < each[1] + each[2]]
        assert threading.get_ident() not in {thread for thread, *_ in inside}
        return sum(nbytes for *_, nbytes in inside)


def is_used(nbytes: int) -> bool:
    return zc.stats().store_used == nbytes


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    return Commits(monkeypatch)


async def test_memory_of_pulled_arrays_is_taken_by_the_threads_that_receive_them(commits: Commits) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(transports=("tcp",), log_to_driver=False):
        maker: Any = await Maker.spawn()
        # Above and below the bytes from which several streams share a pull, and twice the same, at once.
        for nbytes in (MIB + 1, 64 * MIB - 1, 64 * MIB, 100 * MIB):
            one, other = await asyncio.gather(maker.make(nbytes), maker.make(nbytes))
            for each in (one, other):
                assert commits.outside(each) == nbytes
                assert (each[0], each[-1]) == (0, (nbytes - 1) % 256)
                assert int(each[:: 4096 + 1].astype(np.int64).sum()) == int(
                    np.arange(nbytes, dtype=np.uint8)[:: 4096 + 1].astype(np.int64).sum()
                )
            del one, other, each
            commits.seen.clear()


async def test_a_system_without_memory_fails_the_pull_and_leaves_no_gap(commits: Commits) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(transports=("tcp",), log_to_driver=False):
        maker: Any = await Maker.spawn()
        for _ in range(2):  # the second one of a size gets memory that is kept
            used = zc.stats().store_used
            commits.refused = True
            with pytest.raises(zc.OutOfMemory, match="the test refuses"):
                await maker.make(80 * MIB)
            commits.refused = False
            await until(partial(is_used, used), "threads that have failed keep the memory")
            made = await maker.make(80 * MIB)
            assert (made[0], made[-1]) == (0, 255)
            del made
