"""The memory of a process on its GPUs: blocks, and waits on the host."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.device_peer import DevicePeer
from tests.device.helpers import NEVER, array_on, held, opened
from zcactor.device.events import OTHERS, Moment
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.memory import DeviceBlock, wait_on_host
from zcactor.errors import ObjectLost, OutOfMemory


def test_blocks_are_counted_until_they_are_dropped() -> None:
    with opened("devices=2") as store:
        blocks = [DeviceBlock(store.gpu(index), 1000) for index in (0, 1, 1)]
        assert store.used == 3 * 1024 and len({each.id for each in blocks}) == 3
        blocks[0].sealed = True
        assert [each.readonly for each in blocks] == [True, False, False]
        del blocks[1:]
        assert store.used == 1024


def test_a_lent_block_is_read_only_until_all_have_given_it_back() -> None:
    with opened() as store:
        block, readers = DeviceBlock(store.gpu(0), 100), [object(), object()]
        for reader in readers:
            block.lend(reader)
        for reader in readers:
            assert block.readonly and not block.sealed
            block.take_back(reader)
            block.take_back(reader)
        assert not block.readonly


def test_the_capacity_of_each_gpu() -> None:
    with opened("devices=2", capacity=4 << 20) as store:
        kept = [DeviceBlock(store.gpu(index), 4 << 20) for index in (0, 1)]
        with pytest.raises(OutOfMemory, match="GPU 1: device_capacity is 4,194,304 bytes"):
            DeviceBlock(store.gpu(1), 1)
        del kept


@pytest.mark.slow
def test_a_wait_that_has_a_limit_ends_before_the_work() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        array = array_on(gpu, np.zeros(10, "u1"))
        with held(gpu.driver):
            array.fill(1)
            moments = array.holder.work.writes()
            wait_on_host(moments, 0.001)
            assert moments and not any(moment.done() for moment in moments)
        wait_on_host(moments)
        assert all(moment.done() for moment in moments)


def test_a_wait_ends_when_the_other_process_has_ended() -> None:
    driver = FakeGpuDriver()
    with DevicePeer(FakeGpuDriver) as peer:
        peer.call("hold", 0, 0, NEVER)
        there, event = peer.call("mapped", 0, FakeGpuDriver.granularity), peer.call("event", 0)
        peer.call("fill", 0, there, b"a", 1, 0)
        peer.call("record", 0, event, 0)
        peer.share_events(driver)
        moment = Moment(None, driver, 0, driver.open_event(0, peer.call("export_event", 0, event)), OTHERS)
        assert not moment.done() and not moment.is_lost()
        peer.kill()
        with pytest.raises(ObjectLost, match="compute the value again"):
            wait_on_host([moment])
