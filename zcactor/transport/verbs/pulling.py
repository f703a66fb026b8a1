"""The reading half of a bulk queue pair: objects of the peer's arena come by RDMA READ.

Each pull is cut into pieces, and the pieces are posted in lists of which only the last asks for a completion. Several
pulls take turns, so that a small one never waits for a large one. Behind its last piece a pull READs the object's seal
(`zcactor.transport.verbs.seals`) and compares it.

A READ that fails puts both ends' queue pairs into ERR, and everything that was queued comes back as flushed. Then the
pair is connected anew (`zcactor.transport.verbs.connection`), the pull at fault fails, and the others go on behind the
last list that came whole: the seal, which is READ last, covers all of it. Each pull has few lists under way at first
and after a failure, one more for each that came, so that with k failures at most twice its bytes are read and k lists
(8 MiB each). The end whose pulls are at fault waits a little, so that requests that fail again and again leave time for
the others; where a peer does not wait, the pair counts as of no use once a pull got nowhere `RESTARTS` times in a row.
Memory that READs may still write to is kept until every completion has come, whoever has stopped waiting.
"""

from __future__ import annotations

import asyncio
import errno
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.verbs.base import MAX_U32, MAX_U64, CompletionStatus, Read, describe_status
from zcactor.transport.verbs.seals import SEAL_NBYTES, read_seal

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.base import RemoteRegion
    from zcactor.transport.verbs.base import Completion, QueuePair
    from zcactor.transport.verbs.slots import SlotArea

__all__ = ["MAX_READS", "PIECE_NBYTES", "Keys", "Pull", "Puller", "key_at", "pieces_of"]

PIECE_NBYTES: Final = 1 << 20
"""Bytes of one READ, unless the port takes less. Large enough that a request's cost vanishes, and small enough that
several are under way for a few MiB."""
LIST_READS: Final = 8
"""READs that are posted at once. One of the lists is under way while the next is posted."""
MAX_READS: Final = 64
"""Requests of the bulk queue pair: those of all pulls together."""
_ATTEMPTS: Final = 3
"""How often a pull is begun that fails by itself, for a reason that may pass."""

_FAULTS: Final = frozenset(
    (
        CompletionStatus.LOC_LEN, CompletionStatus.LOC_QP_OP, CompletionStatus.LOC_PROT, CompletionStatus.LOC_ACCESS,
        CompletionStatus.REM_INV_REQ, CompletionStatus.REM_ACCESS, CompletionStatus.REM_OP,
    )
)  # fmt: skip
"""What is wrong with the request itself: repeating it is of no use. All else may be the path's fault, or another's."""

_OWN_FAULTS: Final = frozenset(
    (CompletionStatus.LOC_LEN, CompletionStatus.LOC_QP_OP, CompletionStatus.LOC_PROT, CompletionStatus.LOC_ACCESS)
)
"""Of these, what is wrong at this end: the destination, and not what is read."""
RESTARTS: Final = 32
"""How often in a row a pull begins again, for whosever fault, without any of its bytes having come in between."""
SETTLED: Final = 16
"""Pulls that have to come well until those that were at fault are forgotten. One is not enough: each stale key may be
followed by a good one."""
BUDGET: Final = 5.0
"""Seconds after which a pull is not begun again. A device's own retries take 7.5 s: one that has waited for them once
knows that the path is dead."""
PAUSE: Final = 0.002
MAX_PAUSE: Final = 0.05
"""Seconds between requests that fail again and again: doubled each time, from the one to the other. Each failure breaks
the pair for both directions, and at 100 Gbit/s this leaves others time for 500 MiB."""

READ_ID: Final = 1 << 61
"""Bit of the ``wr_id`` of READs; the low bits are the number of the list."""
LAST: Final = 1 << 62
"""Bit of that of the last one of a list."""
_MARK: Final = LAST | 1 << 59
"""``wr_id`` of a READ of nothing, which is posted to be flushed: when it has come back, so has everything before it."""


Keys = Sequence[tuple[int, int]]
"""Keys of the bytes of an object: up to which byte each goes, in order, and the key."""


def key_at(keys: Keys, at: int) -> tuple[int, int]:
    """The entry for byte `at`."""
    return keys[0] if len(keys) == 1 else keys[bisect_right(keys, at, key=itemgetter(0))]


