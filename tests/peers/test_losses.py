"""The causes of lost connections."""

from __future__ import annotations

import pytest

from zcactor.errors import ConnectionLost
from zcactor.peers.losses import ended_there, is_refused, silence_before


def lost(*causes: BaseException) -> ConnectionLost:
    """The loss of a connection, each error the cause of the one before."""
    error = ConnectionLost("lost")
    last: BaseException = error
    for cause in causes:
        last.__cause__ = cause
        last = cause
    return error


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, True), (lost(), True), (lost(ConnectionResetError(104, "reset")), True),
        (lost(BrokenPipeError(32, "pipe")), True), (lost(TimeoutError(110, "timed out")), False),
        (lost(OSError(113, "no route to host")), False),
    ],
)  # fmt: skip
def test_whether_a_process_has_ended(error: Exception | None, ended: bool) -> None:
    assert ended_there(error) == ended
    assert (silence_before(error) > 0) == (not ended)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (None, False), (lost(), False), (lost(ConnectionRefusedError(111, "refused")), True),
        (lost(lost(FileNotFoundError(2, "no such file"))), True), (lost(OSError(113, "no route")), False),
        (lost(lost(ConnectionRefusedError(111, "refused"))), True),
    ],
)  # fmt: skip
def test_whether_nobody_listens(error: Exception | None, refused: bool) -> None:
    assert is_refused(error) == refused
