"""Threads of a simulated process: what would run on one runs on the loop, a drawn moment later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.loop import SimLoop

__all__ = ["LoopCrew"]

WAKING: Final = (1e-6, 50e-6)
"""Virtual seconds until a thread that was given something begins."""


class LoopCrew:
    """Runs functions on a loop. Satisfies `zcactor.runtime.threads.Runner`.

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
        """See `Runner.close`: nothing waits here."""
