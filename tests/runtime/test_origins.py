"""Who takes an object from where: the owner's decisions against a model, and its answers to those who ask."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.runtime.agents import turns
from zcactor.objectstore.store import Block, Store
from zcactor.runtime import origins as origins_module
from zcactor.runtime.origins import AT_ONCE, MAX_COPIES, OWNER, Copy, Origins, Spread

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


readers = st.integers(1, 12).map(name)
machines = st.sampled_from(["", "", "a", "b"])


class Spreading(RuleBasedStateMachine):
    """What readers do in any order, next to what they know themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = Spread()
        self.machines: dict[bytes, str] = {}
        self.transfers: dict[bytes, Copy] = {}
        self.copies: dict[bytes, int] = {}
        self.dead: set[tuple[bytes, int]] = set()
        self.direct = 0
        self.ids = 0

    def decide(self) -> None:
        direct = self.direct
        had_copies = bool(self.copies)
        for reader, copy in self.spread.decide():
            assert (copy.process, copy.id) not in self.dead, "what was reported gone is not handed out"
            if copy is OWNER:
                self.direct += 1
            else:
                assert self.copies[copy.process] == copy.id
            if copy.machine and copy.machine == self.machines[reader]:
                continue  # it maps, and is done
            assert reader not in self.transfers
            self.transfers[reader] = copy
        if had_copies:
            assert self.direct <= max(direct, AT_ONCE)

    @rule(reader=readers, machine=machines)
    def ask(self, reader: bytes, machine: str) -> None:
        self.transfers.pop(reader, None)
        self.copies.pop(reader, None)
        self.machines[reader] = machine
        self.spread.ask(reader, machine)
        self.decide()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        reader = data.draw(st.sampled_from(sorted(self.transfers)))
        del self.transfers[reader]
        self.ids += 1
        if well:
            self.copies[reader] = self.ids
        self.spread.ended(reader, Copy(reader, self.ids, 0, self.machines[reader]) if well else None)
        self.decide()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def find_a_location_dead(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.transfers)))
        failed = self.transfers.pop(reader).process
        if failed in self.copies:
            self.dead.add((failed, self.copies.pop(failed)))
        self.spread.gone(failed)
        self.spread.ask(reader, self.machines[reader])
        self.decide()

    @rule(reader=readers)
    def lose(self, reader: bytes) -> None:
        self.transfers.pop(reader, None)
        if reader in self.copies:
            self.dead.add((reader, self.copies.pop(reader)))
        self.spread.left(reader)
        self.decide()

    @invariant()
    def no_place_is_overrun(self) -> None:
        assert all(count <= AT_ONCE for count in Counter(copy.process for copy in self.transfers.values()).values())

    @invariant()
    def who_waits_waits_for_somebody(self) -> None:
        assert self.transfers or not self.spread.waiting

    @invariant()
    def it_knows_what_is_so(self) -> None:
        assert {reader: copy for reader, (copy, _) in self.spread.running.items()} == self.transfers
        assert {process: copy.id for process, copy in self.spread.copies.items()} == self.copies

    def teardown(self) -> None:
        """Everyone is served in the end."""
        while self.transfers:
            reader = min(self.transfers)
            del self.transfers[reader]
            self.ids += 1
            self.copies[reader] = self.ids
            self.spread.ended(reader, Copy(reader, self.ids, 0, self.machines[reader]))
            self.decide()
        assert not self.spread.waiting


Spreading.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpreading = Spreading.TestCase


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 300])
def test_a_broadcast_takes_few_rounds_and_two_transfers_from_the_owner(count: int) -> None:
    spread = Spread()
    for number in range(1, count + 1):
        spread.ask(name(number), "")
    rounds = direct = 0
    while running := spread.decide():
        rounds += 1
        direct += sum(copy is OWNER for _, copy in running)
        for reader, _ in running:
            spread.ended(reader, Copy(reader, 1, 0, ""))
    assert not spread.waiting
    assert direct == min(count, AT_ONCE)
    # Each round, every copy makes two more.
    assert rounds <= 1 + max(0, (count - 1).bit_length() - 1)


def test_one_transfer_for_each_machine() -> None:
    spread = Spread()
    for number in range(1, 7):
        spread.ask(name(number), "ab"[number % 2])
    first = spread.decide()
    assert [copy for _, copy in first] == [OWNER, OWNER]
    assert not spread.decide()
    for reader, _ in first:
        spread.ended(reader, Copy(reader, 1, 0, spread.running[reader][1]))
    rest = spread.decide()
    assert len(rest) == 4 and not spread.running, "who maps transfers nothing"
    assert all(copy.machine == "ab"[reader[0] % 2] for reader, copy in rest)


