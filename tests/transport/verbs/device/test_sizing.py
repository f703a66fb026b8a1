"""The sizes of connections, next to the room that an engine has."""

from __future__ import annotations

from dataclasses import replace

from tests.transport.verbs.parts import engine_on
from zcactor.config import MAX_VERBS_EAGER_LIMIT
from zcactor.transport.verbs.device.sizing import peers_of, pinned_nbytes, slot_nbytes_for
from zcactor.transport.verbs.driver.fake import FakeFabric


async def test_peers_that_there_is_room_for(fabric: FakeFabric) -> None:
    """An engine takes as many peers as its queues and the limit of pinned memory allow."""
    attributes = fabric.add_nic("a").attributes
    with engine_on(fabric, "a", 64) as engine:
        while not engine.room:
            engine.join()
        assert engine.connections == peers_of(attributes, engine.arena.nbytes, None)
        while engine.connections:
            engine.leave()
    for peers in (0, 1, 3):
        with engine_on(fabric, "a", slot_nbytes_for(MAX_VERBS_EAGER_LIMIT)) as engine:
            limit = pinned_nbytes(engine.arena.nbytes, peers)
            engine.found = replace(engine.found, memlock=limit)
            while not engine.room:
                engine.join()
            assert engine.connections == peers == peers_of(attributes, engine.arena.nbytes, limit)
            assert peers_of(attributes, engine.arena.nbytes, limit - 1) == max(0, peers - 1)
            while engine.connections:
                engine.leave()


def test_slots_hold_the_largest_frame() -> None:
    for eager_limit in (64, 1024, 16384, 1 << 20):
        assert slot_nbytes_for(eager_limit) % 64 == 0
        assert eager_limit < slot_nbytes_for(eager_limit) <= 1 << 21
