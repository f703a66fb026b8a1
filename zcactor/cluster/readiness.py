"""The report of a node that starts: it is ready, or says why it cannot start.

It cannot where the head that it was to join decides no more: it was killed after it had been found, or it was stopped,
goes on, and does not know that its term is over before its log says so. Then the one that leads is looked for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from zcactor.cluster.child import Agent

__all__ = ["TermOver", "found_again", "until_ready", "while_led"]

T = TypeVar("T")
_AGAIN: Final = 0.1
"""Seconds until the head is looked for again."""
_TAIL: Final = 2000
"""Bytes of a log that are shown when its node does not start."""


class TermOver(ConnectionLost):
    """The head that a node was to join decides no more: it has ended, or another one decides."""


def while_led(join: Callable[[], T], seconds: float) -> T:
    """Return the result of ``join()``, which looks for the head and joins it. It is called again where the head that it
    has found decides no more, for so many seconds.

    Raises:
        TermOver: no other head was found in time.
        ConnectionLost: as ``join()`` raises it.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return join()
        except TermOver:
            if time.monotonic() + _AGAIN > until:
                raise
        time.sleep(_AGAIN)  # the head that is deposed may not know yet which one leads, and tells nobody when it does


def found_again(find: Callable[[], T]) -> Callable[[], T]:
    """A search for the head, for `while_led`: once ``find()`` has found one, it raises TermOver where it finds none."""
    found = False

    def look() -> T:
        nonlocal found
        try:
            result = find()
        except ConnectionLost as error:
            if not found:
                raise
            raise TermOver(str(error.args[0]), False) from error
        found = True
        return result

    return look


def until_ready(control: socket.socket, agent: Agent, timeout: float, log: Path | None) -> str:
    """The report of the node once it is ready: ``r``, or ``s`` for a standby, its address, and the lines behind that.

    Raises:
        ConnectionLost: it has not in time, or has reported why it cannot start.
        TermOver: the head that it was to join decides no more.
    """
    control.settimeout(timeout)
    try:
        told = control.recv(65536)
    except TimeoutError:
        raise ConnectionLost(f"the node did not start within {timeout:g} s (spawn_timeout)") from None
    except ConnectionResetError:
        told = b""
    if told[:1] in (b"r", b"s"):
        return told.decode()
    if told[:1] in (b"e", b"d"):
        raise (TermOver if told[:1] == b"d" else ConnectionLost)(f"the node could not start: {told[1:].decode()}")
    status = agent.wait()
    raise ConnectionLost(f"the node ended at its start with status {status}{_tail(log)}")


def _tail(log: Path | None) -> str:
    if log is None:
        return "; its own error is printed above"
    text = log.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip()
    return f"; the end of {log}:\n{text}"
