"""The reading half of a bulk queue pair: pulls of objects from the peer's arena by RDMA READ.

Each pull is cut into pieces, and these are posted in lists, of which only the last READ asks for a completion. Several
pulls take turns, so that a small one never waits for a large one. Behind its last piece a pull READs the object's seal
(`zcactor.transport.verbs.device.versions`) and compares it. That READ is fenced: the owner's card may read memory for
several READs in any order, so a seal that was asked for meanwhile would prove nothing about the bytes. It costs one
round trip of the card for each pull, a few microseconds.

A READ that fails puts the queue pairs of both ends into ERR, and all queued requests are flushed. Then the pair is
connected anew (`zcactor.transport.verbs.peer.bulk`). The pull at fault fails, and all others continue behind their last
complete list: the seal, which is READ last, covers the whole object. Each pull has few lists under way at first and
after a failure, and one more for each complete one. So with k failures at most twice its bytes and k lists (8 MiB each)
are read. The end with the faulty pulls waits a little, so that repeated failures leave time for others. Where a peer
does not wait, the pair is given up once a pull has restarted `RESTARTS` times in a row without progress. Memory that
READs may still write to is kept until all completions have arrived, also when the caller does not wait any more.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.verbs.device.sizing import MAX_READS
from zcactor.transport.verbs.device.versions import SEAL_NBYTES, read_seal
from zcactor.transport.verbs.driver.base import MAX_U32, MAX_U64, Read
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status
from zcactor.transport.verbs.peer.pull import Keys, Pull, key_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.bytes import RemoteRegion
    from zcactor.transport.verbs.device.slots import SlotArea
    from zcactor.transport.verbs.driver.base import Completion, QueuePair

__all__ = ["PIECE_NBYTES", "Puller"]

PIECE_NBYTES: Final = 1 << 20
"""Bytes of one READ, unless the port allows less only: so many that the cost of a request is small, and so few that a
few MiB take several requests."""
LIST_READS: Final = 8
"""READs that are posted at once. One list is under way while the next one is posted."""
_ATTEMPTS: Final = 3
"""Attempts at a pull that fails for a temporary reason of its own."""

_FAULTS: Final = frozenset(
    (
        CompletionStatus.LOC_LEN, CompletionStatus.LOC_QP_OP, CompletionStatus.LOC_PROT, CompletionStatus.LOC_ACCESS,
        CompletionStatus.REM_INV_REQ, CompletionStatus.REM_ACCESS, CompletionStatus.REM_OP,
    )
)  # fmt: skip
"""Statuses of faults in the request itself, which is not repeated. Others may be faults of the path, or of other
pulls."""

_OWN_FAULTS: Final = frozenset(
    (CompletionStatus.LOC_LEN, CompletionStatus.LOC_QP_OP, CompletionStatus.LOC_PROT, CompletionStatus.LOC_ACCESS)
)
"""Those of these statuses that are faults at this end, of the destination."""
RESTARTS: Final = 32
"""The most restarts of a pull in a row without any bytes in between, for faults of any pull."""
SETTLED: Final = 16
"""Successful pulls after which earlier faults are forgotten. One is not enough, as stale and good keys may
alternate."""
BUDGET: Final = 5.0
"""Seconds after which a pull is not restarted. A device's own retries take 7.5 s, and after them the path is known to
be dead."""
PAUSE: Final = 0.002
MAX_PAUSE: Final = 0.05
"""First and longest pause in seconds after repeated failures, doubled each time. Each failure breaks the pair for both
directions, and at 100 Gbit/s the pause leaves time for 500 MiB of others."""

READ_ID: Final = 1 << 61
"""Bit of the ``wr_id`` of READs; the low bits are the number of the list."""
LAST: Final = 1 << 62
"""Bit of the ``wr_id`` of the last READ of a list."""
_MARK: Final = LAST | 1 << 59
"""``wr_id`` of a READ of 0 bytes that is posted to be flushed: when it has ended, so have all requests before it."""


class _List(NamedTuple):
    """READs that were posted at once."""

    pull: Pull
    requests: int
    number: int
    end: int
    """End of their bytes in the object."""


class Puller:
    """All pulls from one peer. Runs on the loop's thread.

    Args:
        qp: the bulk queue pair, with room for `MAX_READS` requests.
        seal_area: slots for seals, at least `MAX_READS` of them.
        piece: bytes of one READ.
        arena_address: address of the peer's arena in the peer.
        seals: address, rkey and number of entries of the peer's table of seals.
        broken: called once when the queue pair has failed. It is fenced, and it is drained when `drained` is True.
        unusable: called when it cannot be connected anew: the path is dead, or it cannot be fenced.
    """

    def __init__(
        self,
        qp: QueuePair,
        seal_area: SlotArea,
        piece: int,
        arena_address: int,
        seals: tuple[int, int, int],
        broken: Callable[[], None],
        unusable: Callable[[Exception], None],
    ) -> None:
        self.reads = 0
        """Number of READs that were posted for objects."""
        self.up = False
        """Whether requests may be posted, as both ends are connected."""
        self.stuck = False
        """Whether requests under way may never end, so that the queue pair has to be destroyed."""
        self._qp = qp
        self._area = seal_area
        self._piece = piece
        self._arena_address = arena_address
        self._seals = seals
        self._broken = broken
        self._unusable = unusable
        self._mark_wanted = self._marked = False  # the READ of `_MARK`: to be posted; under way
        self._free_seals = list(range(seal_area.count))
        self._ready: deque[Pull] = deque()  # pulls with bytes left to post
        self._lists: deque[_List] = deque()  # posted, in order
        self._under_way = 0  # requests in the queue pair
        self._next = 0
        self._failed = False
        self._most = MAX_READS  # requests that may be under way: fewer after a failure
        self._faults = 0  # pulls of ours that were at fault
        self._good = 0  # pulls that succeeded since the last of these
        self._resuming: asyncio.TimerHandle | None = None
        self._lost: ConnectionLost | None = None

    @property
    def drained(self) -> bool:
        """Whether no request is under way, so that no memory is written to any more."""
        return not self._lists and not self._marked

    async def pull(
        self, region: RemoteRegion, address: int, lkeys: Keys, keep: object, rkeys: Keys = (), source: int | None = None
    ) -> None:
        """Copy `region` to `address`, whose bytes have `lkeys`. The peer's bytes have `rkeys`, or all that of the
        region where `rkeys` is empty. They are at `source`, or at the region's place in the peer's arena.

        Cancelling stops waiting. `keep` is held until the last posted READ has ended.

        Raises:
            ObjectLost: the peer has no such memory under that rkey, or another object is there by now.
            ConnectionLost: `lose` was called, or the path is dead.
            OSError: the destination cannot be written to.
            ProtocolError: `region`, or the peer's numbers about its arena and seals, leave the address space.
        """
        if self._lost is not None:
            raise self._again(self._lost)
        rkeys = rkeys or ((region.nbytes, region.rkey),)
        source = self._arena_address + region.offset if source is None else source
        self._check(region, rkeys, source)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pull = Pull(region, address, lkeys, rkeys, keep, future, source)
        del keep  # an exception's traceback would hold it longer than `Pull` does
        self._ready.append(pull)
        self.pump()
        try:
            await future
        except asyncio.CancelledError:
            pull.abandoned = True
            if pull.lists == 0:  # otherwise `_ended` does it
                self._finish(pull)
            raise
        finally:
            # An exception refers to this frame by its traceback, and the frame to the exception: a cycle that would
            # hold the callers' objects, such as the destination, until the garbage collector runs.
            del future, pull

    def _check(self, region: RemoteRegion, rkeys: Keys, source: int) -> None:
        """Check that requests can have these numbers. A post would refuse them among requests of other pulls."""
        address, rkey, entries = self._seals
        inside = source + region.nbytes <= MAX_U64
        sealed = region.seal < entries and address + entries * SEAL_NBYTES <= MAX_U64 and rkey <= MAX_U32
        highest = max(rkey for _, rkey in rkeys)
        if not inside or highest > MAX_U32 or (region.seal and not sealed):
            raise ProtocolError(
                f"the peer named {region.nbytes} bytes at {region.offset} of its memory, which are at {source:#x}, "
                f"with rkey {highest:#x} and seal {region.seal} of {entries} at {address:#x}: nothing can lie there"
            )

    def pump(self) -> None:
        """Post as many requests as there is room for, one list of each pull in turn."""
        while self.up and self._under_way + LIST_READS + 1 <= self._most:
            pull = self._next_pull()
            if pull is None:
                return
            if pull.abandoned:  # finished already, or by `_ended` once its lists have ended
                continue
            reads = self._next_list(pull)
            try:
                self._qp.post_reads(reads)
            except Exception as error:
                # The queue pair may be in ERR, and its failure was not polled yet. The number of posted requests is
                # unknown, and so is whether the last one was. So all count as posted, and another one, which is flushed
                # for certain, is posted behind them: when it has ended, all have.
                self._report(error)
                pull.fault = pull.fault or CompletionStatus.GENERAL
                self._mark_wanted = True
                self._fail()
                self._post_mark()
                return
            if pull.posted < pull.region.nbytes:
                self._ready.append(pull)

    def _next_pull(self) -> Pull | None:
        """Return the first pull that may have one more list under way."""
        for index, pull in enumerate(self._ready):
            if pull.lists < pull.most:
                del self._ready[index]
                return pull
        return None

    def _next_list(self, pull: Pull) -> list[Read]:
        region, at = pull.region, pull.posted
        most = max(1, LIST_READS >> pull.restarts)  # fewer after restarts without progress
        reads: list[Read] = []
        self._next += 1
        number = READ_ID | self._next
        while at < region.nbytes and len(reads) < most:
            here, lkey = key_at(pull.lkeys, at)
            there, rkey = key_at(pull.rkeys, at)
            nbytes = min(self._piece, region.nbytes - at, here - at, there - at)
            reads.append(Read(number, pull.address + at, nbytes, lkey, pull.source + at, rkey, signalled=False))
            at += nbytes
        self.reads += len(reads)
        pull.reads += len(reads)
        pull.posted = at
        if at == region.nbytes and region.seal:
            address, rkey, _ = self._seals
            entry = address + region.seal * SEAL_NBYTES
            # Taken now and not before: pulls that hold a slot and wait for their turn could block each other. Each slot
            # in use belongs to a list of two requests or more, so there are enough.
            slot = pull.seal_slot = self._free_seals.pop()
            at_slot = self._area.address(slot)
            reads.append(Read(number, at_slot, SEAL_NBYTES, self._area.lkey, entry, rkey, fenced=True))
        reads[-1] = reads[-1]._replace(signalled=True, wr_id=number | LAST)
        pull.lists += 1
        self._under_way += len(reads)
        self._lists.append(_List(pull, len(reads), number, at))
        return reads

    def completed(self, completion: Completion) -> None:
        """Handle the end of a request: the last of a list, or one that failed."""
        if completion.wr_id == _MARK:
            if self._marked:
                self._came_back()
            return
        if self._mark_wanted:
            self._post_mark()  # there was no room for it
        if not self._lists:
            return
        pull, _, number, _ = self._lists[0]
        good = completion.status == CompletionStatus.SUCCESS
        if not good:
            if completion.status == CompletionStatus.WR_FLUSH:
                pull.flushed = True
            elif not pull.fault:
                pull.fault = completion.status
            self._fail()
        if completion.wr_id == number | LAST:
            self._list_ended(good=good)
            if self._failed:
                self._tell_broken()
            else:
                self.pump()

    def _tell_broken(self) -> None:
        if self.drained and not self._mark_wanted:
            self._broken()

    def _list_ended(self, *, good: bool) -> None:
        """Handle the end of the oldest list, which is complete where it is `good`."""
        pull, requests, _, end = self._lists.popleft()
        self._under_way -= requests
        pull.lists -= 1
        if good and not pull.fault and not pull.flushed:
            pull.arrived = end
            pull.most += 1
            self._most = min(2 * self._most, MAX_READS)
        over = (
            pull.posted == pull.region.nbytes or pull.fault or pull.flushed or pull.abandoned or self._lost is not None
        )
        if pull.lists == 0 and over:
            self._ended(pull)

    def _came_back(self) -> None:
        """End all lists: the queue pair is in ERR and has no request left. Completions of lists may be missing."""
        self._marked = False
        while self._lists:
            self._lists[0].pull.flushed = True
            self._list_ended(good=False)
        self._tell_broken()

    def _post_mark(self) -> None:
        """Have `_came_back` called when all requests in the queue pair, which is in ERR, have ended."""
        area = self._area
        try:
            self._qp.post_reads([Read(_MARK, area.address(0), 0, area.lkey, 0, 0)])
        except OSError as error:
            if len(self._lists) == 1:  # no request is known to end any more
                self._give_up(error)
            return  # otherwise it is full: try again at the next completion
        self._mark_wanted = False
        self._marked = True

    @staticmethod
    def _report(error: Exception) -> None:
        if not isinstance(error, OSError):
            told = {"message": "READs by RDMA failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)

    def _give_up(self, error: Exception) -> None:
        self.stuck = True
        self._unusable(error)

    def _fail(self) -> None:
        """Put the queue pair into ERR, if it is not there, so that all its requests end."""
        if self._failed:
            return
        self._failed = True
        self.up = False
        self._stop_resuming()
        self._most = LIST_READS + 1
        try:
            self._qp.to_error()
        except Exception as error:
            self._report(error)
            self._give_up(error)
        else:
            self._tell_broken()

    def _stop_resuming(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def fence(self) -> None:
        """Fence the queue pair: the peer reads nothing more through it, and all queued requests end.

        Raises:
            OSError: the device failed.
        """
        self.up = False
        self._failed = True
        self._stop_resuming()
        self._qp.to_error()

    def resume(self) -> None:
        """Continue, as both ends are connected again. Where two or more of our pulls failed, and few have succeeded
        since, the next one waits a little."""
        self._failed = False
        pause = min(PAUSE * (1 << min(self._faults, 16)) / 4, MAX_PAUSE) if self._faults > 1 else 0.0
        if pause:
            self._stop_resuming()
            self._resuming = asyncio.get_running_loop().call_later(pause, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._resuming = None
        self.up = True
        self.pump()

    def _ended(self, pull: Pull) -> None:
        """Finish or restart `pull`, of which no READ is under way."""
        whole = pull.posted == pull.region.nbytes and not pull.flushed and not pull.fault
        if pull in self._ready:
            self._ready.remove(pull)
        if pull.done.done() or pull.abandoned:
            self._finish(pull)
        elif whole:
            self._check_seal(pull)
        elif pull.fault in _FAULTS:
            self._faults += 1
            self._good = 0
            what = self._told(pull, describe_status(pull.fault))
            self._finish(pull, OSError(errno.EIO, what) if pull.fault in _OWN_FAULTS else ObjectLost(what))
        elif pull.fault and (pull.attempts == _ATTEMPTS or monotonic() - pull.began > BUDGET):
            # The path is dead, and the next pull would wait as long again.
            what = f"{describe_status(pull.fault)}, {pull.attempts} times"
            error = ConnectionLost(self._told(pull, what))
            self._finish(pull, error)
            self._unusable(self._again(error))
        elif pull.arrived == pull.began_at and pull.restarts == RESTARTS:
            error = ConnectionLost(self._told(pull, f"it was broken off {RESTARTS + 1} times before any byte came"))
            self._finish(pull, error)
            self._unusable(self._again(error))
        else:
            self._begin_again(pull)

    def _begin_again(self, pull: Pull) -> None:
        """Restart a pull from the first byte that is missing."""
        self._free_seal(pull)
        pull.restarts = 0 if pull.arrived > pull.began_at else pull.restarts + 1
        pull.posted = pull.began_at = pull.arrived
        pull.attempts += bool(pull.fault)
        pull.most = 1
        pull.fault = 0
        pull.flushed = False
        self._ready.append(pull)

    def _told(self, pull: Pull, what: str) -> str:
        region = pull.region
        return f"reading {region.nbytes} bytes at {region.offset} of the peer's arena failed: {what}"

    def _check_seal(self, pull: Pull) -> None:
        region = pull.region
        if pull.seal_slot >= 0:
            object_id, offset, nbytes = read_seal(self._area.views[pull.seal_slot])
            inside = offset <= region.offset and region.offset + region.nbytes <= offset + nbytes
            if object_id != region.object_id or not inside:
                found = f"object {object_id:#x}" if object_id else "no object"
                text = f"the owner has {found} where object {region.object_id:#x} was: it has been freed"
                self._finish(pull, ObjectLost(text))
                return
        self._good += 1
        if self._good == SETTLED:
            self._faults = 0
        self._finish(pull)

    def _free_seal(self, pull: Pull) -> None:
        if pull.seal_slot >= 0:
            self._free_seals.append(pull.seal_slot)
            pull.seal_slot = -1

    def _finish(self, pull: Pull, error: Exception | None = None) -> None:
        self._free_seal(pull)
        pull.keep = None
        if pull.done.done():
            return
        if error is None:
            pull.done.set_result(None)
        else:
            pull.done.set_exception(error)

    @staticmethod
    def _again(lost: ConnectionLost) -> ConnectionLost:
        """Make the same error again: one that was raised has a traceback, which would keep the callers' objects."""
        return ConnectionLost(*lost.args)

    def destroyed(self) -> None:
        """Drop all requests, as the queue pair is destroyed and no memory is written to any more."""
        self._marked = self._mark_wanted = False
        while self._lists:
            self._finish(self._lists.popleft().pull)

    def lose(self, error: ConnectionLost) -> None:
        """Fail all pulls, as the connection is lost. `keep` of pulls under way is held until their READs have ended; on
        a failed device they never end."""
        self._lost = error
        self.up = False
        self._stop_resuming()
        pulls = dict.fromkeys((*self._ready, *(one.pull for one in self._lists)))
        self._ready.clear()
        for pull in pulls:
            if pull.lists == 0:
                self._finish(pull, self._again(error))
            elif not pull.done.done():
                pull.done.set_exception(self._again(error))
