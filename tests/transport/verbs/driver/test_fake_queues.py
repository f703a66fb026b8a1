"""Queues, queue pairs and regions of the fake fabric are as strict as hardware."""

from __future__ import annotations

import ctypes
import errno

import pytest

from tests.transport.verbs.contract import End, fails, join
from tests.transport.verbs.driver.test_fake import pair
from zcactor.transport.verbs.driver.codes import CompletionStatus, QpState
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeCompletionQueue


def test_room_returns_with_polled_completions_only() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric, max_send_wr=4)
    left.qp.post_reads([left.read(i, right, 8, signalled=i == 3) for i in range(4)])
    with fails(errno.ENOMEM):
        left.qp.post_reads([left.read(4, right, 8)])
    assert left.one().wr_id == 3
    left.qp.post_reads([left.read(i, right, 8) for i in range(4)])
    assert len(left.collect(4)) == 4


def test_never_signalled_fills_the_queue_for_ever() -> None:
    left, right = pair(FakeFabric(), max_send_wr=4)
    with pytest.raises(OSError, match="is full"):
        left.qp.post_reads([left.read(i, right, 8, signalled=False) for i in range(5)])
    assert left.cq.poll(8) == []


def test_overrun_is_fatal() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    cq = left.device.create_completion_queue(2)
    qp = left.device.create_queue_pair(cq, None, max_send_wr=8, max_inline=0)
    peer = right.device.create_queue_pair(right.cq, None, max_send_wr=8, max_inline=0)
    ours = End(left.rig, left.device, cq, left.srq, qp, left.memory, left.region, 1)
    join(ours, End(right.rig, right.device, right.cq, right.srq, peer, right.memory, right.region, 2))
    cq.arm()
    qp.post_reads([left.read(i, right, 8) for i in range(3)])
    assert isinstance(cq, FakeCompletionQueue)
    assert cq.overrun
    assert qp.state() == QpState.ERR
    assert cq.drain_events() == 1
    for call in (lambda: cq.poll(1), cq.arm):
        with pytest.raises(OSError, match="overrun") as caught:
            call()
        assert caught.value.errno == errno.EIO


def test_arming_late_misses_what_came_before() -> None:
    left, right = pair(FakeFabric())
    left.qp.post_reads([left.read(1, right, 8)])
    left.cq.arm()
    assert left.cq.drain_events() == 0
    left.qp.post_reads([left.read(2, right, 8), left.read(3, right, 8)])
    assert left.cq.drain_events() == 1
    left.qp.post_reads([left.read(4, right, 8)])
    assert left.cq.drain_events() == 0
    assert len(left.cq.poll(8)) == 4


def test_closing_and_resetting_lose_completions() -> None:
    fabric = FakeFabric(manual=True)
    left, right = pair(fabric)
    left.qp.post_reads([left.read(1, right, 8), left.read(2, right, 8)])
    fabric.step()
    left.qp.reset()
    assert fabric.drain() == 0
    assert left.cq.poll(8) == []


def test_pin_limit() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("a", pin_limit=8192)
    device = fabric.binding().open("a")
    memory = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(memory)
    first = device.register(address, 8192, remote_read=True)
    with pytest.raises(OSError, match="ulimit -l") as caught:
        device.register(address, 1, remote_read=True)
    assert caught.value.errno == errno.ENOMEM
    first.close()
    assert nic.pinned == 0
    device.register(address, 1, remote_read=True).close()


def test_unmapped_memory() -> None:
    fabric = FakeFabric()
    fabric.add_nic("a")
    with fails(errno.EFAULT):
        fabric.binding().open("a").register(4096, 4096, remote_read=True)


def test_send_with_a_bad_lkey() -> None:
    left, right = pair(FakeFabric())
    right.post_slots(1)
    left.qp.post_sends([left.send(1, 8)._replace(lkey=1)])
    assert left.one()[:2] == (1, CompletionStatus.LOC_PROT)
    assert right.qp.state() == QpState.RTS
