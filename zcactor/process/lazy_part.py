"""The way to a part of a process that most processes never need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.rpc.session import Session

__all__ = ["LazyPart"]


class Rare(Protocol):
    """A part that most processes never need."""

    def session_left(self, session: Session, another: Session | None) -> None:
        """Note that a connection is lost; `another` one to the same process is used instead."""

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Note that an actor of this process has ended, while the process may go on."""

    def close(self) -> None:
        """End all work. Idempotent."""


P = TypeVar("P", bound=Rare)


class LazyPart(Generic[P]):
    """The maker of a part when it is first needed, so that its modules are imported then; a call returns the part. Used
    on the loop's thread.

    Args:
        make: imports and makes the part.
    """

    def __init__(self, make: Callable[[], P]) -> None:
        self._make = make
        self.part: P | None = None
        """The part, once it was needed."""

    def __call__(self) -> P:
        """The part."""
        part = self.part
        if part is None:
            part = self.part = self._make()
        return part

    def session_left(self, session: Session, another: Session | None) -> None:
        """Tell the part, if it is there, that a connection is lost; `another` one to the same process is used
        instead."""
        if self.part is not None:
            self.part.session_left(session, another)

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Tell the part, if it is there, that an actor of this process has ended, while the process may go on."""
        if self.part is not None:
            self.part.actor_ended(actor_id, cause)

    def close(self) -> None:
        """End the part, if it is there. Idempotent."""
        if self.part is not None:
            self.part.close()
