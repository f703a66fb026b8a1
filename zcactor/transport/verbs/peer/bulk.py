"""The bulk queue pair of a connection: its pulls, and its reconnection after a failure.

The end that made the connection leads. An end whose queue pair has failed fences and drains it. Then the leader sends a
new generation and its packet sequence number (`Rebuild`). The other end drains, connects and sends its own number
(`Rebuilt`). The leader connects and says that both are connected (`Resume`). The other end asks for that by a `Rebuild`
of its own. Both ends may fail at once, so a message of another than the next generation is out of date and ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.driver.checks import new_psn
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status
from zcactor.transport.verbs.peer.bootstrap import Message, Rebuild, Rebuilt, Resume
from zcactor.transport.verbs.peer.pulling import PIECE_NBYTES, Puller

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.driver.base import Completion
    from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

__all__ = ["BulkPair", "Proving"]

_NONE: Final = -1


class BulkPair:
    """The bulk queue pair of one connection. Runs on the loop's thread. The engine calls it, see
    `zcactor.transport.verbs.device.engine.Completions`.

    Args:
        pairs: the queue pairs, connected.
        leads: whether this end made the connection.
        tell: sends a message to the peer.
        broken: called with the error when the queue pair cannot be connected anew.
        drained: called when the last request that was under way at `end` has ended. Not called where there was no such
            request, see `Puller.drained`.
    """

    def __init__(
        self,
        pairs: QueuePairs,
        *,
        leads: bool,
        tell: Callable[[Message], None],
        broken: Callable[[Exception], None],
        drained: Callable[[], None],
    ) -> None:
        self.generation = 0
        """Number of reconnections."""
        self._pairs = pairs
        self._leads = leads
        self._tell = tell
        self._broken = broken
        self._drained = drained
        self._ended = False
        self._awaits_resume = False  # connected anew, but the peer has not said that it is, too
        self._next_psn = _NONE  # ours of the next generation, which the peer knows
        self._peer_psn = _NONE  # the peer's of the next generation, where the peer leads
        theirs, agreed = pairs.theirs, pairs.agreed
        self.puller: Final = Puller(
            pairs.bulk, pairs.seal_area, min(agreed.max_msg_sz, PIECE_NBYTES), theirs.arena_address, theirs.seals,
            self._came_back, broken,
        )  # fmt: skip
        self.completed = self.puller.completed

    # ---- callbacks of the engine

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """Do nothing: never called, as the bulk queue pair receives nothing."""
        del view, completion, slot
        return True

    def turn_ended(self) -> None:
        """Do nothing: nothing waits for the end of a batch."""

    def device_failed(self, error: OSError) -> None:
        """Do nothing: the control queue pair ends the connection."""

    def path_lost(self, why: str) -> None:
        """Do nothing: the control queue pair ends the connection."""

    def queue_pair_failed(self, why: str) -> None:
        """Connect it anew, as after a READ that failed."""
        del why
        if not self._ended and self.puller.up:
            self._fence()

    def failed(self, error: Exception) -> None:
        """End the connection after a defect. The puller's records may be wrong, so nothing waits for its requests."""
        self.puller.stuck = True
        self._broken(error)

    # ---- reconnection

    def _came_back(self) -> None:
        """Begin the reconnection: the queue pair is in ERR, and no request is under way."""
        if self._ended:
            self._drained()
        elif self._leads:
            if self._next_psn == _NONE:
                self._next_psn = new_psn()
                self._tell(Rebuild(self.generation + 1, self._next_psn))
        elif self._peer_psn != _NONE:
            ours = new_psn()
            if self._connect(ours, self._peer_psn):
                self._awaits_resume = True
                self._tell(Rebuilt(self.generation, ours))
        else:
            self._tell(Rebuild(self.generation + 1, 0))

    def take(self, message: Rebuild | Rebuilt | Resume) -> None:
        """Handle a message of the peer about the reconnection. Nothing happens after `end`."""
        if self._ended:
            return
        following = message.generation == self.generation + 1
        if isinstance(message, Rebuild):
            if following and not (self._leads and self._next_psn != _NONE):
                if not self._leads:
                    self._peer_psn = message.psn
                self._fence()
        elif isinstance(message, Rebuilt):
            if self._leads and following and self._next_psn != _NONE and self._connect(self._next_psn, message.psn):
                self._tell(Resume(self.generation))
                if not self._ended:  # `tell` may have ended it
                    self.puller.resume()
        elif self._awaits_resume and message.generation == self.generation:
            self._awaits_resume = False
            self.puller.resume()

    def _fence(self) -> None:
        try:
            self.puller.fence()
        except OSError as error:
            self._broken(error)
            return
        if self.puller.drained:
            self._came_back()

    def _connect(self, ours: int, theirs: int) -> bool:
        try:
            self._pairs.rebuild(ours, theirs)
        except OSError as error:
            self._broken(error)
            return False
        self.generation += 1
        self._next_psn = self._peer_psn = _NONE
        return True

    def end(self) -> None:
        """End it: from here on the peer reads nothing, and all requests under way end.

        Raises:
            OSError: the device failed. It does not serve READs either then.
        """
        self._ended = True
        self.puller.fence()  # also in ERR: earlier READs that succeeded do not report the failure


class Proving:
    """The bulk queue pair during the proof of the path, with one READ only."""

    def __init__(self, bulk: BulkPair, read: asyncio.Future[str]) -> None:
        self._read = read
        self.received, self.turn_ended, self.device_failed = bulk.received, bulk.turn_ended, bulk.device_failed
        self.path_lost = bulk.path_lost

    def failed(self, error: Exception) -> None:
        """Report that the path is not proven."""
        if not self._read.done():
            self._read.set_result(f"a READ could not be taken up: {error!r}")

    def queue_pair_failed(self, why: str) -> None:
        """Report that the path is not proven."""
        if not self._read.done():
            self._read.set_result(why)

    def completed(self, completion: Completion) -> None:
        """Report the result of the READ."""
        if not self._read.done():
            wrong = completion.status != CompletionStatus.SUCCESS
            self._read.set_result(f"a READ failed: {describe_status(completion.status)}" if wrong else "")
