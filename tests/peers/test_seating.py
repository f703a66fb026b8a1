"""The places of actors."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import zcactor as zc
from tests.graphs.parts import Node
from zcactor.peers.seating import seat_of


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


async def test_the_place_of_an_actor(node: Any) -> None:
    actor: Any = await Node.spawn()
    remote = actor._remote
    for lost in (False, True):
        seat = await seat_of(node.process, actor, lost=lost)
        assert (seat.actor_id, (seat.process, seat.place), seat.label) == (
            remote.actor_id, remote.location, remote.label
        )  # fmt: skip


@pytest.mark.slow
async def test_an_actor_whose_end_the_head_may_not_have_seen() -> None:
    async with zc.init(num_cpus=2, log_to_driver=False) as started:
        actor: Any = await Node.spawn()
        process: Any = started.process
        os.kill(await actor.pid(), signal.SIGKILL)
        while actor._remote.session is not None:  # its end is seen here
            await asyncio.sleep(0)
        with pytest.raises(zc.ActorDied):
            await seat_of(process, actor, lost=True)
