"""Adapters of a fake fabric."""

from __future__ import annotations

import pytest

from tests.descriptors import opened
from tests.transport.verbs.parts import Memory, Wire
from zcactor.transport.verbs.driver.base import Read
from zcactor.transport.verbs.driver.codes import CompletionStatus, EventType, PortState
from zcactor.transport.verbs.driver.fake import FakeFabric


def test_all_that_have_opened_it_are_told_of_an_event() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("fake0")
    devices = [fabric.binding().open("fake0") for _ in range(2)]
    nic.tell(EventType.PORT_ERR)
    assert [device.async_events() for device in devices] == [[EventType.PORT_ERR]] * 2
    assert [device.async_events() for device in devices] == [[], []]
    devices[0].close()
    nic.tell(EventType.PORT_ACTIVE)
    assert devices[1].async_events() == [EventType.PORT_ACTIVE]
    devices[1].close()


def test_a_cable_that_is_pulled_shows_at_the_port() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("fake0")
    device = fabric.binding().open("fake0")
    seen = [(nic.active, device.port(1).state)]
    for active in (False, True):
        nic.set_active(active)
        seen.append((nic.active, device.port(1).state))
    assert seen == [(True, PortState.ACTIVE), (False, PortState.DOWN), (True, PortState.ACTIVE)]
    device.close()


@pytest.mark.parametrize("left", range(3))
def test_a_port_that_is_lost_after_some_requests(left: int) -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("fake0", requests_left=left)
    wire = Wire(fabric, receives=8)
    memory = Memory(4096)
    target, source = (device.register(memory.address, memory.nbytes, remote_read=True) for device in wire.devices)
    for number in range(4):
        read = Read(number, memory.address, 8, target.lkey, memory.address, source.rkey)
        wire.left.post_reads([read])
        if not nic.active:
            break
    assert [one.status for one in wire.completions()] == [
        *[CompletionStatus.SUCCESS] * left,
        CompletionStatus.RETRY_EXC,
    ]
    assert wire.devices[0].async_events() == [EventType.PORT_ERR] and not wire.devices[1].async_events()
    assert fabric.nics["fake1"].active


@pytest.mark.slow
def test_devices_that_are_left_to_the_garbage_leave_no_descriptor() -> None:
    before = opened()
    fabric = FakeFabric()
    fabric.add_nic("fake0")
    device = fabric.binding().open("fake0")
    queue = device.create_completion_queue(8)
    assert device.async_fd is not None
    assert opened() - before
    del fabric, device, queue
    assert opened() <= before
