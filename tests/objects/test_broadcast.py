"""The sources of a broadcast: the owner's decisions against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zcactor.objects.broadcast import AT_ONCE, MAX_COPIES, OWNER, Copy, Spread


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


readers = st.integers(1, 12).map(name)
machines = st.sampled_from(["", "", "a", "b"])


class Spreading(RuleBasedStateMachine):
    """Readers take steps in any order, beside a model of their transfers and copies."""

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
                continue  # this reader maps the copy, and is done
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
        """Serve every reader in the end."""
        while self.transfers:
            reader = min(self.transfers)
            del self.transfers[reader]
            self.ids += 1
            self.copies[reader] = self.ids
            self.spread.ended(reader, Copy(reader, self.ids, 0, self.machines[reader]))
            self.decide()
        assert not self.spread.waiting


Spreading.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpreading = pytest.mark.slow(Spreading.TestCase)


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
    # In each round, every copy makes two more.
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
