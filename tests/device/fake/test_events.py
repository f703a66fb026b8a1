"""The events of fake GPUs: records, their ends, and those that are exported."""

from __future__ import annotations

import os

import pytest

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.fake.events import FakeEvents


def test_records() -> None:
    events = FakeEvents()
    event = events.make()
    assert events.passed(event) is None and events.done(event)
    first = events.begin(event)
    before = events.passed(event)
    second = events.begin(event)
    behind = events.passed(event)
    assert before is not None and behind is not None and not events.done(event) and not before()
    events.finish(event, first)
    assert before() and not behind() and not events.done(event)
    third = events.begin(event)
    early = events.passed(event)
    events.finish(event, third)  # on another stream
    assert early is not None and early() and not behind() and events.done(event)
    events.finish(event, second)
    assert behind() and events.done(event) and not events.is_lost(event)
    events.close()


def test_an_event_that_has_been_given_up_holds_back_whoever_waits_for_it() -> None:
    events = FakeEvents()
    event = events.make()
    record = events.begin(event)
    passed = events.passed(event)
    events.end(event)
    assert passed is not None and not passed()
    again = events.make()
    events.finish(event, record)
    assert passed() and events.passed(again) is None
    with pytest.raises(Refused):
        events.done(event)


def test_exported_records() -> None:
    events, reader = FakeEvents(), FakeEvents()
    fd, process = events.page(), os.pidfd_open(os.getpid())
    reader.add_page(fd, process)
    os.close(fd)
    os.close(process)
    event = events.make()
    first = events.begin(event)
    opened = reader.open(events.export(event))
    second = events.begin(event)
    later = reader.open(events.export(event))
    passed = reader.passed(later)
    assert passed is not None and not passed() and not reader.done(opened)
    for call in (reader.begin, reader.export):
        with pytest.raises(Refused, match="only the process that made an event"):
            call(later)
    events.finish(event, first)
    assert reader.done(opened) and not reader.done(later)
    events.end(event)
    assert not reader.done(later), "the work goes on"
    events.finish(event, second)
    assert reader.done(later) and passed() and reader.passed(later) is None
    for each in (opened, later):
        reader.end(each)
    with pytest.raises(Refused):
        reader.done(later)
    events.close()
    reader.close()


def test_handles_that_mean_nothing() -> None:
    events = FakeEvents()
    for wrong in (bytes(EVENT_NBYTES), events.export(events.make())):
        with pytest.raises(Refused) as caught:
            events.open(wrong)
        assert caught.value.code == CudaCode.INVALID_HANDLE
    events.close()
    events.close()
