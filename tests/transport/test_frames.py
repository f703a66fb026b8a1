"""The beginning and the end of delivery, on a connection that carries nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import weakref

import pytest

from tests.conformance.connection import Recorder, turns
from zcactor.errors import ConnectionLost, ForkedProcess
from zcactor.transport.frames import Frames, PeerInfo, Receiver
from zcactor.transport.stream.tls import BadTls


class Nothing(Frames):
    """A connection that ends when a test says so."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop(), PeerInfo(bytes(16), 1, 0, 0), 8, 4096)
        self.begun: list[Receiver] = []
        self.stopped: list[BaseException | None] = []

    def _begin(self, receiver: Receiver) -> None:
        self.begun.append(receiver)

    def flush(self) -> None: ...

    def _sending_stopped(self, error: BaseException | None) -> None:
        self.stopped.append(error)

    async def aclose(self) -> None: ...

    def abort(self) -> None: ...

    def lose(self, cause: Exception | None) -> None:
        """End as on a broken wire."""
        self._lost = True
        self._report_later(cause)

    def close(self, cause: Exception | None) -> None:
        """End as by `aclose`, in spite of any later word from the wire."""
        self._closing = True
        self.lose(cause)

    @property
    def gone(self) -> bool:
        """Whether `aclose` would return."""
        return self._gone.is_set()


async def test_starts_once() -> None:
    connection, recorder = Nothing(), Recorder()
    connection.start(recorder)
    with pytest.raises(RuntimeError, match="started already"):
        connection.start(Recorder())
    assert connection.begun == [recorder]


async def test_end_is_reported_in_a_later_turn() -> None:
    connection, recorder, cause = Nothing(), Recorder(), ConnectionLost("gone")
    connection.start(recorder)
    connection.lose(cause)
    assert not recorder.lost
    assert not connection.gone
    await turns()
    assert recorder.lost == [cause]
    assert connection.gone


async def test_closing_has_no_cause() -> None:
    connection, recorder = Nothing(), Recorder()
    connection.start(recorder)
    connection.close(ConnectionLost("the peer was quicker"))
    await turns()
    assert recorder.lost == [None]


async def test_end_before_the_start() -> None:
    connection, recorder = Nothing(), Recorder()
    connection.lose(ConnectionLost("nobody hears this"))
    assert connection.gone
    connection.start(recorder)
    assert not recorder.lost
    await turns()
    assert recorder.lost == [None]
    assert connection.begun == []


async def test_start_while_the_report_is_on_its_way() -> None:
    connection, recorder = Nothing(), Recorder()
    connection._lost = True  # and the work that it waits for before the report is not done yet
    connection.start(recorder)
    connection._report_later(ConnectionLost("late"))
    await turns()
    assert len(recorder.lost) == 1


async def test_lets_go_of_the_receiver() -> None:
    connection, recorder = Nothing(), Recorder()
    connection.start(recorder)
    connection.begun.clear()
    held = weakref.ref(recorder)
    connection.lose(None)
    await turns()
    del recorder
    gc.collect()
    assert held() is None
    assert connection.gone


@pytest.mark.parametrize(
    ("error", "reaches"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), False),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), False),
        (BadTls("the peer speaks no TLS"), False),
        (MemoryError(), False),
        (TimeoutError("took too long"), True),
        (ValueError("stop"), True),
        (ForkedProcess("the parent's"), True),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
async def test_an_exception_inside_of_a_flush(error: BaseException, reaches: bool) -> None:
    """The connection ends, and exceptions of a signal's handler, which are not the system's, reach the caller."""
    connection = Nothing()
    with pytest.raises(type(error)) if reaches else contextlib.nullcontext():
        connection.send_stopped(error)
    assert connection.stopped == [error]
