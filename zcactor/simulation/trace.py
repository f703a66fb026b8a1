"""The trace of a run: one JSON line for each event, and the digest of exactly these bytes."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Container

__all__ = ["Trace"]

KEPT: Final = 2000
"""Events that are remembered, for the report of a failure."""
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Trace:
    """Collects events in the order in which they happen.

    Args:
        write: takes each line that is asked for, without its end; None for no lines.
        since, until: virtual seconds between which lines are written.
        only: processes or hosts whose lines are written; None for all.
    """

    def __init__(
        self, write: Callable[[str], object] | None = None, *, since: float = 0.0, until: float = float("inf"),
        only: Container[str] | None = None,
    ) -> None:  # fmt: skip
        self._hash = hashlib.blake2b(digest_size=8)
        self._write = write
        self._since = since
        self._until = until
        self._only = only
        self.count = 0
        """Events so far."""
        self.latest: deque[tuple[float, str, str]] = deque(maxlen=KEPT)
        """Of the last events the time, the process and the line."""

    def note(self, time: float, process: str, kind: str, **details: Any) -> None:
        """Enter one event.

        Args:
            time: virtual seconds, never less than before.
            process: in which it happens, as ``name@host``.
            kind: of event.
            details: what else there is to tell; plain values.
        """
        line = _encode({"t": round(time, 9), "p": process, "k": kind, **details})
        self._hash.update(line.encode() + b"\n")
        self.count += 1
        self.latest.append((time, process, line))
        if self._write is not None and self._since <= time <= self._until and self._wanted(process):
            self._write(line)

    def _wanted(self, process: str) -> bool:
        return self._only is None or process in self._only or process.rpartition("@")[2] in self._only

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for all events so far."""
        return self._hash.hexdigest()
