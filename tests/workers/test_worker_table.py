"""`zcactor.workers.worker_table`: the records of workers, and their ends."""

from __future__ import annotations

import asyncio

import pytest

from zcactor.errors import InsufficientResources
from zcactor.ids import ProcessId
from zcactor.workers.worker_table import WorkerRecord, WorkerTable


class Table(WorkerTable):
    """A table whose workers are records alone."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__(asyncio.get_running_loop(), lambda record: self.said.append(f"ended {record.label}"))

    def add(self, label: str) -> WorkerRecord:
        record = WorkerRecord(ProcessId(label.encode()), self.loop, label, ProcessId(b""), shared=False)
        self.by_process[record.process] = record
        return record

    def _leave(self, record: WorkerRecord) -> None:
        self.said.append(f"left {record.label}: {record.ended.done()}")


async def test_a_worker_ends_once() -> None:
    table = Table()
    record = table.add("w")
    table._end(record, "its process ended")
    table._end(record, "and again")
    assert table.said == ["left w: False", "ended w"]
    assert not table.by_process
    assert record.ended.result() == "its process ended"
    with pytest.raises(InsufficientResources, match="for an actor: its process ended"):
        await record.started(60, "an actor")


async def test_the_cause_of_a_kill_counts() -> None:
    table = Table()
    one, two = table.add("one"), table.add("two")
    table.kill_all("the node shuts down")
    assert one.doomed and two.doomed
    waiting = asyncio.ensure_future(table.wait_all(60))
    await asyncio.sleep(0)
    for record in (one, two):
        table._end(record, "its process was killed by signal 9")
    await waiting
    assert {one.ended.result(), two.ended.result()} == {"the node shuts down"}
    await table.wait_all(0)
