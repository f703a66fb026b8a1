"""A part that is made when it is first needed."""

from __future__ import annotations

from typing import Any

from zcactor.process.lazy_part import LazyPart


class Noting:
    """A part that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def session_left(self, session: Any, another: Any) -> None:
        """Note the call."""
        self.calls.append((session, another))

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Note the call."""
        self.calls.append((actor_id, cause))

    def close(self) -> None:
        """Note the call."""
        self.calls.append("close")


def tell(lazy: LazyPart[Noting]) -> None:
    """Tell the part everything."""
    session: Any = "session"
    lazy.session_left(session, None)
    lazy.actor_ended(b"actor", "cause")
    lazy.close()


def test_nothing_is_made_to_be_told_something() -> None:
    lazy = LazyPart(Noting)
    tell(lazy)
    assert lazy.part is None


def test_the_part_is_made_once_and_told_everything() -> None:
    lazy = LazyPart(Noting)
    assert lazy() is lazy()
    tell(lazy)
    assert lazy().calls == [("session", None), (b"actor", "cause"), "close"]
