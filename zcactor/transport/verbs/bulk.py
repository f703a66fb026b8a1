"""The bulk queue pair of a connection: what is pulled through it, and how it is connected anew after a failure.

The end that connected leads. Whoever finds its queue pair failed fences and drains it; the leader then names a new
generation and its packet sequence number (`Rebuild`), the other end drains, connects and names its own (`Rebuilt`), the
leader connects and says that both are (`Resume`). The other end asks for it by a `Rebuild` of its own. A message about
another generation than the next is old news: both ends may fail at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.base import CompletionStatus, describe_status
from zcactor.transport.verbs.bootstrap import Message, Rebuild, Rebuilt, Resume
from zcactor.transport.verbs.checks import new_psn
from zcactor.transport.verbs.pulling import PIECE_NBYTES, Puller

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.base import Completion
    from zcactor.transport.verbs.pair import QueuePairs

__all__ = ["BulkPair", "Proving"]

_NONE: Final = -1


class BulkPair:
    """On the loop's thread. Watched by the engine, see `zcactor.transport.verbs.engine.Completions`.

    Args:
        pairs: connected.
        leads: whether this end connected.
        tell: sends a message to the peer.
        broken: called with the device's error when it cannot be connected anew, and with what else went wrong.
        drained: called when the last of what was under way at `end` has come back; not where nothing was, see
            `Puller.drained`.
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
        """How often the pair has been connected anew."""
        self._pairs = pairs
        self._leads = leads
        self._tell = tell
        self._broken = broken
        self._drained = drained
        self._ended = False
        self._awaits_resume = False  # connected anew, and whether the peer is has not been heard
        self._next_psn = _NONE  # ours of the next generation, which the peer has been told
        self._peer_psn = _NONE  # the peer's of the next generation, where the peer leads
        theirs, agreed = pairs.theirs, pairs.agreed
        self.puller: Final = Puller(
            pairs.bulk, pairs.seal_area, min(agreed.max_msg_sz, PIECE_NBYTES), theirs.arena_address, theirs.seals,
            self._came_back, broken,
        )  # fmt: skip
        self.completed = self.puller.completed

    # ---- as the engine sees it

    def received(self, view: memoryview, completion: Completion, slot: int) -> bool:
        """Never called: the bulk queue pair receives nothing."""
        del view, completion, slot
        return True

    def turn_ended(self) -> None:
        """Nothing waits for it."""

    def device_failed(self, error: OSError) -> None:
        """The control queue pair is told, and ends the connection."""

    def path_lost(self, why: str) -> None:
        """As `device_failed`."""

    def queue_pair_failed(self, why: str) -> None:
        """As after a READ that failed: it is connected anew."""
        del why
        if not self._ended and self.puller.up:
            self._fence()

    def failed(self, error: Exception) -> None:
        """The connection ends. What the puller has noted may be wrong: nothing waits for what it thinks under way."""
        self.puller.stuck = True
        self._broken(error)

    # ---- anew

    def _came_back(self) -> None:
        """The queue pair is in ERR, and nothing is under way in it."""
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
        """The peer's part in it. Nothing happens once `end` was called."""
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
                if not self._ended:  # by the telling
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
        """The connection is over: from here the peer reads nothing, and what is under way comes back.

        Raises:
            OSError: the device failed; it serves no READs either.
        """
        self._ended = True
        self.puller.fence()  # in ERR as well: READs that ended well before that tell of no failure


class Proving:
    """The bulk queue pair while only the path is proven: nothing but one READ goes through it."""

    def __init__(self, bulk: BulkPair, read: asyncio.Future[str]) -> None:
        self._read = read
        self.received, self.turn_ended, self.device_failed = bulk.received, bulk.turn_ended, bulk.device_failed
        self.path_lost = bulk.path_lost

    def failed(self, error: Exception) -> None:
        """The path counts as not proven."""
        if not self._read.done():
            self._read.set_result(f"a READ could not be taken up: {error!r}")

    def queue_pair_failed(self, why: str) -> None:
        """The path counts as not proven."""
        if not self._read.done():
            self._read.set_result(why)

    def completed(self, completion: Completion) -> None:
        """The READ has ended."""
        if not self._read.done():
            wrong = completion.status != CompletionStatus.SUCCESS
            self._read.set_result(f"a READ failed: {describe_status(completion.status)}" if wrong else "")
