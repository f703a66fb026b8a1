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

from zcactor.native import hot

__all__ = ["RESERVED", "Credits"]

RESERVED: Final = 2
"""Receives beyond the window: one for a CREDIT frame, one for GOODBYE."""

Credits = hot.Credits
"""The credits of one end of a connection, in both directions: ``Credits(depth)``, for frames that the receive queue of
each end has room for, 3 to 65,535; both ends use the same number. Each method is one step towards other threads.

Call `take` before each frame that is sent, and `returned` and then `consumed` for each frame that is received. The
kinds of frames in `zcactor.rpc.messages.UNCREDITED` neither take a credit nor count as consumed."""
