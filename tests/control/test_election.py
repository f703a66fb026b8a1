"""The beginning of a term that others can end; `tests.node.test_standby` has those of heads with a log in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.control import election
from zcactor.control.election import Election
from zcactor.control.entries import DriverEntry, MemberEntry
from zcactor.control.head_log import Candidate, Deposed, HeadState, LogUnavailable, Term
from zcactor.control.memory_log import MemoryLog
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId
from zcactor.process.tasks import Tasks

ME = Candidate("host:1", "host", 1)
NODE, ENDED, DRIVER = (ProcessId(letter * 16) for letter in (b"n", b"e", b"d"))
PATIENCE = 20.0


class FailingLog(MemoryLog):
    """A log that cannot be read at first."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = [*errors]

    async def load(self, term: Term) -> HeadState:
        """Fail while there are errors."""
        if self.errors:
            raise self.errors.pop(0)
        return await super().load(term)


class Head(Election):
    """A head that notes whom it calls. Nobody hears it at first, and `ENDED` has ended."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log, "the log", ProcessId(b"c" * 16), 6.0)
        self.called: list[tuple[str, int]] = []
        self.all = asyncio.Event()

    async def candidates(self) -> Sequence[str]:
        """This head alone."""
        return (self.own,)

    async def refuses(self, address: str) -> bool:
        """One node has ended."""
        return address.startswith("ended")

    async def summon(self, address: str, epoch: int) -> None:
        """Note the call."""
        self.called.append((address, epoch))
        if len(self.called) <= 3:
            raise ConnectionLost("nobody listens")
        self.all.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "_LOOK", 0.0)
    monkeypatch.setattr(election, "_PAUSE", 0.0)


@pytest.mark.parametrize("error", [LogUnavailable("the log", "it is silent"), Deposed(1, 2)])
async def test_a_head_that_has_stood_by_campaigns_until_it_has_read_the_log(error: Exception) -> None:
    head = Head(FailingLog(error))
    with pytest.raises(type(error)):
        await head.win(ME)
    head = Head(FailingLog(error))
    head.stood = True
    await head.win(ME)
    assert head._term is not None and head._term.epoch == 2


async def test_nodes_and_programs_are_called_until_they_have_come_or_have_ended() -> None:
    head = Head(MemoryLog())
    await head.campaign(ME)
    gone: list[object] = []
    taking: Any = SimpleNamespace(
        done=asyncio.Event(), awaits=lambda process: process not in gone, ended=gone.append,
    )  # fmt: skip
    tasks = Tasks(asyncio.get_running_loop())
    leader_lease = SimpleNamespace(ended=gone.append)
    made: Any = SimpleNamespace(
        process=SimpleNamespace(tasks=tasks), members=SimpleNamespace(leader_lease=leader_lease)
    )
    members = {each.hex(): MemberEntry({"address": name}, {}) for each, name in ((NODE, "node"), (ENDED, "ended"))}
    drivers = {DRIVER.hex(): DriverEntry("driver", "b"), bytes(16).hex(): DriverEntry("", "b")}
    entries: Any = SimpleNamespace(members=members, drivers=drivers)
    head.expect(made, taking, entries)
    async with asyncio.timeout(PATIENCE):
        await head.all.wait()
    taking.done.set()
    await tasks.settled(PATIENCE)
    assert gone == [ENDED, ENDED.hex()]
    assert {"node", "driver"} <= {address for address, _ in head.called} <= {"node", "driver", "ended"}
    assert {epoch for _, epoch in head.called} == {1}
