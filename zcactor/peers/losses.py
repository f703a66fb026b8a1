"""The causes of lost connections: whether the process at the other end has ended, or cannot be reached."""

from __future__ import annotations

from typing import Final

__all__ = ["ended_there", "is_refused", "silence_before"]

_NOTICE: Final = 5.0
"""Seconds of a host's silence until a connection to it ends; see `zcactor.transport.tcp.liveness`."""


def is_refused(error: BaseException | None) -> bool:
    """Whether a connection was refused by the other host, where the process has ended."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__
    return False


def ended_there(error: Exception | None) -> bool:
    """Whether a connection ended because the process at its other end did, and not because no packet came through."""
    system = error.__cause__ if error is not None else None
    return not isinstance(system, OSError) or isinstance(system, ConnectionResetError | BrokenPipeError)


def silence_before(error: Exception | None) -> float:
    """The seconds for which nothing had come from the other end when a connection ended by `error`."""
    return 0.0 if ended_there(error) else _NOTICE
