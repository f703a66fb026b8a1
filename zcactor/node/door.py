"""The door of a process that listens before it can serve: connections wait behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.base import Connection

__all__ = ["Door"]


class Door:
    """A door that is closed at first.

    Args:
        serve: takes a connection, once the door is open.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._waiting: list[Connection] | None = []

    def accepted(self, connection: Connection) -> None:
        """Take a connection, now or when the door opens."""
        if self._waiting is None:
            self._serve(connection)
        else:
            self._waiting.append(connection)

    def open(self) -> None:
        """Open the door for those who wait and all others. Idempotent."""
        waiting, self._waiting = self._waiting or [], None
        for connection in waiting:
            self._serve(connection)
