"""The entries about ends of calls."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from simulation.cluster import Cluster
from simulation.network import Network
from simulation.record import Record
from simulation.trace import Trace
from simulation.workloads.scene import Scene
from simulation.world import World
from zcactor.config import Config
from zcactor.errors import ActorUnavailable, RemoteError, ZcactorError


def scene_of() -> Scene:
    world = World(1, Trace())
    return Scene(Record(world), random.Random(1), 2, 1.0, Cluster(Network(world), Config(), {}))


@pytest.mark.parametrize(
    ("error", "outcome", "maybe"),
    [
        (None, "ok", None),
        (ActorUnavailable("a", "b", False), "ActorUnavailable", False),
        (ActorUnavailable("a", "b", True), "ActorUnavailable", True),
        (ZcactorError("x"), "ZcactorError", None),
        (RemoteError("x"), "remote RemoteError", True),
        (asyncio.CancelledError(), "CancelledError", None),
    ],
)
def test_outcomes(error: BaseException | None, outcome: str, maybe: bool | None) -> None:
    scene = scene_of()
    record = scene.record
    operation = record.begin("plain")

    async def call() -> int:
        if error is not None:
            raise error
        return 7

    async def main() -> Any:
        return await scene.outcome(operation, call)

    assert asyncio.run(main()) == (7 if error is None else None)
    assert (operation.outcome, operation.maybe, operation.ended) == (outcome, maybe, 1)


def test_the_end_of_the_work() -> None:
    scene = scene_of()
    assert not scene.over
    scene.end = 0.0
    assert scene.over
