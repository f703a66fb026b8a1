"""The fake fabric: the contract of all bindings, and faults that only a fake can show at will."""

from __future__ import annotations

import errno
import os
import select

import pytest

from tests.descriptors import opened
from tests.transport.verbs.contract import NBYTES, DmaBufSuite, End, Rig, join, make_end
from tests.transport.verbs.parts import open_device
from zcactor.transport.verbs.driver.base import PathAttributes, QpAddress, Read, Receive, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus, EventType, LinkLayer, PortState, QpState
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import INLINE_LIMITS
from zcactor.transport.verbs.driver.fake_queues import UNDEFINED


def dma_buf(data: bytes) -> int:
    """Shared memory with these bytes, as fake GPUs have it."""
    fd = os.memfd_create("zcactor-gpu0")
    os.write(fd, data)
    return fd


class TestAtOnce(DmaBufSuite):
    """The contract on a fabric that does work when it is posted."""

    @pytest.fixture
    def rig(self) -> Rig:
        fabric = FakeFabric()
        fabric.add_nic("fake0")
        return Rig(fabric.binding(), "fake0", dma_buf=dma_buf)


class TestManual(DmaBufSuite):
    """The contract on a fabric that does work while a test waits."""

    @pytest.fixture
    def rig(self) -> Rig:
        fabric = FakeFabric(seed=3, manual=True)
        fabric.add_nic("fake0")
        return Rig(fabric.binding(), "fake0", progress=fabric.drain, dma_buf=dma_buf)


def pair(fabric: FakeFabric, **kwargs: int) -> tuple[End, End]:
    """Two connected ends of two adapters."""
    ends: list[End] = []
    for name in ("a", "b"):
        if name not in fabric.nics:
            fabric.add_nic(name)
        rig = Rig(fabric.binding(name), name)
        ends.append(make_end(rig, rig.binding.open(name), 100 + len(ends), **kwargs))
    join(*ends)
    return ends[0], ends[1]


def test_two_adapters() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    assert fabric.binding("a").devices() == ["a"]
    assert fabric.binding().devices() == ["a", "b"]
    right.write(b"bytes")
    left.qp.post_reads([left.read(1, right, 5)])
    assert left.one().status == CompletionStatus.SUCCESS
    assert left.at(0, 5) == b"bytes"


def test_statistics() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    right.post_slots(1)
    left.qp.post_sends([left.send(1, 10)])
    left.qp.post_reads([left.read(2, right, 1000), left.read(3, right, 24)])
    left.qp.post_sends([left.send(4, 10)])  # there is no receive: three attempts
    left.collect(4)
    statistics = fabric.statistics()
    assert (statistics.registrations, statistics.sends, statistics.bytes_sent) == (2, 1, 10)
    assert (statistics.reads, statistics.bytes_read) == (2, 1024)
    assert (statistics.rnr, statistics.retries, statistics.failures) == (3, 0, 1)


def test_nothing_happens_before_a_step() -> None:
    fabric = FakeFabric(manual=True)
    left, right = pair(fabric)
    left.qp.post_reads([left.read(1, right, 8), left.read(2, right, 8)])
    assert left.cq.poll(8) == []
    assert fabric.step() == 1
    assert [c.wr_id for c in left.cq.poll(8)] == [1]
    assert fabric.step(5) == 1
    assert [c.wr_id for c in left.cq.poll(8)] == [2]
    assert fabric.drain() == 0


def _order(seed: int) -> list[int]:
    fabric = FakeFabric(seed=seed, manual=True)
    left, right = pair(fabric)
    qps = [left.qp]
    for i in range(3):
        here = left.device.create_queue_pair(left.cq, None, max_send_wr=16, max_inline=0)
        there = right.device.create_queue_pair(right.cq, None, max_send_wr=16, max_inline=0)
        ours = End(left.rig, left.device, left.cq, left.srq, here, left.memory, left.region, i)
        theirs = End(right.rig, right.device, right.cq, right.srq, there, right.memory, right.region, i + 9)
        join(ours, theirs)
        qps.append(here)
    for number, qp in enumerate(qps):
        qp.post_reads([left.read(number * 10 + i, right, 8) for i in range(5)])
    fabric.drain()
    return [c.wr_id for c in left.cq.poll(100)]


