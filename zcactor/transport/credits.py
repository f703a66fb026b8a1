"""Flow control by credits: no frame arrives at an empty receive queue.

Each end may have `window` frames outstanding towards the other: sent, and not yet reported as consumed. A frame in the
other direction reports consumed frames in its ``credits`` field. Once more than half of the window is owed, a CREDIT
frame reports them. (eRPC, "Datacenter RPCs can be General and Fast", NSDI 2019, section 4.3.)

``depth = window + 2`` receives suffice, although CREDIT and GOODBYE take no credit. A CREDIT frame carries more than
half of the window, and all credits under way together are never more than the window. So at most *one* CREDIT frame is
under way, and GOODBYE is sent once. (With exactly half of the window, two could be under way, and three at a window of
3.)

No end waits for ever. A sender without credits has its whole window outstanding: under way, owed by the peer, or on the
way back. When nothing is under way in either direction, the peer owes the whole window, which is more than half of it.
So the peer sends a CREDIT frame, and that takes no credit.
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
    """The credits of one end of a connection, in both directions.

    Call `take` before each frame that is sent, and `returned` and then `consumed` for each frame that is received. The
    kinds of frames in `zcactor.rpc.messages.UNCREDITED` neither take a credit nor count as consumed.

    Args:
        depth: frames that the receive queue of each end has room for. Both ends use the same number.

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
        """Take the credit for one frame. False when no credit is left: the frame has to wait."""
        if self.available:
            self.available -= 1
            return True
        return False

    def returned(self, count: int) -> None:
        """Count `count` more of our frames that the peer reports as consumed.

        Raises:
            ProtocolError: more than are outstanding; nothing is counted then.
        """
        available = self.available + count
        if available > self.window:
            raise ProtocolError(
                f"the peer returned {count} credits, but only {self.window - self.available} frames are outstanding"
            )
        self.available = available

    def consumed(self, count: int = 1) -> None:
        """Count `count` frames of the peer that have left the receive queue.

        Raises:
            ProtocolError: the peer sent more frames than its window allows.
        """
        if self.owed + count > self.window:
            raise ProtocolError(f"the peer sent a frame beyond its window of {self.window}, none of them acknowledged")
        self.owed += count

    def take_owed(self) -> int:
        """Return the number for the ``credits`` field of the next frame. These frames count as reported from here
        on."""
        owed = self.owed
        self.owed = 0
        return owed

    @property
    def due(self) -> bool:
        """Whether more than half of the window is owed. Then a CREDIT frame is sent, unless another frame is."""
        return self.owed >= self._threshold
