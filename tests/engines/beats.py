"""Signs of life of actors: each instance writes a file of its own, which says from when to when it has lived.

The clock is that of the machine, which all its namespaces have in common. So two instances of one actor, or two actors
of one name, that ever live at the same time are found afterwards, also where the test did not look at that moment.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Life", "beat_for_ever", "lives", "twice"]

EACH = 0.02
"""Seconds between two beats."""
_FORM = struct.Struct("<ddQ")


class Life(NamedTuple):
    """The life of one instance of an actor up to now."""

    name: str
    actor: str
    host: str
    pid: int
    """On its host."""
    first: float
    last: float
    """Seconds of CLOCK_BOOTTIME."""
    beats: int


def beat_for_ever(folder: str, name: str, actor: str) -> None:
    """Begin to beat, as the instance that runs in this process, as long as the process lives."""
    path = Path(folder) / f"{name}.{actor}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
    path.write_bytes(bytes(_FORM.size))
    with path.open("r+b") as file:
        written = mmap.mmap(file.fileno(), _FORM.size)
    first = time.clock_gettime(time.CLOCK_BOOTTIME)

    def beat() -> None:
        beats = 0
        while True:
            beats += 1
            _FORM.pack_into(written, 0, first, time.clock_gettime(time.CLOCK_BOOTTIME), beats)
            time.sleep(EACH)  # the time between two beats, by which two lives at one time are found

    threading.Thread(target=beat, name="beats", daemon=True).start()


def lives(folder: Path) -> list[Life]:
    """The lives of all instances, in order of their beginnings."""
    found = []
    for path in folder.iterdir():
        name, actor, host, pid, _ = path.name.rsplit(".", 4)
        first, last, beats = _FORM.unpack(path.read_bytes())
        if beats:
            found.append(Life(name, actor, host, int(pid), first, last, beats))
    return sorted(found, key=lambda life: life.first)


def twice(found: Iterable[Life]) -> list[tuple[Life, Life]]:
    """The pairs of instances of one name that have lived at the same time."""
    last: dict[str, Life] = {}
    pairs = []
    for life in found:
        before = last.get(life.name)
        if before is not None and before.last >= life.first:
            pairs.append((before, life))
        if before is None or life.last > before.last:
            last[life.name] = life
    return pairs
