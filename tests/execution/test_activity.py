"""The activity that a process tells of its actors: the calls that they run, and the number of those that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import zcactor as zc
from zcactor.execution.activity import ask_activities
from zcactor.process.context import current

PATIENCE = 60.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
WAITING = 1_500


@zc.actor(process="shared")
class Slow:
    """An actor whose method lasts until it is cancelled."""

    async def work(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


async def test_actors_beside_one_with_many_calls() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2, log_to_driver=False):
        busy: Any = await Slow.options(max_concurrency=1).spawn()
        place = busy._remote.location[0]
        while (other := await Slow.spawn())._remote.location[0] != place:  # type: ignore[attr-defined]
            pass  # there are several shared processes
        held = [busy.work() for _ in range(WAITING + 1)]
        run = other.work()
        process = current()
        told: list[tuple[int, list[str]]] = []

        async def look() -> None:
            found = await ask_activities(process, [place], 20.0)
            told[:] = [
                (actor.waiting, [call.method for call in actor.running])
                for activity in found.values() for actor in activity.actors
            ]  # fmt: skip

        while sorted(told) != [(0, ["work"]), (WAITING, ["work"])]:
            await look()
        for each in (run, *held):
            each.cancel()
