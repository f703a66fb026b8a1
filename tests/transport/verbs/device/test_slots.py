"""Slots and the headers of messages in them."""

from __future__ import annotations

import struct
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.verbs.parts import open_device
from zcactor.errors import ProtocolError
from zcactor.transport.verbs.device.slots import (
    BYE,
    CREDIT,
    DATA,
    HEADER_NBYTES,
    PROBE,
    SlotArea,
    pack_header,
    read_header,
)
from zcactor.transport.verbs.driver.fake import FakeFabric

KINDS = (DATA, CREDIT, BYE, PROBE)


def header(magic: int, kind: int, credits: int, nbytes: int, sequence: int) -> memoryview:
    """A header of any content, as the wire has it."""
    return memoryview(struct.pack("<BBHIQ", magic, kind, credits, nbytes, sequence))


@given(st.sampled_from(KINDS), st.integers(0, 2**16 - 1), st.integers(0, 2**21), st.integers(0, 2**64 - 1))
def test_round_trip(kind: int, credits: int, nbytes: int, sequence: int) -> None:
    slot = memoryview(bytearray(b"\xff" * 64))
    pack_header(slot, kind, credits, nbytes, sequence)
    assert read_header(slot, HEADER_NBYTES + nbytes, sequence) == (kind, credits, nbytes)
    assert slot[:HEADER_NBYTES] == header(0x5A, kind, credits, nbytes, sequence)
    assert bytes(slot[HEADER_NBYTES:]) == b"\xff" * (64 - HEADER_NBYTES), "wrote beyond the header"


def test_frames_stay_aligned() -> None:
    assert HEADER_NBYTES % 8 == 0


@pytest.mark.parametrize("received", range(HEADER_NBYTES))
def test_shorter_than_a_header(received: int) -> None:
    with pytest.raises(ProtocolError, match=f"message of {received} bytes; a header alone has {HEADER_NBYTES}"):
        read_header(header(0x5A, DATA, 0, 0, 0), received, 0)


@pytest.mark.parametrize(
    ("magic", "kind", "nbytes"),
    [
        *((magic, DATA, 10) for magic in (0, 0x59, 0x5B, 0xA5, 0xFF)),
        *((0x5A, kind, 10) for kind in (4, 5, 128, 255)),
        *((0x5A, DATA, nbytes) for nbytes in (0, 9, 11, 10 + HEADER_NBYTES, 2**32 - 1)),
    ],
)
def test_no_header(magic: int, kind: int, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="no header of its length"):
        read_header(header(magic, kind, 0, nbytes, 0), HEADER_NBYTES + 10, 0)


@pytest.mark.parametrize("sequence", [0, 6, 8, 2**64 - 1])
def test_not_the_next(sequence: int) -> None:
    with pytest.raises(ProtocolError, match=f"message {sequence}, and 7 comes next"):
        read_header(header(0x5A, DATA, 0, 0, sequence), HEADER_NBYTES, 7)


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES), st.integers(0, 100))
def test_rubbish_raises_nothing_else(data: bytes, received: int) -> None:
    try:
        kind, _, nbytes = read_header(memoryview(data), received, 0)
    except ProtocolError:
        return
    assert kind in KINDS and nbytes + HEADER_NBYTES == received


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (54_000, 54_016)])
def test_slots_are_apart_and_aligned(nbytes: int, rounded: int) -> None:
    area = SlotArea(open_device(FakeFabric(), "a"), 5, nbytes)
    assert (area.count, area.nbytes) == (5, rounded)
    for index in range(5):
        assert area.address(index) == area.address(0) + index * rounded
        assert area.address(index) % 64 == 0
        assert len(area.views[index]) == rounded
        area.views[index][:] = bytes((index,)) * rounded
    assert [bytes(view) for view in area.views] == [bytes((index,)) * rounded for index in range(5)]


def test_its_memory_is_the_devices_and_no_peers() -> None:
    device = open_device(FakeFabric(), "a")
    area = SlotArea(device, 3, 100)
    (region,) = device.regions.values()
    assert (region.address, region.nbytes) == (area.address(0), 3 * 128)
    assert not region.remote_read
    assert device.owns(area.lkey, area.address(2), area.nbytes)


def test_closing() -> None:
    device = open_device(FakeFabric(), "a")
    area = SlotArea(device, 3, 100)
    view = area.views[2]
    area.close()
    area.close()
    assert len(device.ledger) == 0 == device.nic.pinned
    view[0] = 1  # a holder of the view still finds memory
    mapping = weakref.ref(view.obj)
    view.release()
    assert mapping() is None, "nothing else keeps the memory, whoever keeps the area"


def test_limit_of_pinned_memory() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("a", pin_limit=64 * 9)
    device = open_device(fabric, "a")
    with pytest.raises(OSError, match="ulimit -l"):
        SlotArea(device, 10, 64)
    assert len(device.ledger) == 0 == nic.pinned
    SlotArea(device, 9, 64)
    assert nic.pinned == 64 * 9
