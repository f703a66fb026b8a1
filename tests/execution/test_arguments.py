"""The moment at which a call's arguments are unpacked, and the promises that it waits for before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.passing import Unresolved
from zcactor.execution.arguments import Arguments
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Flags

PROMISE: Any = SimpleNamespace(kind=RegionKind.REF)


class Bench:
    """Arguments whose payloads are the unpacked values, or the error that unpacking raises."""

    def __init__(self) -> None:
        self.unpacked: list[Any] = []
        self.unblocked: list[Incoming] = []
        marshaller: Any = SimpleNamespace(unpack=self._unpack)
        self.arguments = Arguments(marshaller, self.unblocked.append)

    def _unpack(self, payload: Any, parts: Any, flags: int, ours: bool) -> Any:
        assert ours, "nobody else gets a call's arguments"
        self.unpacked.append(payload)
        if isinstance(payload, Exception):
            raise payload
        return list(payload)

    def incoming(self, payload: Any, parts: Any = (), flags: int = 0) -> Incoming:
        """A call that has arrived."""
        session: Any = None
        made = Incoming(session, 1, 2, 3, payload)
        made.parts, made.flags = parts, flags
        return made


class Call:
    """The call behind a promise: its value comes when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        self.done = False

    def add_callback(self, callback: Any) -> None:
        """Add a callback as `zcactor.rpc.call.Call` does."""
        self.callbacks.append(callback)


def promise() -> tuple[Any, Call]:
    """A promise, and the call that it is the result of."""
    call: Any = Call()
    made = Unresolved.__new__(Unresolved)
    made.call = call
    return made, call


def test_plain_values_are_taken_as_they_are() -> None:
    bench = Bench()
    values = [1, 2]
    assert bench.arguments.take(bench.incoming(values)) == (values, {}) and not bench.unpacked


def test_a_payload_is_unpacked_once_and_let_go() -> None:
    bench = Bench()
    incoming = bench.incoming((1, {"b": 2}), flags=int(Flags.KWARGS))
    assert bench.arguments.take(incoming) == ([1], {"b": 2})
    assert incoming.payload == b"" and incoming.parts == () and len(bench.unpacked) == 1


def test_a_call_waits_for_its_promises_and_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    (first, one), (second, two) = promise(), promise()
    monkeypatch.setattr(Unresolved, "value", lambda self: 7 if self is first else 8)
    incoming = bench.incoming((first, 5, {"b": second}), [PROMISE, PROMISE], int(Flags.KWARGS))
    bench.arguments.prepare(incoming)
    bench.arguments.prepare(incoming)
    assert incoming.blockers == 2 and len(bench.unpacked) == 1
    for callback in one.callbacks + two.callbacks:
        assert not bench.unblocked
        callback(None)
    assert bench.unblocked == [incoming] and incoming.blockers == 0
    assert bench.arguments.take(incoming) == ([7, 5], {"b": 8})


def test_without_promises_nothing_is_unpacked_ahead() -> None:
    bench = Bench()
    incoming = bench.incoming((1,), [SimpleNamespace(kind=RegionKind.ARRAY)])
    bench.arguments.prepare(incoming)
    assert not bench.unpacked and incoming.blockers == 0


def test_what_cannot_be_unpacked_is_raised_where_the_method_would_run() -> None:
    bench = Bench()
    incoming = bench.incoming(KeyError("no such class"), [PROMISE])
    bench.arguments.prepare(incoming)
    assert incoming.blockers == 0
    with pytest.raises(KeyError, match="no such class"):
        bench.arguments.take(incoming)


def test_promises_whose_values_are_there_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    made, call = promise()
    call.done = True
    monkeypatch.setattr(Unresolved, "value", lambda self: 7)
    incoming = bench.incoming((made,), [PROMISE])
    bench.arguments.prepare(incoming)
    assert incoming.blockers == 0 and not call.callbacks and not bench.unblocked
    assert bench.arguments.take(incoming) == ([7], {})


def test_a_list_that_the_native_part_has_read_waits_for_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    made, call = promise()
    monkeypatch.setattr(Unresolved, "value", lambda self: 7)
    incoming = bench.incoming([made, 5])
    bench.arguments.wait(incoming, incoming.payload)
    assert incoming.blockers == 1
    call.callbacks[0](None)
    assert bench.unblocked == [incoming]
    assert bench.arguments.take(incoming) == ([7, 5], {}) and not bench.unpacked
    plain = bench.incoming([1, 2])
    bench.arguments.wait(plain, plain.payload)
    assert plain.payload == [1, 2] and plain.blockers == 0
