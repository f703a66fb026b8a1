"""Received messages of a peer: from completed receives to whole frames, and their credits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ProtocolError
from zcactor.logs import logger
from zcactor.transport.frames import whole_frames
from zcactor.transport.verbs.device.slots import BYE, DATA, HEADER_NBYTES, PROBE, read_header
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.credits import Credits
    from zcactor.transport.frames import Receiver
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.driver.base import Completion
    from zcactor.transport.verbs.peer.records import Records
    from zcactor.transport.verbs.peer.sending import SlotSender

__all__ = ["Inbox"]


class Inbox:
    """The receiving half of a control queue pair. Runs on the loop's thread.

    Args:
        loop: the loop of the connection.
        engine: the engine with the receives.
        pid: the peer's process number, for messages.
        credits: the credits of the control queue pair.
        sender: the sending half, which returns credits.
        records: decrypts messages; None where they are not encrypted.
        max_frame: bytes of the largest frame.
        probed: called for a message that proves the path.
        broken: called with the reason when the connection has to end.
        refused: called with the error where the peer violates the protocol.
        left: called for the peer's last message.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: Engine, pid: int, credits: Credits, sender: SlotSender,
        records: Records | None, max_frame: int, probed: Callable[[], None], broken: Callable[[str], None],
        refused: Callable[[ProtocolError], None], left: Callable[[], None],
    ) -> None:  # fmt: skip
        self.receiver: Receiver | None = None
        """Receiver of the frames. Messages wait until it is set."""
        self.closed = False
        """Whether the connection has ended, so that messages are dropped."""
        self.expected = 0
        """The number of the peer's next message."""
        self._loop = loop
        self._engine = engine
        self._pid = pid
        self._credits = credits
        self._sender = sender
        self._records = records
        self._max_frame = max_frame
        self._probed = probed
        self._broken = broken
        self._refused = refused
        self._left = left
        # messages before there was a receiver: slot, the message there or in memory of its own, bytes of frames
        self._early: list[tuple[int, memoryview, int]] = []
        self._held = 0  # messages with a credit whose slots may not be posted again yet
        self._read_slots = 0  # of these, messages that were read; `turn_ended` counts them as consumed

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """Handle a message of the peer. Returns whether its slot is free again."""
        if self.closed:
            return True
        if completion.status != CompletionStatus.SUCCESS:
            self._broken(f"a message could not be received: {describe_status(completion.status)}")
            return True
        try:
            length = completion.byte_len
            if self._records is not None:
                view = self._records.open(view, length)
                length = len(view)
            kind, credits, nbytes = read_header(view, length, self.expected)
            self.expected += 1
            if credits:
                self._credits.returned(credits)
            if kind == DATA:
                if self.receiver is None or self._early:
                    if len(self._early) >= self._credits.window:
                        raise self._beyond_window(len(self._early))
                    self._early.append((slot, view, nbytes))
                    return False
                self._deliver(view, nbytes)
            elif kind == PROBE:
                self._hold()
                self._read_slots += 1
                self._probed()
            elif kind == BYE:
                self._left()
        except ProtocolError as error:
            self._refused(error)
        return True

    def turn_ended(self) -> None:
        """Return credits, as slots of read messages are posted again, and send frames that credits allow."""
        if not self.closed:
            self._credits.consumed(self._read_slots)
            self._held -= self._read_slots
            self._read_slots = 0
            self._sender.pump()
            self._sender.return_credits()

    def _hold(self) -> None:
        """Count a message that takes a credit.

        Raises:
            ProtocolError: the peer had no credit left.
        """
        taken = self._credits.owed + self._held
        if taken >= self._credits.window:
            raise self._beyond_window(taken)
        self._held += 1

    def _beyond_window(self, taken: int) -> ProtocolError:
        """Make and log the error of a peer that sent a message although it had `taken` all of its credits. It is
        logged, because other peers share the receives, and their messages may be the first that find none."""
        window, name = self._credits.window, self._engine.device.name
        logger.error(
            "process %d ignores its credits: it had sent %d messages of %d, and sent another; messages of other "
            "processes may find no receive at %s, and their connections break",
            self._pid, taken, window, name,
        )  # fmt: skip
        return ProtocolError(f"the peer sent a message beyond its window of {window}, none of them acknowledged")

    def _deliver(self, view: memoryview, nbytes: int) -> None:
        """Pass whole frames to the receiver. Frames that it sends meanwhile do not return the credit of this message,
        whose slot is in use until the receiver returns.

        Raises:
            ProtocolError: the frames are not whole, the receiver refuses one, or the message had no credit.
        """
        receiver = self.receiver
        credits = self._credits  # as `_hold` does, without a call for each message
        if credits.owed + self._held >= credits.window:
            raise self._beyond_window(credits.owed + self._held)
        self._held += 1
        frames = view[HEADER_NBYTES : HEADER_NBYTES + nbytes]
        done = whole_frames(frames, nbytes, self._max_frame)
        try:
            if done and receiver is not None:
                receiver.frames_received(frames[:done])
        except ProtocolError:
            raise
        except Exception as error:
            # A defect of the receiver. It goes to the loop's handler and not through the engine, which works for other
            # connections as well. Frames were skipped, so this connection ends.
            self._broken("")
            self._loop.call_exception_handler({"message": "a receiver of frames failed", "exception": error})
        self._read_slots += 1
        if done < nbytes and not self.closed:
            raise ProtocolError(f"a message of {nbytes} bytes is whole frames only up to byte {done}")

    def deliver_early(self) -> None:
        """Deliver messages that arrived before the receiver was set."""
        while self._early and not self.closed:
            slot, view, nbytes = self._early[0]
            try:
                self._deliver(view, nbytes)
            except ProtocolError as error:
                self._refused(error)
                return
            if self._early:  # otherwise the receiver has ended the connection
                del self._early[0]
                self._engine.give_back(slot)
        self.turn_ended()

    def forget(self) -> None:
        """Return the slots of messages that were not delivered, and drop the receiver: the connection has ended."""
        self.receiver = None
        for slot, _, _ in self._early:
            self._engine.give_back(slot)
        self._early.clear()
