"""A queue pair that talks to itself, on the fake fabric."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.transport.verbs.parts import Memory, open_device
from zcactor.transport.verbs.device.self_loopback import connect_to_itself
from zcactor.transport.verbs.driver.base import Read
from zcactor.transport.verbs.driver.codes import CompletionStatus, LinkLayer
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair


@pytest.fixture
def fabric() -> FakeFabric:
    """A fabric without adapters."""
    return FakeFabric()


@pytest.fixture(params=[LinkLayer.ETHERNET, LinkLayer.INFINIBAND])
def device(fabric: FakeFabric, request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
    """An open device, addressed by GID or by LID."""
    fabric.add_nic("fake0", link_layer=request.param)
    device = open_device(fabric, "fake0")
    yield device
    device.close()


def connected(device: FakeDevice) -> FakeQueuePair:
    """A queue pair of `device`, connected to itself."""
    qp = device.create_queue_pair(device.create_completion_queue(4), None, max_send_wr=2, max_inline=0)
    gid = None if device.nic.port.link_layer == LinkLayer.INFINIBAND else device.nic.gids[1]
    connect_to_itself(qp, device, device.nic.port, gid)
    return qp


def test_reads_what_lies_beside(device: FakeDevice) -> None:
    qp, source, target = connected(device), Memory(4096), Memory(4096)
    source.bytes[:6] = b"beside"
    there = device.register(source.address, source.nbytes, remote_read=True)
    here = device.register(target.address, target.nbytes, remote_read=False)
    qp.post_reads([Read(7, here.address, 4096, here.lkey, there.address, there.rkey)])
    assert [(done.wr_id, done.status) for done in qp.cq.poll(4)] == [(7, CompletionStatus.SUCCESS)]
    assert target.bytes[:6] == b"beside"


def test_each_begins_elsewhere(device: FakeDevice) -> None:
    numbers = {qp.path.psn for qp in [connected(device) for _ in range(5)] if qp.path is not None}
    assert len(numbers) > 1


@pytest.mark.parametrize(("serves", "asks", "under_way"), [(128, 128, 16), (4, 128, 4), (128, 8, 8), (1, 1, 1)])
def test_no_more_reads_than_the_device_takes(
    fabric: FakeFabric, device: FakeDevice, serves: int, asks: int, under_way: int
) -> None:
    nic = device.nic
    device.close()
    nic.attributes = replace(nic.attributes, max_qp_rd_atom=serves, max_qp_init_rd_atom=asks)
    with_limits = open_device(fabric, nic.name)
    path = connected(with_limits).path
    assert path is not None
    assert (path.max_rd_atomic, path.max_dest_rd_atomic) == (under_way, under_way)
    with_limits.close()


def test_only_from_reset(device: FakeDevice) -> None:
    qp = connected(device)
    with pytest.raises(OSError, match="only RESET can connect") as caught:
        connect_to_itself(qp, device, device.nic.port, None)
    assert caught.value.errno == errno.EINVAL
