"""Heads that wait for half of their nodes, and an operator who has them act."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.control.forcing import force, reason, waited_for

ABSENT = {"bb": "node bb (b, b:1)", "cc": "node cc (c, c:1)", "dd": "node dd (d, d:1)"}


class FakeLeaderLease:
    """The lease of a head that less than half of its nodes serve."""

    def __init__(self) -> None:
        self.is_waited = True
        self.silent = frozenset({"cc", "bb", "ee"})
        self.forced = asyncio.Event()

    def lacks_half(self) -> bool:
        """Whether it waits for half of its nodes."""
        return self.is_waited

    def force(self) -> None:
        """Note that."""
        self.is_waited = False
        self.forced.set()


def waiting() -> Any:
    """A head that takes over, and waits for nodes. One that is absent has ended, and one that is silent has just
    come."""
    taking = SimpleNamespace(absent=ABSENT, given_up=[], done=asyncio.Event())
    return SimpleNamespace(leader_lease=FakeLeaderLease(), taking_over=taking)


async def test_a_head_that_waits_says_for_whom() -> None:
    members = waiting()
    assert waited_for(members) == ["node bb (b, b:1)", "node cc (c, c:1)"]
    assert "waits for node bb (b, b:1), node cc (c, c:1). " in reason(members)
    assert "--standby --force" in reason(members)
    members.leader_lease.is_waited = False
    assert waited_for(members) == []


@pytest.mark.parametrize("absent", ["leader_lease", "taking_over"])
async def test_a_head_that_waits_for_nobody(absent: str) -> None:
    members = waiting()
    setattr(members, absent, None)
    assert waited_for(members) == []
    with pytest.raises(ValueError, match="acts already, so there is nothing to force"):
        await force(members)


async def test_a_head_acts_by_force(caplog: pytest.LogCaptureFixture) -> None:
    members = waiting()
    forcing = asyncio.create_task(force(members))
    await members.leader_lease.forced.wait()
    assert not forcing.done()
    assert "by force, without node bb (b, b:1), node cc (c, c:1)" in caplog.text
    members.taking_over.given_up = ["node bb (b, b:1)"]
    members.taking_over.done.set()
    assert await forcing == ["node bb (b, b:1)"]
    with pytest.raises(ValueError, match="nothing to force"):
        await force(members)


async def test_a_head_that_is_about_to_act_is_only_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    members = waiting()
    members.leader_lease.is_waited = False
    members.taking_over.given_up = []
    forcing = asyncio.create_task(force(members))
    await members.leader_lease.forced.wait()
    members.taking_over.done.set()
    assert await forcing == []
    assert not caplog.records
