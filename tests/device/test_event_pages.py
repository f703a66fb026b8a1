"""Pages of events: numbers rise, places are used again, and handles that mean nothing are refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.event_pages import EventPages, EventSlot

PLACES = 510


@pytest.fixture
def both() -> Iterator[tuple[EventPages, EventPages]]:
    """The pages of two processes, of which the second knows that of the first."""
    owner, reader = EventPages("zcactor-test"), EventPages("zcactor-test")
    add(reader, owner, os.getpid())
    yield owner, reader
    owner.close()
    reader.close()
    reader.close()


def add(reader: EventPages, owner: EventPages, pid: int) -> None:
    fd, process = owner.fd(), os.pidfd_open(pid)
    reader.add(fd, process)
    os.close(fd)
    os.close(process)


def test_an_event_from_process_to_process(both: tuple[EventPages, EventPages]) -> None:
    owner, reader = both
    slot = owner.take()
    exported = owner.export(slot)
    there = reader.open(exported)
    assert not (there.done() or there.passed() or there.lost() or slot.done())
    slot.finish()
    assert there.done() and there.passed() and not there.lost() and slot.done()
    assert slot.nbytes_before == 8 * slot.at
    for _ in range(2 * PLACES):
        owner.take().finish()
    assert there.done(), "its place serves others"
    assert reader.open(exported).done()


def test_places_are_used_again_when_their_work_is_done(both: tuple[EventPages, EventPages]) -> None:
    owner, _ = both
    slots = [owner.take() for _ in range(PLACES)]
    assert len({slot.at for slot in slots}) == PLACES
    with pytest.raises(Refused, match="510 exported events") as caught:
        owner.take()
    assert caught.value.code == CudaCode.NOT_SUPPORTED
    slots[7].finish()
    again = owner.take()
    assert (again.at, again.number) == (slots[7].at, slots[7].number + 1) and slots[7].done() and not again.done()
    owner.give_up(again)
    assert owner.take().at == again.at


def test_a_process_that_ends(both: tuple[EventPages, EventPages]) -> None:
    owner, reader = EventPages("zcactor-test"), both[1]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        add(reader, owner, child.pid)
        add(reader, owner, child.pid)
        slots = owner.take(), owner.take()
        done, lost = (reader.open(owner.export(slot)) for slot in slots)
        slots[0].finish()
        assert not lost.lost() and not reader.ended()
        child.communicate()
    assert lost.lost() and not lost.passed() and not done.lost()
    lost.page.lose()
    lost.page.lose()
    assert lost.lost() and lost.passed() and not lost.done() and done.done() and not done.lost()
    assert not reader.ended(), "events are open"
    for each in (done, lost):
        reader.leave(each)
    (page,) = reader.ended()
    assert not reader.ended()
    page.close()
    with pytest.raises(Refused):
        reader.open(owner.export(slots[0]))
    owner.close()


def test_handles_that_mean_nothing(both: tuple[EventPages, EventPages]) -> None:
    owner, reader = both
    exported = owner.export(owner.take())
    assert len(exported) == EVENT_NBYTES
    place, number = exported[24:28], exported[28:36]
    for wrong in (
        bytes(EVENT_NBYTES),
        exported[:-1],
        bytes(8) + exported[8:],
        exported[:8] + bytes(16) + exported[24:],
        exported.replace(place + number, PLACES.to_bytes(4, "little") + number),
        exported.replace(place + number, place + bytes(8)),
        exported.replace(place + number, place + b"\xff" * 8),
    ):
        with pytest.raises(Refused) as caught:
            reader.open(wrong)
        assert caught.value.code == CudaCode.INVALID_HANDLE
    with pytest.raises(Refused):
        owner.open(exported)  # its own
    assert isinstance(reader.open(exported), EventSlot)


def test_things_that_are_no_pages(both: tuple[EventPages, EventPages]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd, process = both[0].fd(), os.pidfd_open(os.getpid())
    for wrong in ((process, process), (-1, process), (fd, -1)):
        with pytest.raises(Refused) as caught:
            both[1].add(*wrong)
        assert caught.value.code == CudaCode.INVALID_VALUE
    os.close(fd)
    os.close(process)
    add(both[0], both[0], os.getpid())  # its own, which it does not need
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("done", [True, False])
def test_a_promise(both: tuple[EventPages, EventPages], done: bool) -> None:
    owner, reader = both
    slot = owner.promise()
    there = reader.open(owner.export(slot))
    assert not (there.done() or there.passed() or there.lost() or slot.lost())
    with pytest.raises(Refused, match="promised"):
        reader.keep(there, done=done)
    with pytest.raises(Refused, match="only the process"):
        reader.export(there)
    owner.keep(slot, done=done)
    assert there.passed() and there.done() == slot.done() == done and there.lost() == slot.lost() == (not done)
    with pytest.raises(Refused, match="promised"):
        owner.keep(slot, done=done)
    owner.leave(slot)
    places = {owner.take().at for _ in range(PLACES - (not done))}
    assert (slot.at in places) == done, "a place whose event was lost serves no other"
    with pytest.raises(Refused, match="510"):
        owner.take()
    assert there.done() == done
