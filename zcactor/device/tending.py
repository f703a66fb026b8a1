"""The care for work that has ended: memory goes back to GPUs, and leases to their owners, when streams are done."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.device.events import pending
from zcactor.device.work import Work, moments_of
from zcactor.errors import DeviceError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.device.arena import DeviceArena
    from zcactor.device.events import Moment

__all__ = ["Tending"]

_FIRST_PAUSE: Final = 0.001
_LAST_PAUSE: Final = 0.01
"""Seconds between looks at work that is not done: asking the driver costs a microsecond an event."""


class Tending:
    """Looks after arenas and leases, on a loop, as long as there is something to look after.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Final = loop
        self._arenas: list[DeviceArena] = []
        self._waiting: deque[tuple[list[Moment] | Work, Callable[[], None]]] = deque()
        self._awake = False
        self._has_freed = False
        """Whether an arena has something to give back."""
        self._pause = _FIRST_PAUSE
        self.on_gone: Callable[[set[bytes], int], object] = _nothing
        """Called, on the loop, for each extent that has gone back to its GPU: with the processes that may have it
        mapped yet, and with its place among all extents of this process."""
        self.on_broken: Callable[[DeviceError], object] = _nothing
        """Called, on the loop, with each error by which a GPU's context turns out to be broken."""

    def add(self, arena: DeviceArena) -> None:
        """Look after an arena, too."""
        self._arenas.append(arena)

    def when_done(self, work: list[Moment] | Work, call: Callable[[], None]) -> None:
        """Call a function, on the loop, once some work is done. It runs in finalizers, so it takes no lock."""
        self._waiting.append((work, call))
        self.wake()

    def watch(self, moment: Moment) -> None:
        """Look at work that peers wait for until it is done, and note where the context turns out to be broken."""
        self.when_done([moment], _nothing)

    def tell_gone(self, readers: set[bytes], place: int) -> None:
        """Tell that an extent is gone; see `on_gone`. On the loop."""
        self.on_gone(readers, place)

    def freed(self) -> None:
        """Look after the arenas soon. It runs in finalizers, on any thread."""
        self._has_freed = True
        self.wake()

    def wake(self) -> None:
        """Look soon. It runs in finalizers, on any thread."""
        if not self._awake:
            self._awake = True
            try:  # no global name: the interpreter may be ending
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:
                pass  # the loop has been closed: all that is left belongs to arrays that the program still has

    def _look(self) -> None:
        self._awake = False
        more, arenas = False, self._arenas if self._has_freed else ()
        self._has_freed = False
        for _ in range(len(self._waiting)):
            work, call = self._waiting.popleft()
            left = self._left(work)
            if not left:
                call()
            else:
                self._waiting.append((left, call))
                more = True
        for arena in arenas:
            try:
                self._has_freed = arena.tidy() or self._has_freed
            except DeviceError as error:  # the program's next call meets a fatal one, too; others pass
                self._note(error)
                self._has_freed = self._has_freed or not error.fatal
        more = more or self._has_freed
        self._pause = min(2 * self._pause, _LAST_PAUSE) if more else _FIRST_PAUSE
        if more and not self._awake:
            self._awake = True
            self._loop.call_later(self._pause, self._look)

    def _left(self, work: list[Moment] | Work) -> list[Moment] | Work:
        """The work that is not known to be done."""
        try:
            return pending(moments_of(work))
        except DeviceError as error:
            self._note(error)
            return [] if error.fatal else work  # a broken context does no work any more

    def _note(self, error: DeviceError) -> None:
        if error.fatal:
            self.on_broken(error)


def _nothing(*_: object) -> None:
    """Do nothing: nobody wants to know."""
