"""Extents of other processes: imported once, refused where they are wrong, and unmapped with the last lease."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conformance.device_peer import read, until_done, write
from tests.device.helpers import fetched, held, opened
from zcactor.device.imports import ImportedExtent, Imports
from zcactor.device.memory import DeviceBlock
from zcactor.device.store import DeviceStore
from zcactor.errors import DeviceError, ProtocolError
from zcactor.transport.local.extents import ExtentReply, RemoteExtent

OWNER = b"o" * 16


@pytest.fixture
def stores() -> Iterator[tuple[DeviceStore, DeviceStore]]:
    with opened() as ours, opened() as theirs:
        yield ours, theirs


def looked(store: DeviceStore) -> None:
    """Do what the loop of a store would do."""
    store.tending._loop.call_soon(store.tending._loop.stop)
    store.tending._loop.run_forever()


def test_bytes_of_an_imported_extent(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    write(theirs.driver, 0, block.address, b"over there")
    assert ours.imports.find(OWNER, block.offset, 100) is None
    assert ours.imports.add(OWNER, fetched(theirs, block.offset)) == ""
    extent = ours.imports.find(OWNER, block.offset, 100)
    assert extent is not None and len(ours.imports) == 1 and extent.readonly
    address = extent.address + block.offset - extent.offset
    assert read(ours.driver, 0, address, 10) == b"over there"
    assert ours.imports.add(OWNER, fetched(theirs, block.offset)) == "" and len(ours.imports) == 1
    assert ours.imports.find(OWNER, block.offset, extent.nbytes + 1) is None
    assert ours.imports.find(b"x" * 16, block.offset, 1) is None


@pytest.mark.usefixtures("no_leftovers")
def test_extents_end_with_their_last_user(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    ours.imports.add(OWNER, fetched(theirs))  # the page of events stays
    before = len(os.listdir("/proc/self/fd"))
    ours.imports.add(OWNER, fetched(theirs, block.offset))
    kept = ours.imports.find(OWNER, block.offset, 1)
    assert kept is not None
    address = kept.address
    ours.imports.drop(b"x" * 16, kept.offset)
    ours.imports.drop(OWNER, kept.offset + 1)
    assert len(ours.imports) == 1
    ours.imports.drop(OWNER, kept.offset)
    assert len(ours.imports) == 0
    looked(ours)
    assert ours.driver.owner_of(address) is not None
    del kept
    looked(ours)
    assert ours.driver.owner_of(address) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_owner_whose_end_nobody_would_notice(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    theirs.supply(OWNER, []).close()  # it has a page now
    before = len(os.listdir("/proc/self/fd"))
    assert "another PID namespace" in ours.imports.add(OWNER, theirs.supply(OWNER, [block.offset]))
    assert not len(ours.imports) and len(os.listdir("/proc/self/fd")) <= before


def test_owners_are_forgotten(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    ours.imports.add(OWNER, fetched(theirs, block.offset))
    ours.imports.forget(OWNER)
    ours.imports.forget(OWNER)
    assert ours.imports.find(OWNER, block.offset, 1) is None and len(ours.imports) == 0


@pytest.mark.usefixtures("no_leftovers")
def test_extents_that_overlap(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    ours.imports.add(OWNER, fetched(theirs, block.offset))
    for shift in (-1, 1):
        answer = fetched(theirs, block.offset)
        (extent,) = answer.extents
        behind = extent._replace(offset=block.offset + (1 << 30), fd=os.dup(extent.fd))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError, match="overlaps"):
            answer.extents[:] = extent._replace(offset=block.offset + shift), behind
            ours.imports.add(OWNER, answer)
        assert len(os.listdir("/proc/self/fd")) == before - 4, "those that were not looked at are closed as well"
    assert len(ours.imports) == 1


def test_things_that_are_no_extents(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, _ = stores
    uuid = ours.gpu(0).uuid
    with open("/dev/null", "rb") as file:
        for name, why in ((uuid, "no memory"), ("GPU-x", "does not see the GPU GPU-x")):
            assert why in ours.imports.add(OWNER, ExtentReply([RemoteExtent(0, 2 << 20, name, os.dup(file.fileno()))]))
    assert len(ours.imports) == 0


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize("call", ["import_", "reserve", "map"])
def test_a_failure_leaves_nothing_mapped(call: str) -> None:
    with opened(f"fail={call}") as ours, opened() as theirs:
        block = DeviceBlock(theirs.gpu(0), 100)
        answer = fetched(theirs, block.offset)
        (extent,) = answer.extents
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(DeviceError):
            ImportedExtent(ours.gpu(0), extent)
        looked(ours)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert ours.imports.add(OWNER, answer) == "" and ours.imports.find(OWNER, block.offset, 1) is not None


def test_an_event_that_was_dropped_may_be_asked_for_at_once(stores: tuple[DeviceStore, DeviceStore]) -> None:
    """Before the loop looks after the end of the first one."""
    ours, theirs = stores
    block = DeviceBlock(theirs.gpu(0), 100)
    assert ours.imports.add(OWNER, fetched(theirs, block.offset)) == ""
    with held(theirs.driver):
        theirs.driver.fill(0, block.address, b"a", 100, 0)
        moment = theirs.gpu(0).events.record(0)
        exported = theirs.driver.export_event(0, moment.event)
        first = ours.imports.moment(OWNER, exported, ours.gpu(0))
        assert not first.done()
        del first
        second = ours.imports.moment(OWNER, exported, ours.gpu(0))
        looked(ours)
        assert not second.done()
    until_done(theirs.driver, 0, moment.event)
    assert second.done()


def test_events_that_do_not_exist(stores: tuple[DeviceStore, DeviceStore]) -> None:
    ours, theirs = stores
    mine = ours.driver.export_event(0, ours.driver.event(0))
    for exported in (bytes(64), mine, b"short"):
        with pytest.raises(DeviceError):
            ours.imports.moment(OWNER, exported, ours.gpu(0))
    assert isinstance(theirs.imports, Imports)