def test_completions_are_reordered_between_queue_pairs_only() -> None:
    order = _order(1)
    assert order == _order(1)
    assert order != _order(2)
    assert order != sorted(order)
    for number in range(4):
        assert [i for i in order if i // 10 == number] == [number * 10 + i for i in range(5)]


def test_retries_take_steps() -> None:
    fabric = FakeFabric(manual=True)
    left, right = pair(fabric)
    left.qp.post_sends([left.send(1, 8)])
    assert fabric.step(2) == 2
    assert fabric.statistics().rnr == 2
    right.post_slots(1)
    assert fabric.step() == 1
    assert left.one().status == CompletionStatus.SUCCESS


def test_peer_dies() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    assert isinstance(right.device, FakeDevice)
    fabric.kill(right.device)
    assert fabric.nics["b"].pinned == 0
    left.qp.post_reads([left.read(1, right, 8), left.read(2, right, 8)])
    assert [c.status for c in left.collect(2)] == [CompletionStatus.RETRY_EXC, CompletionStatus.WR_FLUSH]
    assert fabric.statistics().retries == 2
    right.device.close()
    assert fabric.nics["b"].pinned == 0


def test_cable_is_pulled() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    fabric.nics["b"].set_active(False)
    assert right.device.port(1).state == PortState.DOWN
    left.qp.post_reads([left.read(1, right, 8)])
    assert left.one().status == CompletionStatus.RETRY_EXC


def test_events_are_told_to_all_who_opened_the_adapter() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("a")
    first, second = (fabric.binding("a").open("a") for _ in range(2))
    other = open_device(fabric, "b")
    nic.tell(EventType.PORT_ERR)
    poller = select.poll()
    for device in (first, other):
        poller.register(device.async_fd, select.POLLIN)
    assert [fd for fd, _ in poller.poll(0)] == [first.async_fd]
    nic.tell(99)
    for device in (first, second):
        assert device.async_events() == [EventType.PORT_ERR, 99]
        assert device.async_events() == []
    assert other.async_events() == [] and not poller.poll(0)
    fd = first.async_fd
    for device in (first, second, other):
        device.close()
    nic.tell(99)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_events_that_cannot_be_read() -> None:
    fabric = FakeFabric()
    device = open_device(fabric, "a")
    fabric.fail("async_events", OSError(5, "gone"))
    with pytest.raises(OSError, match="gone"):
        device.async_events()
    assert device.async_events() == []


def test_injected_failure() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    fabric.inject(left.qp.qp_num, CompletionStatus.GENERAL)
    left.qp.post_reads([left.read(1, right, 8)])
    completion = left.one()
    assert completion[:4] == (1, CompletionStatus.GENERAL, UNDEFINED, UNDEFINED)
    assert left.qp.state() == QpState.ERR


def test_send_longer_than_the_receive() -> None:
    left, right = pair(FakeFabric())
    right.srq.post_receives([Receive(9, right.region.address, 4, right.region.lkey)])
    left.qp.post_sends([left.send(1, 5)])
    assert left.one().status == CompletionStatus.REM_INV_REQ
    assert right.one()[:2] == (9, CompletionStatus.LOC_LEN)
    assert right.qp.state() == QpState.ERR


def test_receive_with_a_bad_lkey() -> None:
    left, right = pair(FakeFabric())
    right.srq.post_receives([Receive(9, right.region.address, 4, 1)])
    left.qp.post_sends([left.send(1, 4)])
    assert left.one().status == CompletionStatus.REM_OP
    assert right.one()[:2] == (9, CompletionStatus.LOC_PROT)


@pytest.mark.parametrize("what", ["remote_read", "max_rd_atomic"])
def test_reads_that_the_peer_did_not_agree_to(what: str) -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    for end in (left, right):
        end.qp.reset()
    here, there = left.address(), right.address()
    left.qp.connect(there, left.path())
    path = right.path()
    refusing = PathAttributes(
        1,
        1,
        path.psn,
        path.mtu,
        remote_read=what != "remote_read",
        max_dest_rd_atomic=8 if what != "remote_read" else 16,
    )
    right.qp.connect(here, refusing)
    left.qp.post_reads([left.read(1, right, 8)])
    assert left.one().status == CompletionStatus.REM_INV_REQ


@pytest.mark.parametrize("field", ["qpn", "psn", "gid"])
def test_wrong_addresses_reach_nobody(field: str) -> None:
    left, right = pair(FakeFabric())
    left.qp.reset()
    address = right.address()
    wrong = {
        "qpn": QpAddress(address.qpn + 50, address.psn, address.gid, 0, 5),
        "psn": QpAddress(address.qpn, address.psn + 1, address.gid, 0, 5),
        "gid": QpAddress(address.qpn, address.psn, left.address().gid, 0, 5),
    }[field]
    left.qp.connect(wrong, left.path())
    left.qp.post_reads([left.read(1, right, 8)])
    assert left.one().status == CompletionStatus.RETRY_EXC


def test_rkey_is_good_on_its_own_device_only() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    elsewhere = fabric.binding("b").open("b")
    region = elsewhere.register(right.region.address, 64, remote_read=True)
    left.qp.post_reads([left.read(1, right, 8)._replace(rkey=region.rkey)])
    assert left.one().status == CompletionStatus.REM_ACCESS


def test_infiniband_goes_by_lid() -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    device = fabric.binding().open("ib0")
    assert not device.gids(1)[0].roce_v2
    end = make_end(Rig(fabric.binding(), "ib0", gid_index=0), device, 7)
    address = QpAddress(end.qp.qp_num, 7, bytes(16), nic.port.lid, 5)
    end.qp.connect(address, PathAttributes(1, 0, 7, 5, is_global=False))
    end.qp.post_reads([end.read(1, end, 8)])
    assert end.one().status == CompletionStatus.SUCCESS


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("reorders", [False, True])
def test_a_short_read_overtakes_others_unless_it_is_fenced(reorders: bool, fenced: bool) -> None:
    fabric = FakeFabric(manual=True)
    left, right = pair(fabric)
    fabric.nics["b"].reorders_reads = reorders
    right.write(b"before")
    left.qp.post_reads([left.read(1, right, 8192, 4096), left.read(2, right, 6)._replace(fenced=fenced)])
    fabric.step()
    right.write(b"behind")
    fabric.step()
    assert [completion.status for completion in left.collect(2)] == [0, 0]
    assert left.at(0, 6) == (b"before" if reorders and not fenced else b"behind")


@pytest.mark.parametrize("limit", INLINE_LIMITS)
def test_more_inline_data_than_the_adapter_takes(limit: int) -> None:
    fabric = FakeFabric()
    fabric.add_nic("a", max_inline=limit)
    device = open_device(fabric, "a")
    cq = device.create_completion_queue(4)
    with pytest.raises(OSError, match=f"a carries {limit} bytes inline, not {limit + 1}") as caught:
        device.create_queue_pair(cq, None, max_send_wr=1, max_inline=limit + 1)
    assert caught.value.errno == errno.EINVAL
    assert device.create_queue_pair(cq, None, max_send_wr=1, max_inline=limit).max_inline == limit
    device.close()


def test_adapters_of_two_networks_do_not_reach_each_other() -> None:
    fabric = FakeFabric()
    fabric.add_nic("a", network="rail 0")
    fabric.add_nic("b", network="rail 1")
    left, right = pair(fabric)
    right.post_slots(1)
    left.qp.post_sends([left.send(1, 8)])
    assert left.one().status == CompletionStatus.RETRY_EXC
    fabric = FakeFabric()
    for name in "ab":
        fabric.add_nic(name, network="rail 1")
    left, right = pair(fabric)
    right.post_slots(1)
    left.qp.post_sends([left.send(1, 8)])
    assert left.one().status == CompletionStatus.SUCCESS


def test_descriptors_are_closed() -> None:
    before = opened()
    left, right = pair(FakeFabric())
    left.qp.post_reads(
        [Read(1, left.region.address, NBYTES, left.region.lkey, right.region.address, right.region.rkey)]
    )
    for end in (left, right):
        end.device.close()
    assert opened() <= before


@pytest.mark.parametrize(
    ("change", "number"),
    [({"takes_dma_bufs": False}, errno.EOPNOTSUPP), ({"pin_limit": 4095}, errno.ENOMEM)],
    ids=["not at all", "pinned memory"],
)
def test_an_adapter_that_takes_no_dma_buf(change: dict[str, object], number: int) -> None:
    fabric = FakeFabric()
    device, fd = open_device(fabric, "a"), dma_buf(bytes(4096))
    for name, value in change.items():
        setattr(device.nic, name, value)
    with pytest.raises(OSError, match="cannot register a dma-buf of 4,096 bytes") as caught:
        device.register_dma_buf(fd, 4096, remote_read=True)
    assert caught.value.errno == number and not device.regions and not device.nic.pinned
    os.close(fd)
    device.close()


def test_a_message_goes_from_gpu_to_gpu() -> None:
    fabric = FakeFabric()
    left, right = pair(fabric)
    regions, fds = [], [dma_buf(b"a message" + bytes(4087)), dma_buf(bytes(4096))]
    for end, fd in zip((left, right), fds, strict=True):
        regions.append(end.device.register_dma_buf(fd, 4096, remote_read=True))
    right.srq.post_receives([Receive(1, 100, 50, regions[1].lkey)])
    left.qp.post_sends([Send(2, 2, 7, regions[0].lkey)])
    assert right.one().byte_len == 7
    assert os.pread(fds[1], 7, 100) == b"message"
    for fd in fds:
        os.close(fd)


def test_memory_of_a_gpu_is_unmapped_with_its_region() -> None:
    before = opened()
    device, fd = open_device(FakeFabric(), "a"), dma_buf(bytes(4096))
    region = device.register_dma_buf(fd, 4096, remote_read=True)
    os.close(fd)
    assert opened() - before and device.nic.pinned == 4096
    region.close()
    region.close()
    assert opened() <= before and not device.nic.pinned
    device.close()
