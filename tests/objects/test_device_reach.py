"""Regions of GPU memory that name nothing."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop

import zcactor as zc
from tests import hostile
from tests.actors_gpu import Gpus
from zcactor.errors import ObjectLost, ProtocolError, make_remote_error
from zcactor.objects.device_reach import DeviceReach, _lost
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.process.context import current

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""


async def test_regions_of_our_own() -> None:
    async with zc.init(config=zc.Config(gpu="fake")):
        actor: Any = await Gpus.spawn()
        x = zc.full(1000, 3, "u1", device="cuda")
        await actor.keep(x)
        process: Any = current()
        reach: DeviceReach = process.resolver.devices
        session = next(each for each in process.sessions.all() if each.peer_process != process.process)
        block: Any = x.holder
        for offset, nbytes in ((block.offset, 1001), (block.offset - 1, 5), (block.offset + 1, 1000), (1 << 60, 1)):
            region = Region(RegionKind.DEVICE, process.process, block.id, offset, nbytes, 0)
            with pytest.raises(ProtocolError, match="outside its 1000 bytes"):
                reach.import_region(session, region, False)
        host = zc.zeros(100_000, "u1")
        await actor.keep(host)
        hosts = process.store.block_of(host)
        assert hosts is not None
        region = Region(RegionKind.DEVICE, process.process, hosts[0].id, hosts[0].offset, 10, 0)
        with pytest.raises(ProtocolError):
            reach.import_region(session, region, False)
        part, later = reach.import_region(session, Region(RegionKind.DEVICE, process.process, 12345, 0, 1, 0), False)
        assert later is None
        with pytest.raises(ObjectLost, match="was freed before"):
            part.holder.raise_error()


def test_an_array_is_lost_whatever_the_class_of_the_error_at_its_owner() -> None:
    fields = {"type_name": "Proxy", "message": "no way", "remote_traceback": "", "actor": "", "host": "", "pid": 0}
    remote = make_remote_error(hostile.Proxy("no way"), fields)
    with pytest.raises(ObjectLost, match="no way"):
        _lost(remote).raise_error()
