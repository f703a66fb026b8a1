"""The objects of a process on its GPUs: which GPUs there are, and which extents peers get."""

from __future__ import annotations

import pytest

from tests.device.helpers import opened
from zcactor.device.memory import DeviceBlock
from zcactor.device.store import open_store
from zcactor.errors import DeviceUnavailable
from zcactor.transport.local.extents import ExtentReply


def closed(answer: ExtentReply) -> list[tuple[int, str]]:
    """Close the descriptors of extents. Returns their offsets, and the last digits of the UUIDs."""
    answer.close()
    return [(each.offset, each.uuid[-2:]) for each in answer.extents]


def test_gpus_that_are_not_there() -> None:
    with opened("devices=2") as store, pytest.raises(DeviceUnavailable, match="cuda:2: .* sees cuda:0, cuda:1"):
        store.gpu(2)
    none = open_store("fake", "", None, 0, None)
    with pytest.raises(DeviceUnavailable, match="this process sees none"):
        none.gpu(0)
    with pytest.raises(DeviceUnavailable, match="ZCACTOR_GPU=fake"):
        open_store("off", None)
    with pytest.raises(ValueError, match="its options are"):
        open_store("fake:colour=red", None)


def test_peers_get_the_extents_that_they_name() -> None:
    with opened("devices=2") as store:
        blocks = [DeviceBlock(store.gpu(index), 100) for index in (0, 1)]
        offsets = [block.offset for block in blocks]
        assert offsets == [0, 1 << 48]
        assert closed(store.supply(b"peer", offsets)) == [(0, "00"), (1 << 48, "01")]
        assert closed(store.supply(b"peer", [7, 1 << 47, 2 << 48])) == [(0, "00")]
        assert closed(store.supply(b"peer", [])) == []
        assert not store.holds(None) and not store.holds(blocks[0].gpu)


@pytest.mark.parametrize("options", ["export=none", "fail=export"])
def test_extents_that_cannot_leave_are_not_offered(options: str) -> None:
    with opened(options) as store:
        block = DeviceBlock(store.gpu(0), 100)
        assert closed(store.supply(b"peer", [block.offset])) == []
        del block
