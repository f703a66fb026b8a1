"""The events of fake GPUs: records, their ends, and handles that mean nothing."""

from __future__ import annotations

import os

import pytest

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.fake.events import FakeEvents


def test_records() -> None:
    events = FakeEvents()
    event = events.make()
    assert events.recorded(event) == 0 and events.done(event)
    first, second = events.begin(event), events.begin(event)
    assert not events.done(event) and not events.reached(event, first)
    events.finish(event, first)
    assert events.reached(event, first) and not events.reached(event, second) and not events.done(event)
    events.finish(event, second)
    events.finish(event, first)  # a late one undoes nothing
    assert events.done(event) and not events.is_lost(event)
    events.close()


def test_an_event_that_has_been_given_up_holds_nobody_back() -> None:
    events = FakeEvents()
    event = events.make()
    record = events.begin(event)
    events.end(event)
    assert events.reached(event, record)
    again = events.make()  # in the same place
    events.finish(event, record)
    assert events.recorded(again) == 0
    with pytest.raises(Refused):
        events.done(event)


@pytest.mark.usefixtures("no_leftovers")
def test_many_events() -> None:
    before = len(os.listdir("/proc/self/fd"))
    events = FakeEvents()
    made = [events.make() for _ in range(300)]
    for event in made[::2]:
        events.begin(event)
    assert [events.done(event) for event in made] == [False, True] * 150
    pages = len(os.listdir("/proc/self/fd"))
    for event in made:
        events.end(event)
    assert len({events.make() for _ in range(300)}) == 300
    assert len(os.listdir("/proc/self/fd")) <= pages
    events.close()
    events.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_handles_that_mean_nothing() -> None:
    events = FakeEvents()
    exported = events.export(events.make())
    parent = os.getppid().to_bytes(4, "little")
    for wrong in (
        bytes(EVENT_NBYTES),
        exported,  # of this process
        exported[:24] + parent + exported[28:],  # no page of that process
        exported[:24] + b"\xff\xff\xff\x7f" + exported[28:],  # no process
        exported[:32] + b"\xff\xff\0\0" + exported[36:],  # no place in a page
    ):
        with pytest.raises(Refused) as caught:
            events.open(wrong)
        assert caught.value.code == CudaCode.INVALID_HANDLE