def pieces_of(nbytes: int, piece: int) -> int:
    """READs that `nbytes` take."""
    return -(-nbytes // piece)


@dataclass(slots=True, eq=False)
class Pull:
    """One object on its way."""

    region: RemoteRegion
    address: int
    lkeys: Keys
    rkeys: Keys
    keep: object
    """What keeps the memory at `address`."""
    done: asyncio.Future[None]
    posted: int = 0
    """Bytes whose READs have been posted."""
    arrived: int = 0
    """Bytes that are here: those of the lists up to the first that did not come whole."""
    seal_slot: int = -1
    lists: int = 0
    """Lists posted whose completions have not come."""
    fault: int = 0
    """The first status that was none of success and flush."""
    flushed: bool = False
    """Some READ was flushed for another's fault."""
    most: int = 2
    """Lists that may be under way: few where little has come yet, so that a failure costs no more than what has."""
    attempts: int = 1
    restarts: int = 0
    """How often in a row it began again without any bytes having come."""
    began_at: int = 0
    """Bytes that were here when it last began."""
    began: float = field(default_factory=monotonic)
    abandoned: bool = False
    """Nobody waits for it any more."""
    reads: int = field(default=0)
    """Requests posted, seals not counted."""


class _List(NamedTuple):
    """READs that were posted at once."""

    pull: Pull
    requests: int
    number: int
    end: int
    """Up to which byte of the object they go."""


class Puller:
    """All pulls from one peer. On the loop's thread.

    Args:
        qp: the bulk queue pair, which takes `MAX_READS` requests.
        seal_area: slots for seals, at least `MAX_READS` of them.
        piece: bytes of one READ.
        arena_address: where the peer's arena begins, in the peer.
        seals: address, rkey and number of entries of the peer's table.
        broken: called once when the queue pair has failed; all is fenced and drained when `drained` is True.
        unusable: called when it is of no use to connect it anew: the path is dead, or it cannot be fenced.
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
        """READs posted for objects so far."""
        self.up = False
        """Whether requests may be posted: both ends are connected."""
        self.stuck = False
        """Whether what is under way may never come back, so that only destroying the queue pair ends it."""
        self._qp = qp
        self._area = seal_area
        self._piece = piece
        self._arena_address = arena_address
        self._seals = seals
        self._broken = broken
        self._unusable = unusable
        self._mark_wanted = self._marked = False  # a READ that is flushed is to be posted; it is under way
        self._free_seals = list(range(seal_area.count))
        self._ready: deque[Pull] = deque()  # with something left to post
        self._lists: deque[_List] = deque()  # posted, in order
        self._under_way = 0  # requests in the queue pair
        self._next = 0
        self._failed = False
        self._most = MAX_READS  # requests that may be under way: fewer after a failure
        self._faults = 0  # pulls of ours that were at fault
        self._good = 0  # pulls that came well since one of those
        self._resuming: asyncio.TimerHandle | None = None
        self._lost: ConnectionLost | None = None

    @property
    def drained(self) -> bool:
        """Whether nothing is under way, so that no memory is written to any more."""
        return not self._lists and not self._marked

    async def pull(self, region: RemoteRegion, address: int, lkeys: Keys, keep: object, rkeys: Keys = ()) -> None:
        """Bring `region` to `address`, whose bytes have `lkeys`. The peer's have `rkeys`, or where there are none all
        have the region's.

        Cancelling stops waiting; `keep` is held until the last READ that was posted has ended.

        Raises:
            ObjectLost: the peer has no such memory under that rkey, or there lies another object by now.
            ConnectionLost: `lose` was called, or the path is dead.
            OSError: the destination cannot be written to.
            ProtocolError: `region`, or what the peer has said about its arena and seals, leaves the address space.
        """
        if self._lost is not None:
            raise self._again(self._lost)
        rkeys = rkeys or ((region.nbytes, region.rkey),)
        self._check(region, rkeys)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pull = Pull(region, address, lkeys, rkeys, keep, future)
        del keep  # which the traceback of what is raised would hold for longer than `Pull` does
        self._ready.append(pull)
        self.pump()
        try:
            await future
        except asyncio.CancelledError:
            pull.abandoned = True
            if pull.lists == 0:  # else `_ended` does it
                self._finish(pull)
            raise
        finally:
            # What is raised leads by its traceback to this frame, and from here to itself: a cycle that would hold what
            # the callers hold, the destination for one, until the garbage collector comes by.
            del future, pull

    def _check(self, region: RemoteRegion, rkeys: Keys) -> None:
        """What no request can carry would be refused when it is posted, in the middle of others' requests."""
        address, rkey, entries = self._seals
        inside = self._arena_address + region.offset + region.nbytes <= MAX_U64
        sealed = region.seal < entries and address + entries * SEAL_NBYTES <= MAX_U64 and rkey <= MAX_U32
        highest = max(rkey for _, rkey in rkeys)
        if not inside or highest > MAX_U32 or (region.seal and not sealed):
            raise ProtocolError(
                f"the peer named {region.nbytes} bytes at {region.offset} of its arena at {self._arena_address:#x}, "
                f"with rkey {highest:#x} and seal {region.seal} of {entries} at {address:#x}: nothing can lie there"
            )

    def pump(self) -> None:
        """Post what there is room for, a list of each pull in turn."""
        while self.up and self._under_way + LIST_READS + 1 <= self._most:
            pull = self._next_pull()
            if pull is None:
                return
            if pull.abandoned:  # finished already, or by `_ended` once its lists have come back
                continue
            reads = self._next_list(pull)
            try:
                self._qp.post_reads(reads)
            except Exception as error:
                # The queue pair is in no state to take requests, say, and its failure has not been polled yet. How many
                # of them it took nobody knows, and least of all whether the last one. So they count as posted, and
                # behind them goes one that is flushed for certain: when it has come back, so have all.
                self._report(error)
                pull.fault = pull.fault or CompletionStatus.GENERAL
                self._mark_wanted = True
                self._fail()
                self._post_mark()
                return
            if pull.posted < pull.region.nbytes:
                self._ready.append(pull)

    def _next_pull(self) -> Pull | None:
        """The first that may have one more list under way."""
        for index, pull in enumerate(self._ready):
            if pull.lists < pull.most:
                del self._ready[index]
                return pull
        return None

    def _next_list(self, pull: Pull) -> list[Read]:
        region, at = pull.region, pull.posted
        most = max(1, LIST_READS >> pull.restarts)  # fewer where there was no time for as many
        reads: list[Read] = []
        self._next += 1
        number = READ_ID | self._next
        source = self._arena_address + region.offset
        while at < region.nbytes and len(reads) < most:
            here, lkey = key_at(pull.lkeys, at)
            there, rkey = key_at(pull.rkeys, at)
            nbytes = min(self._piece, region.nbytes - at, here - at, there - at)
            reads.append(Read(number, pull.address + at, nbytes, lkey, source + at, rkey, signalled=False))
            at += nbytes
        self.reads += len(reads)
        pull.reads += len(reads)
        pull.posted = at
        if at == region.nbytes and region.seal:
            address, rkey, _ = self._seals
            entry = address + region.seal * SEAL_NBYTES
            # Taken no sooner: pulls that wait for their turn with a slot could keep each other from it. Each one in use
            # belongs to a list of two requests or more, so there are enough.
            slot = pull.seal_slot = self._free_seals.pop()
            reads.append(Read(number, self._area.address(slot), SEAL_NBYTES, self._area.lkey, entry, rkey))
        reads[-1] = reads[-1]._replace(signalled=True, wr_id=number | LAST)
        pull.lists += 1
        self._under_way += len(reads)
        self._lists.append(_List(pull, len(reads), number, at))
        return reads

    def completed(self, completion: Completion) -> None:
        """A request has ended: the last of a list, or one that failed."""
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
        """The oldest list has come back, whole where it is `good`."""
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
        """The queue pair is in ERR and has nothing any more, though the last completion of a list may not have come."""
        self._marked = False
        while self._lists:
            self._lists[0].pull.flushed = True
            self._list_ended(good=False)
        self._tell_broken()

    def _post_mark(self) -> None:
        """Have `_came_back` called when everything in the queue pair, which is in ERR, has come back."""
        area = self._area
        try:
            self._qp.post_reads([Read(_MARK, area.address(0), 0, area.lkey, 0, 0)])
        except OSError as error:
            if len(self._lists) == 1:  # nothing is known to come back any more
                self._give_up(error)
            return  # else it is full: again with the next completion
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
        """The queue pair is in ERR, or is put there: everything in it comes back."""
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
        """Let the peer read nothing more through this queue pair, and let everything queued come back.

        Raises:
            OSError: the device failed.
        """
        self.up = False
        self._failed = True
        self._stop_resuming()
        self._qp.to_error()

    def resume(self) -> None:
        """The queue pair is connected again, and so is the peer's. Where pulls of ours failed twice or more, and few
        came well since, the next one waits a little."""
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
        """No READ of `pull` is under way."""
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
        """From the first byte that is not here."""
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
        """The same error anew: one that has been raised has a traceback, which would keep what callers keep."""
        return ConnectionLost(*lost.args)

    def destroyed(self) -> None:
        """The queue pair does not exist any more, so nothing is written to: what of it never came back is let go."""
        self._marked = self._mark_wanted = False
        while self._lists:
            self._finish(self._lists.popleft().pull)

    def lose(self, error: ConnectionLost) -> None:
        """The connection is gone: every pull fails now. Of those that are under way, `keep` is held until all READs
        have come back, which on a device that has failed they never do."""
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
