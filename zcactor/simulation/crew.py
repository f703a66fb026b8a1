"""The crew of a simulated process: functions for its threads run on the loop, a drawn moment later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.loop import SimLoop

__all__ = ["LoopCrew"]

WAKING: Final = (1e-6, 50e-6)
"""Virtual seconds from a submission until the thread begins."""


class LoopCrew:
    """A crew that runs functions on a loop. Satisfies `zcactor.execution.threads.Runner`.

    Args:
        loop: of the process.
    """

    wanted = True
    """Others may want to run between two calls of one actor, as they would on threads."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._drawn = loop.world.random(f"crew/{loop.name}")

    def submit(self, function: Callable[[], None]) -> None:
        """See `Runner.submit`."""
        self._loop.at(self._loop.world.now + self._drawn.uniform(*WAKING), function)

    def close(self) -> None:
        """See `Runner.close`: this crew has no threads to end."""
