"""Counters of one process for messages and bytes: plain integers that the hot path adds to."""

from __future__ import annotations

from typing import Protocol

from zcactor.native import hot

__all__ = ["Counters", "new_counters"]


class Counters(Protocol):
    """Cumulative counts of one process since it started. Each is written under the session's lock or on the loop's
    thread; a reader may see a count that is one frame old."""

    calls: int
    """Number of calls sent."""
    frames_sent: int
    frames_received: int
    bytes_eager: int
    """Payload bytes sent in frames."""
    bytes_mapped: int
    """Bytes of arrays, and of payloads above the eager limit, received by mapping the owner's memory. Bytes that a
    message names twice count once."""
    bytes_read: int
    """Bytes pulled by RDMA READ."""
    bytes_received: int
    """Bytes of arrays received over TCP."""
    bytes_authenticated: int
    """Bytes received over TCP that came with valid tags."""
    pushes: int
    """Number of PUSH frames sent with a result."""


def new_counters() -> Counters:
    """Make counters at zero, of the C type that the native part adds to."""
    made: Counters = hot.Counters()
    return made
