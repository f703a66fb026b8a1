"""The defaults of a call whose frame gives no values."""

from __future__ import annotations

from typing import Any, cast

from zcactor.rpc.incoming import Incoming


def test_defaults_are_per_call() -> None:
    session: Any = object()
    first, second = Incoming(session, 1, 2, 3, [4]), Incoming(session, 5, 6, 7, b"packed")
    first.blockers += 1
    first.cancelled = True
    assert (first.session, first.id, first.actor, first.code, first.payload) == (session, 1, 2, 3, [4])
    assert (second.blockers, second.cancelled, second.started, second.task) == (0, False, False, None)
    assert second.payload == b"packed"
    assert tuple(cast("Any", second.parts)) == ()