def test_copies_that_are_remembered_are_bounded() -> None:
    spread = Spread()
    for number in range(1, MAX_COPIES + 3):
        spread.ended(name(number), Copy(name(number), 1, 0, ""))
    assert len(spread.copies) == MAX_COPIES and name(1) not in spread.copies


@pytest.fixture
def store() -> Any:
    store = Store(16 << 20, os.urandom(16))
    yield store
    store.close()


def asked(origins: Origins, block: Block, number: int, machine: str = "", failed: bytes = b"") -> asyncio.Task[Copy]:
    return asyncio.get_running_loop().create_task(
        origins.source(name(number), block, block.offset, block.nbytes, machine, failed)
    )


async def test_questions_wait_for_their_answer(store: Store) -> None:
    origins, block = Origins(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 6)]
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False, False]
    copy = Copy(name(1), 7, 64, "")
    origins.ended(name(1), block, block.offset, block.nbytes, copy)
    assert await tasks[2] == copy and await tasks[3] == copy
    assert not tasks[4].done()
    origins.left(name(3))
    assert await tasks[4] == copy
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4), name(5)}
    assert origins.spread(block, block.offset, 50) is None
    origins.ended(name(1), block, block.offset, 50, copy)  # of what nobody has asked for


async def test_a_question_that_is_cancelled_holds_nobody_up(store: Store) -> None:
    origins, block = Origins(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 5)]
    await turns()
    tasks[2].cancel()
    origins.ended(name(1), block, block.offset, block.nbytes, None)  # before it could notice
    assert await tasks[3] == OWNER
    await asyncio.wait(tasks)
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4)} and not spread.waiting
    again = asked(origins, block, 5)
    await turns()
    again.cancel()
    await asyncio.wait([again])
    assert not spread.waiting
    first, second = asked(origins, block, 6), asked(origins, block, 6)
    assert await first == OWNER, "who asks again has given up what it asked before"
    origins.left(name(2))
    assert await second == OWNER and set(spread.running) == {name(4), name(6)}


async def test_whoever_waits_too_long_is_served_by_the_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins_module, "PATIENCE", 0)
    origins, block = Origins(lambda: 0.0), store.allocate(100)
    assert [await asked(origins, block, number) for number in range(1, 5)] == [OWNER] * 4
    monkeypatch.setattr(origins_module, "PATIENCE", PATIENCE)
    monkeypatch.setattr(origins_module, "MAX_WAITING", 1)
    assert await asked(origins, block, 5) == OWNER
    waits, served = asked(origins, block, 6), asked(origins, block, 7)
    assert await served == OWNER
    assert not waits.done()
    origins.left(name(5))
    assert await waits == OWNER


@pytest.mark.parametrize("machine", ["", "a"])
async def test_readers_that_never_say_that_they_are_done_hold_nobody_up_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    clock = 1000.0
    origins, block = Origins(lambda: clock), store.allocate(100)
    assert [await asked(origins, block, number, machine * number) for number in (1, 2)] == [OWNER] * 2
    clock += 1
    waits = asked(origins, block, 3, machine)
    await turns()
    assert not waits.done()
    clock += origins_module.PATIENCE
    assert await asked(origins, block, 4, machine * 4) == OWNER and await waits == OWNER
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(3), name(4)}
    late = Copy(name(1), 7, 64, "")
    origins.ended(name(1), block, block.offset, block.nbytes, late)
    assert await asked(origins, block, 5) == late, "what is slow and ends in the end is a place all the same"


async def test_of_those_who_wait_for_somebody_who_hangs_one_alone_waits_to_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins, block = Origins(lambda: 0.0), store.allocate(100)
    assert [await asked(origins, block, number) for number in (1, 2)] == [OWNER] * 2
    others = [asked(origins, block, number) for number in (3, 4)]
    await turns()
    monkeypatch.setattr(origins_module, "PATIENCE", 0)
    assert await asked(origins, block, 5) == OWNER
    assert [await other for other in others] == [OWNER] * 2


async def test_what_is_known_goes_with_the_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins_module, "MAX_VIEWS", 2)
    origins, block = Origins(), store.allocate(100)
    for nbytes in (10, 20, 30):
        assert await origins.source(name(1), block, block.offset, nbytes, "") == OWNER
    assert [origins.spread(block, block.offset, nbytes) is None for nbytes in (10, 20, 30)] == [False, False, True]
    del block
    assert not origins._asked
    origins.left(name(1))
