"""The trace of a run: one JSON line for each event, and the digest of exactly these bytes."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Container

__all__ = ["Trace"]

KEPT: Final = 2000
"""Events that are kept for the report of a failure."""
_AT_ONCE: Final = 256
"""Events that are hashed at a time."""
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_quoted: Callable[[str], str] = encode_basestring_ascii


def _seconds(time: float) -> str:
    """The JSON text of a time, to nanoseconds: a float of this size has no further digits."""
    if 1e-3 <= time < 1e6:
        text = f"{time:.9f}".rstrip("0")
        return text + "0" if text[-1] == "." else text
    return repr(round(time, 9))


def _text(value: Any) -> str:
    """The JSON text of a detail; the common types cost no encoder."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int:
        return repr(value)
    if kind is list:
        return f"[{','.join([_text(each) for each in value])}]"
    return _encode(value)


class Trace:
    """The events of a run, in the order in which they happen.

    Args:
        write: called with each wanted line, without its end; None for no lines.
        since, until: virtual seconds between which lines are written.
        only: processes or hosts whose lines are written; None for all.
    """

    def __init__(
        self, write: Callable[[str], object] | None = None, *, since: float = 0.0, until: float = float("inf"),
        only: Container[str] | None = None,
    ) -> None:  # fmt: skip
        self._hash = hashlib.blake2b(digest_size=8)
        self._unhashed: list[str] = []
        self._write = write
        self._since = since
        self._until = until
        self._only = only
        self.count = 0
        """Events so far."""
        self.latest: deque[tuple[float, str, str]] = deque(maxlen=KEPT)
        """The time, the process and the line of the last events."""

        self._quotes: dict[str, str] = {}
        self._stamp = -1.0, ""
        """The time of the last event, and its text: many events happen at one time."""

    def _label(self, process: str) -> str:
        """The JSON text of a process's name."""
        found = self._quotes.get(process)
        if found is None:
            found = self._quotes[process] = _quoted(process)
        return found

    def _time(self, time: float) -> str:
        """The JSON text of a time."""
        latest, text = self._stamp
        if time != latest:
            text = _seconds(time)
            self._stamp = time, text
        return text

    def note(self, time: float, process: str, kind: str, **details: Any) -> None:
        """Enter one event.

        Args:
            time: virtual seconds, never less than before.
            process: the process in which it happens, as ``name@host``.
            kind: of event; plain words without quotes.
            details: further facts; plain values.
        """
        text = "".join([f',"{name}":{_text(value)}' for name, value in details.items()])
        self._enter(time, process, f'{{"t":{self._time(time)},"p":{self._label(process)},"k":"{kind}"{text}}}')

    def sent(self, time: float, process: str, to: str, nbytes: int, frames: list[str]) -> None:
        """Enter the most frequent event, a batch that was sent. The same as `note` with these details.

        Args:
            time: virtual seconds, never less than before.
            process: the sending process.
            to: the receiving process.
            nbytes: of the batch.
            frames: the kind of each frame; plain words without quotes.
        """
        listed = '"' + '","'.join(frames) + '"' if frames else ""
        self._enter(
            time, process,
            f'{{"t":{self._time(time)},"p":{self._label(process)},"k":"send","to":{self._label(to)},"nbytes":{nbytes},'
            f'"frames":[{listed}]}}',
        )  # fmt: skip

    def _enter(self, time: float, process: str, line: str) -> None:
        self._unhashed.append(line)
        if len(self._unhashed) == _AT_ONCE:
            self._hash_rest()
        self.count += 1
        self.latest.append((time, process, line))
        if self._write is not None and self._since <= time <= self._until and self._wanted(process):
            self._write(line)

    def _wanted(self, process: str) -> bool:
        return self._only is None or process in self._only or process.rpartition("@")[2] in self._only

    def _hash_rest(self) -> None:
        self._hash.update("".join([line + "\n" for line in self._unhashed]).encode("ascii"))
        self._unhashed.clear()

    @property
    def digest(self) -> str:
        """The digest of all events so far: 16 hexadecimal digits."""
        self._hash_rest()
        return self._hash.hexdigest()
