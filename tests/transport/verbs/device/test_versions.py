"""Seals: the table's entry about an object while it lives, and no entry afterwards."""

from __future__ import annotations

import ctypes
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.transport.verbs.parts import open_device
from zcactor.transport.verbs.device import versions as module
from zcactor.transport.verbs.device.versions import SEAL_NBYTES, SealTable, read_seal
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric


class Holder:
    """An object as the table sees it, which can end."""


@pytest.fixture
def device() -> FakeDevice:
    return open_device(FakeFabric(), "a")


def entry(seals: SealTable, number: int) -> tuple[int, int, int]:
    """The entry that a peer would READ."""
    return read_seal(ctypes.string_at(seals.address + number * SEAL_NBYTES, SEAL_NBYTES))


def test_an_entry_lives_as_long_as_its_object(device: FakeDevice) -> None:
    seals, holder = SealTable(device), Holder()
    number = seals.seal(77, 4096, 100, holder)
    assert number > 0
    assert entry(seals, number) == (77, 4096, 100)
    assert seals.find(77) == number == seals.seal(77, 4096, 100, holder)
    del holder
    assert entry(seals, number) == (0, 0, 0)
    assert seals.find(77) == 0
    assert not seals.shortage


def test_largest_numbers(device: FakeDevice) -> None:
    seals, holder = SealTable(device), Holder()
    assert entry(seals, seals.seal(2**64 - 1, 2**64 - 1, 2**64 - 1, holder)) == (2**64 - 1,) * 3


def test_entry_0_is_nobodys(device: FakeDevice) -> None:
    seals, holder = SealTable(device), Holder()
    assert seals.seal(1, 2, 3, holder) != 0
    assert entry(seals, 0) == (0, 0, 0)


def test_clearing_by_hand(device: FakeDevice) -> None:
    seals, holder = SealTable(device), Holder()
    number = seals.seal(7, 1, 2, holder)
    seals.clear(7)
    seals.clear(7)
    seals.clear(8)
    assert entry(seals, number) == (0, 0, 0)
    other = Holder()
    assert seals.seal(9, 3, 4, other) == number
    del holder  # another object has its entry now
    assert entry(seals, number) == (9, 3, 4)


def test_peers_can_read_it_all_and_nothing_else(device: FakeDevice) -> None:
    seals = SealTable(device)
    region = device.regions[seals.rkey]
    assert region.remote_read
    assert (region.address, region.nbytes) == (seals.address, seals.count * SEAL_NBYTES)
    assert seals.address % SEAL_NBYTES == 0, "an entry lies across two cache lines"
    assert seals.count - 1 <= 0xFFFF, "a reference has 16 bits for the entry"


def test_full_table(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_COUNT", 4)
    seals, holders = SealTable(device), [Holder() for _ in range(4)]
    numbers = [seals.seal(i, i, i, holder) for i, holder in enumerate(holders, 1)]
    assert sorted(numbers) == [0, 1, 2, 3]
    assert seals.find(4) == 0
    assert seals.without == 1 and seals.shortage.startswith("1 reference")
    assert seals.seal(4, 4, 4, holders[3]) == 0
    assert seals.without == 2 and seals.shortage.startswith("2 references")
    (record,) = caplog.records
    assert "3 objects" in record.getMessage(), "said once"
    holders[1] = Holder()
    assert seals.seal(9, 9, 9, holders[1]) == numbers[1]


def test_closing(device: FakeDevice) -> None:
    seals, holder = SealTable(device), Holder()
    seals.seal(1, 2, 3, holder)
    seals.close()
    seals.close()
    assert not device.regions
    del holder  # this clears its entry, whose memory is still there
    assert seals.find(1) == 0


def test_registration_fails() -> None:
    fabric = FakeFabric()
    fabric.add_nic("a", pin_limit=100)
    with pytest.raises(OSError, match="ulimit -l"):
        SealTable(open_device(fabric, "a"))


def test_threads(device: FakeDevice) -> None:
    seals = SealTable(device)
    kept: list[list[tuple[int, int, Holder]]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for i in range(300):
            object_id = number * 1000 + i + 1
            holder = Holder()
            found = seals.seal(object_id, object_id, 1, holder)
            if i % 3 == 0:
                kept[number].append((object_id, found, holder))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of = {found: object_id for each in kept for object_id, found, _ in each}
    assert len(of) == 400
    assert all(entry(seals, found) == (object_id, object_id, 1) for found, object_id in of.items())


class Model(RuleBasedStateMachine):
    """The table, checked against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.seals = SealTable(open_device(FakeFabric(), "a"))
        self.living: dict[int, tuple[Holder, int, tuple[int, int, int]]] = {}
        self.next = 0

    @rule(offset=st.integers(0, 2**40), nbytes=st.integers(1, 2**40))
    def seal(self, offset: int, nbytes: int) -> None:
        self.next += 1
        holder = Holder()
        number = self.seals.seal(self.next, offset, nbytes, holder)
        self.living[self.next] = holder, number, (self.next, offset, nbytes)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        object_id = data.draw(st.sampled_from(sorted(self.living)))
        number = self.living.pop(object_id)[1]
        assert entry(self.seals, number) == (0, 0, 0)
        assert self.seals.find(object_id) == 0

    @invariant()
    def each_has_its_own(self) -> None:
        numbers = [number for _, number, _ in self.living.values()]
        assert len(set(numbers)) == len(numbers)
        for object_id, (_, number, expected) in self.living.items():
            assert self.seals.find(object_id) == number
            assert entry(self.seals, number) == expected


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
