"""A trace in the format of browsers: ``chrome://tracing`` and Perfetto read this file.

Hosts are the file's processes and simulated processes its threads, each with a bar from its birth to its end. Every
other event is a mark on its process's line. (Format: "Trace Event Format", the Chromium project.)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["ChromeFile"]


class ChromeFile:
    """A file with the events of a run.

    Args:
        file: opened for text; `close` leaves it open.
    """

    def __init__(self, file: SupportsWrite[str]) -> None:
        self._file = file
        self._hosts: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._separator = "[\n"

    def take(self, line: str) -> None:
        """Write the event of one line of a trace."""
        event = json.loads(line)
        time, place, kind = event.pop("t"), event.pop("p"), event.pop("k")
        phase = {"born": "B", "end": "E"}.get(kind, "i")
        where = self._where(place)
        name = "lives" if phase != "i" else kind
        self._write({"ph": phase, "name": name, "ts": round(time * 1e6, 3), **where, "args": event})

    def _where(self, place: str) -> dict[str, int]:
        """The numbers that stand for a process, which gets its name in the file at its first event."""
        name, _, host = place.rpartition("@")
        if host not in self._hosts:
            self._hosts[host] = len(self._hosts) + 1
            self._name("process_name", host, {"pid": self._hosts[host], "tid": 0})
        where = {"pid": self._hosts[host], "tid": self._places.get(place, len(self._places) + 1)}
        if place not in self._places:
            self._places[place] = where["tid"]
            self._name("thread_name", name or host, where)
        return where

    def _name(self, what: str, name: str, where: dict[str, int]) -> None:
        self._write({"ph": "M", "name": what, **where, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def close(self) -> None:
        """Write the end of the file."""
        self._file.write("\n]\n" if self._hosts else "[]\n")
