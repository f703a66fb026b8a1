"""Each call is answered, whichever step of its answer raises."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.errors import ConnectionLost, DeviceError, make_remote_error
from zcactor.execution.answers import Answers
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Status


class Bench:
    """A marshaller, and a session whose native part declines, which raise the errors that a test gives them."""

    wire = SimpleNamespace(respond=lambda *_: False)
    connection = SimpleNamespace(eager_limit=100, max_frame=10_000)

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.failed: list[Exception] = []
        self.ended = 0
        self.raises: list[BaseException] = []
        self.pack_raises: list[BaseException] = []
        marshaller: Any = self
        self.broken: list[DeviceError] = []
        self.answers = Answers("Shop(a)", marshaller, self.push, self._ended, self.broken.append)
        session: Any = self
        self.incoming = Incoming(session, 1, 2, 3, b"")

    def _ended(self) -> None:
        self.ended += 1

    def pack(self, value: Any, eager_limit: int = 0) -> Any:
        """Pack as `zcactor.marshal.Marshaller` does."""
        if self.pack_raises:
            raise self.pack_raises.pop(0)
        return value, (), 0

    def push(self, incoming: Incoming, value: Any) -> Any:
        """Push as `zcactor.objects.pushes.Pushes.value` does."""
        raise AssertionError(f"call {incoming.id} has no FORWARD frame, for {value!r}")

    def respond(
        self, incoming: Incoming, status: int, payload: Any, *_: Any, more: bool = False, pushed: int = 0
    ) -> None:
        """Respond as `zcactor.rpc.session.Session` does; `fail` is the session's, too."""
        if self.raises:
            raise self.raises.pop(0)
        self.sent.append((status, payload))

    def fail(self, error: Exception) -> None:
        """End the connection."""
        self.failed.append(error)


def test_a_result_is_packed_and_sent() -> None:
    bench = Bench()
    bench.answers.value(bench.incoming, 7)
    assert bench.sent == [(Status.OK, 7)] and bench.ended == 1


def test_a_result_that_cannot_be_packed_sends_nothing() -> None:
    bench = Bench()
    bench.pack_raises = [TypeError("a socket")]
    with pytest.raises(TypeError, match="a socket"):
        bench.answers.value(bench.incoming, 7)
    assert not bench.sent and not bench.ended


def test_a_failure_lets_go_of_its_frames() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="no") as raised:
        int("no")
    bench.answers.failure(bench.incoming, raised.value)
    assert raised.value.__traceback__ is None
    ((status, failure),) = bench.sent
    assert status == Status.ERROR and failure.error is raised.value and bench.ended == 1


def test_a_status_that_cannot_be_sent_becomes_a_failure() -> None:
    bench = Bench()
    bench.raises = [MemoryError("short")]
    bench.answers.status(bench.incoming, Status.CANCELLED)
    ((status, failure),) = bench.sent
    assert status == Status.ERROR and isinstance(failure.error, MemoryError) and bench.ended == 1


@pytest.mark.parametrize("where", ["pack_raises", "raises"])
def test_a_failure_that_cannot_be_sent_goes_as_text(where: str) -> None:
    bench = Bench()
    setattr(bench, where, [asyncio.CancelledError("full")])
    bench.answers.failure(bench.incoming, ValueError("no"))
    ((status, payload),) = bench.sent
    assert status == Status.ERROR and b"no" in bytes(payload) and not bench.failed


def test_what_cannot_be_answered_at_all_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.raises = [MemoryError("first"), MemoryError("second")]
    bench.answers.failure(bench.incoming, ValueError("no"))
    (error,) = bench.failed
    assert isinstance(error, ConnectionLost) and error.maybe_executed and "second" in str(error)
    assert "Shop(a): a call could not be answered" in caplog.text and bench.ended == 1


FIELDS = ("type_name", "message", "remote_traceback", "actor", "host", "pid")
FATAL = DeviceError("done", 700, 0, True)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def in_a_ring() -> BaseException:
    first, second = ValueError("no"), ValueError("no")
    first.__context__, second.__context__ = second, first
    return first


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (FATAL, True),
        (caused(ValueError("no"), FATAL), True),
        (DeviceError("create", 2, 0), False),
        (make_remote_error(FATAL, dict.fromkeys(FIELDS, "")), False),
        (in_a_ring(), False),
    ],
)
def test_a_context_that_is_broken_is_noted_after_the_answer(error: BaseException, is_broken: bool) -> None:
    bench = Bench()
    bench.answers.failure(bench.incoming, error)
    assert len(bench.sent) == 1
    assert bench.broken == [FATAL] * is_broken
