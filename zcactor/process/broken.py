"""The note that a process cannot go on, or can use a GPU no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.errors import DeviceError

__all__ = ["BrokenParts"]


class BrokenParts:
    """The parts of a process that are broken: GPUs, as by an access to an illegal address, and threads of actors that
    have ended.

    Args:
        loop: the loop of the process.

    Attributes:
        on_broken: called once, on the loop, with the first error; None where the process goes on without its GPUs.
        give_up: ends the process for the reason given, as its actors cannot go on; None where it has other things to
            do. On the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Final = loop
        self.on_broken: Callable[[DeviceError], object] | None = None
        self.give_up: Callable[[str], object] | None = None

    def note(self, error: DeviceError) -> None:
        """Note an error after which a GPU cannot be used. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, error: DeviceError) -> None:
        on_broken, self.on_broken = self.on_broken, None
        if on_broken is not None:
            on_broken(error)
