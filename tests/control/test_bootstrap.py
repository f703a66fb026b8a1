"""The beginning of a head with a log; `tests.node.test_head_state` has heads with a log in a file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from zcactor.control.bootstrap import Bootstrap
from zcactor.control.entries import closed_change, opened_change, read
from zcactor.control.head_log import Candidate, Change, LogUnusable
from zcactor.control.memory_log import MemoryBook, MemoryLog
from zcactor.ids import ProcessId

ME = Candidate("host:1", "host", 1)
CLUSTER, OTHER = ProcessId(b"c" * 16), ProcessId(b"o" * 16)


class FakeHead:
    """A head that records, and takes over at once."""

    def __init__(self, log: MemoryLog) -> None:
        self.taken: list[Any] = []
        self.tasks: list[Any] = []
        self.members = SimpleNamespace(patience=0.0, log="", fence=8.0, leader_lease=None)
        self.process = SimpleNamespace(tasks=SimpleNamespace(start=self.tasks.append))
        self.recorder = SimpleNamespace(leads=self._leads, record=self._record)
        self._log = log

    def _leads(self, term: Any) -> None:
        self._term = term

    async def _record(self, *changes: Change) -> None:
        assert not self.tasks, "the time in which nodes and programs return has not begun"
        await self._log.record(self._term, changes)

    def take_over(self, entries: Any) -> Any:
        async def finish(fence: float, permitted: Any) -> bool:
            assert permitted is None
            self.taken.append(fence)
            return True

        self.taken.append(entries)
        return SimpleNamespace(finish=finish, nodes=2, actors=3)


async def begin(book: MemoryBook) -> FakeHead:
    log = MemoryLog(book)
    beginning = Bootstrap(log, "the log", CLUSTER, 6.0, "remove it")
    await beginning.campaign(ME)
    head: Any = FakeHead(log)
    await beginning.begin(head, "host:1")
    assert (head.members.patience, head.members.log) == (6.0, "the log")
    await log.aclose()
    return head  # type: ignore[no-any-return]


async def changed(book: MemoryBook, *changes: Change) -> None:
    log = MemoryLog(book)
    await log.record(await log.campaign(ME), changes)
    await log.aclose()


async def test_the_same_cluster_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    book = MemoryBook()
    first = await begin(book)
    assert not first.taken
    known = read(book.state).cluster
    assert known is not None
    assert (known.cluster, known.address, known.closed) == (CLUSTER, "host:1", False)
    second = await begin(book)
    assert second.taken[0].cluster == known
    await second.tasks[0]
    assert second.taken[1:] == [8.0]
    assert f"took over cluster {CLUSTER.hex()[:8]}, epoch 2: 2 nodes, 3 actors, 0 names" in caplog.text


async def test_a_cluster_that_was_closed_is_forgotten() -> None:
    book = MemoryBook()
    await begin(book)
    await changed(book, closed_change(), *[Change("recipe", f"{number}", b"x") for number in range(120)])
    await changed(book, *[Change("driver", f"{number}", b"x") for number in range(20)])
    book.state["driver"].clear()
    assert not (await begin(book)).taken
    assert set(book.state) - {"driver"} == {"cluster"}


async def test_a_log_that_cannot_be_used() -> None:
    book = MemoryBook()
    await changed(book, opened_change(OTHER, "host:2"))
    with pytest.raises(LogUnusable, match="another head has begun a cluster with the log the log just now; try again"):
        await Bootstrap(MemoryLog(book), "the log", CLUSTER, 6.0).campaign(ME)
    book = MemoryBook()
    older = msgspec.msgpack.encode({"closed": False, "cluster": CLUSTER, "address": "host:1", "protocol": 13})
    await changed(book, Change("cluster", "state", older))
    with pytest.raises(LogUnusable, match=r"speaks protocol 13, and this zcactor speaks \d+: .*; or remove it"):
        await Bootstrap(MemoryLog(book), "the log", CLUSTER, 6.0, "remove it").campaign(ME)
    book = MemoryBook()
    await changed(book, Change("cluster", "state", b"?"))
    with pytest.raises(LogUnusable, match="the log the log has an entry of another form: .*; remove it"):
        await Bootstrap(MemoryLog(book), "the log", CLUSTER, 6.0, "remove it").campaign(ME)
