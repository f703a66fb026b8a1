"""Pages of events: places are used again, and handles that mean nothing are refused."""

from __future__ import annotations

import os

import pytest

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.event_pages import EventPages


def test_records_of_an_event() -> None:
    pages = EventPages("zcactor-test")
    slot = pages.take()
    assert (slot.recorded, slot.finished) == (0, 0) and slot.reached(0)
    assert (slot.count(), slot.count()) == (1, 2) and not slot.reached(1)
    slot.finish(1)
    assert slot.reached(1) and not slot.reached(2)
    slot.uncount()
    assert slot.recorded == 1 and slot.reached(slot.recorded)
    assert slot.done_nbytes == 8 * (slot.at + 2) and not slot.is_over
    pages.close()


@pytest.mark.usefixtures("no_leftovers")
def test_places_are_used_again() -> None:
    pages, before = EventPages("zcactor-test"), len(os.listdir("/proc/self/fd"))
    slots = [pages.take() for _ in range(300)]
    assert len({(slot.page, slot.at) for slot in slots}) == len({slot.serial for slot in slots}) == 300
    opened = len(os.listdir("/proc/self/fd"))
    assert before + 3 <= opened <= before + 6, "a page has a descriptor, and mmap one more"
    assert len(slots[0].page.slots()) == 128
    for slot in slots:
        slot.count()
        assert pages.give_back(slot) is None
    assert not slots[0].page.slots() and slots[0].reached(1), "nobody waits for an event that was given up"
    again = [pages.take() for _ in range(300)]
    assert not any(slot.recorded for slot in again) and not any(slot.is_there for slot in slots)
    assert len(os.listdir("/proc/self/fd")) <= opened
    pages.close()
    pages.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_handles_that_mean_nothing() -> None:
    pages = EventPages("zcactor-test")
    exported = pages.export(pages.take())
    assert len(exported) == EVENT_NBYTES
    for wrong in (exported, bytes(EVENT_NBYTES), exported[:-1], exported[:24] + b"\xff\xff\xff\x7f" + exported[28:]):
        with pytest.raises(Refused) as caught:
            pages.open(wrong)
        assert caught.value.code == CudaCode.INVALID_HANDLE
    pages.close()
