"""The workload of broadcasts, without faults, and with a byte that changes on its way."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from simulation.connection import SimConnection
from simulation.run import Run
from simulation.schedule import draw
from zcactor.transport.bytes import RemoteRegion

SCHEDULE = replace(draw(2, 4, 15.0, ("broadcast",), ("broadcast",)), faults=())


@pytest.mark.slow
def test_all_readers_see_the_array() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) == {"ok"}
    assert run.record.outcomes["ok"] > 20


@pytest.mark.slow
def test_a_byte_that_changes_on_its_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = SimConnection.pull

    async def spoiled(self: SimConnection, region: RemoteRegion, address: int, keep: object, *rest: Any) -> None:
        await pull(self, region, address, keep, *rest)
        ctypes.memset(address + region.nbytes // 2, 255, 1)

    monkeypatch.setattr(SimConnection, "pull", spoiled)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} == {"I5"}
