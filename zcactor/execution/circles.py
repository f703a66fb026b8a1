"""Circles: actors that wait for each other, so that none of them goes on.

A process where a call is held up by a method that itself waits for an actor elsewhere follows the calls that are
awaited, from process to process, and logs the way where it comes back to itself. Of the processes of a circle where
calls are held up the one with the smallest id logs it. A way leads on only through a process
that runs one method: of several nobody can tell from outside which one awaits what. A plain method waits where a
thread is blocked, and an async one where a task waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.execution.activity import ask_activities
from zcactor.logs import logger

if TYPE_CHECKING:
    from zcactor.execution.activity import Activity, ActivityService, ActorActivity, Running
    from zcactor.process.context import LocalProcess

__all__ = ["Circles"]

_LONGEST: Final = 8
"""Actors of a circle that is looked for: each costs a question to a process."""
_PATIENCE: Final = 2.0
"""Seconds that a process has to tell its activity; one that is blocked waits for nobody's answer."""


def _runner_of(activity: Activity) -> tuple[ActorActivity, Running] | None:
    """The only method that a process runs, with its actor; None where it runs several or none."""
    running = [(actor, call) for actor in activity.actors for call in actor.running]
    return running[0] if len(running) == 1 else None


def _holds_up(activity: Activity) -> bool:
    """Whether calls are held up in a process, as its own watchdog has seen."""
    return any(actor.waited for actor in activity.actors)


class Circles:
    """The search for circles through one process.

    Args:
        process: the process.
        service: tells its activity.
    """

    def __init__(self, process: LocalProcess, service: ActivityService) -> None:
        self._process = process
        self._service = service
        self._said: set[str] = set()

    async def search(self) -> None:
        """Look for a circle, and log it, each one once. Cancelling ends the search."""
        found = await self._follow(self._service.now(), [], [self._process.process])
        if not found or (text := "; ".join(found)) in self._said:
            return
        self._said.add(text)
        if len(found) == 1:
            logger.warning("%s, which starts when that method has ended: call the method itself, or do not wait", text)
        else:
            logger.warning(
                "%d actors wait for each other, and none goes on as long as they do: %s. Let one return its reference "
                "instead of waiting, or give it async methods or a larger max_concurrency", len(found), text,
            )  # fmt: skip

    async def _follow(self, activity: Activity, way: list[str], been: list[bytes]) -> list[str]:
        """The way from a process back to this one, as its steps; empty where there is no such way, or another process
        on it logs it.

        Args:
            activity: of that process.
            way: the steps to it.
            been: the processes that were asked, and this one.
        """
        runner = _runner_of(activity)
        if runner is None or len(way) >= _LONGEST:
            return []
        actor, call = runner
        for awaited in activity.awaited:
            if awaited.blocks is not call.blocks:  # something else of the process waits for it
                continue
            steps = [*way, f"{actor.label}.{call.method} waits for {awaited.label}"]
            if awaited.process == self._process.process:
                if way or awaited.actor_id == actor.actor_id:
                    return steps
                continue
            if awaited.process in been:
                continue
            been.append(awaited.process)
            told = (await ask_activities(self._process, [awaited.process], _PATIENCE)).get(awaited.process)
            if told is None or (awaited.process < self._process.process and _holds_up(told)):
                continue
            if found := await self._follow(told, steps, been):
                return found
        return []
