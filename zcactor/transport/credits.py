"""Credits: why a frame never meets an empty receive queue.

Each end may have `window` frames outstanding towards the other: sent, and not yet reported consumed. What was consumed
is returned in the ``credits`` field of any frame that goes the other way, or in a CREDIT frame of its own once more
than half of the window is owed. (eRPC, "Datacenter RPCs can be General and Fast", NSDI 2019, section 4.3.)

Why ``depth = window + 2`` receives suffice, although CREDIT and GOODBYE take no credit. A CREDIT frame carries more
than half of the window, and all credits under way together are never more than the window. So at most *one* CREDIT
frame is under way, and GOODBYE is sent once. (At half of the window two could be, and three at a window of 3.)

Why nobody waits for ever. A sender without credits has its whole window outstanding: under way, or owed by the peer, or
on the way back. When nothing is under way in either direction, the peer owes the whole window, which is more than half
of it, so it has to send a CREDIT frame, and that needs no credit.
"""

from __future__ import annotations

from typing import Final

from zcactor.errors import ProtocolError

__all__ = ["MAX_DEPTH", "MIN_DEPTH", "RESERVED", "Credits"]

RESERVED: Final = 2
"""Receives beyond the window: one for a CREDIT frame, one for GOODBYE."""

MIN_DEPTH: Final = RESERVED + 1
MAX_DEPTH: Final = RESERVED + 0xFFFF
"""Frames. The whole window must fit the frame's ``credits`` field, a u16."""


class Credits:
    """One end's account of one connection, both directions; counts only.

    `take` before each frame that is sent, `returned` and then `consumed` for each that is received; frames of the kinds
    in `zcactor.rpc.messages.UNCREDITED` neither take a credit nor count as consumed.

    Args:
        depth: frames that each end can have in its receive queue; both ends use the same number.

    Raises:
        ValueError: `depth` is outside `MIN_DEPTH` to `MAX_DEPTH`.
    """

    __slots__ = ("_threshold", "available", "owed", "window")

    window: int
    """Frames that may be outstanding in each direction."""
    available: int
    """Frames that may be sent now."""
    owed: int
    """Frames consumed here and not yet reported to the peer."""

    def __init__(self, depth: int) -> None:
        if not MIN_DEPTH <= depth <= MAX_DEPTH:
            raise ValueError(f"receive depth is {depth} frames; {MIN_DEPTH} to {MAX_DEPTH} are possible")
        self.window = self.available = depth - RESERVED
        self.owed = 0
        self._threshold = self.window // 2 + 1

    def take(self) -> bool:
        """Take the credit for one frame; False when there is none, and then the frame has to wait."""
        if self.available:
            self.available -= 1
            return True
        return False

    def returned(self, count: int) -> None:
        """The peer says it consumed `count` more of our frames.

        Raises:
            ProtocolError: that is more than are outstanding; the account is left as it was.
        """
        available = self.available + count
        if available > self.window:
            raise ProtocolError(
                f"the peer returned {count} credits, but only {self.window - self.available} frames are outstanding"
            )
        self.available = available

    def consumed(self, count: int = 1) -> None:
        """`count` frames of the peer left the receive queue.

        Raises:
            ProtocolError: the peer sent more frames than its window allows.
        """
        if self.owed + count > self.window:
            raise ProtocolError(f"the peer sent a frame beyond its window of {self.window}, none of them acknowledged")
        self.owed += count

    def take_owed(self) -> int:
        """What to write into the next frame's ``credits`` field; from here on it counts as reported."""
        owed = self.owed
        self.owed = 0
        return owed

    @property
    def due(self) -> bool:
        """More than half of the window is owed: a CREDIT frame must go now unless another frame does."""
        return self.owed >= self._threshold
