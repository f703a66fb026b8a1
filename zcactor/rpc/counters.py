"""What one process has sent, received and moved: plain integers that the hot path adds to."""

from __future__ import annotations

from typing import Any

from zcactor.native import hot

__all__ = ["Counters", "new_counters"]


class Counters:
    """Cumulative counts of one process since it started. Each is written by whoever holds the session's lock, or by the
    loop's thread; a reader may see a count that is one frame old."""

    __slots__ = (
        "bytes_authenticated",
        "bytes_eager",
        "bytes_mapped",
        "bytes_read",
        "bytes_received",
        "calls",
        "frames_received",
        "frames_sent",
    )

    def __init__(self) -> None:
        self.calls = 0
        """Calls sent."""
        self.frames_sent = 0
        self.frames_received = 0
        self.bytes_eager = 0
        """Payload bytes that rode in frames sent."""
        self.bytes_mapped = 0
        """Bytes of arrays, and of payloads above the eager limit, received by mapping the owner's memory. What a
        message names twice counts once."""
        self.bytes_read = 0
        """Bytes pulled by RDMA READ."""
        self.bytes_received = 0
        """Bytes of arrays received over TCP."""
        self.bytes_authenticated = 0
        """Bytes of them that came with tags, which were right."""


def new_counters() -> Counters:
    """Counters that the native part adds to as well, where there is one."""
    made: Any = Counters() if hot is None else hot.Counters()
    counters: Counters = made
    return counters
