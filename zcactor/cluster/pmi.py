"""The key-value space of an MPICH launcher, by lines of text over an inherited descriptor (PMI-1).

Each request is one line of ``key=value`` pairs that begins with ``cmd=``, and is answered by one line.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KeyValueSpace", "line_of", "parsed"]

_LONGEST: Final = 1024
"""Bytes of a line, the limit of PMI-1 (PMIU_MAXLINE)."""


def line_of(command: str, **fields: str | int) -> bytes:
    """The line of a request.

    Raises:
        ValueError: a value has a blank or a line's end in it, which the protocol cannot carry.
    """
    pairs = [f"cmd={command}"]
    for name, value in fields.items():
        text = str(value)
        if not text or any(character.isspace() for character in text):
            raise ValueError(f"PMI-1 cannot carry {name}={text!r}: a value has no blanks")
        pairs.append(f"{name}={text}")
    line = " ".join(pairs).encode() + b"\n"
    if len(line) > _LONGEST:
        raise ValueError(f"a line of PMI-1 has at most {_LONGEST} bytes, and this has {len(line)}")
    return line


def parsed(line: bytes, command: str) -> Mapping[str, str]:
    """The pairs of an answer.

    Raises:
        ProtocolError: it is no answer to a request of the kind `command` names, or reports a failure.
    """
    pairs = dict(pair.partition("=")[::2] for pair in line.decode("utf-8", "replace").split())
    if pairs.get("cmd") != command:
        raise ProtocolError(f"the launcher answered {line[:100]!r} where PMI-1 has cmd={command}")
    if pairs.get("rc", "0") != "0":
        raise ProtocolError(f"the launcher refused: {line[:200].decode('utf-8', 'replace').strip()}")
    return pairs


class KeyValueSpace:
    """The space that the ranks of one launcher share.

    Args:
        fd: the descriptor to the launcher, from ``PMI_FD``.
        deadline: the time when waiting for an answer ends, in seconds of ``time.monotonic()``.

    Raises:
        ConnectionLost: the launcher does not answer in time, or is gone; here and in the methods.
        ProtocolError: it speaks another protocol; likewise.
    """

    def __init__(self, fd: int, deadline: float) -> None:
        self._fd = fd
        self._deadline = deadline
        self._rest = b""
        self._ask("init", "response_to_init", pmi_version=1, pmi_subversion=1)
        self.name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]
        """The name of the space, which no other run of this launcher has."""

    def put(self, key: str, value: str) -> None:
        """Put a value under `key`. Others see it once `barrier` has returned."""
        self._ask("put", "put_result", kvsname=self.name, key=key, value=value)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._ask("barrier_in", "barrier_out")

    def get(self, key: str) -> str:
        """The value that a rank has put under `key` before the barrier."""
        return self._ask("get", "get_result", kvsname=self.name, key=key)["value"]

    def finalize(self) -> None:
        """Say goodbye. Without it the launcher takes the end of this process for an abort."""
        self._ask("finalize", "finalize_ack")

    def _ask(self, command: str, answer: str, **fields: str | int) -> Mapping[str, str]:
        request = line_of(command, **fields)
        try:
            os.write(self._fd, request)
            return parsed(self._line(command), answer)
        except ConnectionLost:  # which is an OSError, too
            raise
        except OSError as error:
            raise ConnectionLost(f"the launcher's descriptor {self._fd} (PMI_FD) fails: {error.strerror}") from error

    def _line(self, command: str) -> bytes:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST:
                raise ProtocolError("the launcher sent a line that is longer than PMI-1 allows")
            if not poll.poll(max(self._deadline - time.monotonic(), 0.0) * 1000):
                what = "not all ranks have started" if command == "barrier_in" else f"it owes an answer to {command}"
                raise ConnectionLost(f"the launcher did not answer in time: {what}")
            data = os.read(self._fd, _LONGEST)
            if not data:
                raise ConnectionLost("the launcher is gone: it has closed PMI_FD")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line
