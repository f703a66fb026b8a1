"""Shelved calls: calls that the native part keeps until the one promise among their arguments is here."""

from __future__ import annotations

from typing import Any

__all__ = ["Shelf"]


class Shelf(dict[int, Any]):
    """The native parts that have a shelved call, by the `zcactor.rpc.messages.owner_word` of the caller.

    A call whose only promise will be pushed can do nothing but wait. The native part keeps it without a function of
    Python, and gives it to its actor with the outcome in the promise's place. Only the last call of a batch is shelved,
    and it is taken down before the next batch of its connection: so no call of its caller overtakes it. Python does
    everything else that a waiting call needs, once it is taken down: it gives the call its place among others, cancels
    it, ends it with its actor, and asks the owner for an outcome that does not come.
    """

    open: bool = False
    """Whether calls may be shelved: a timer takes them down after a while, and no outcome is here without its call."""

    def take_down(self) -> None:
        """Give all shelved calls to their actors, without the outcomes. On the loop's thread."""
        for wire in list(self.values()):
            wire.take_down()
