"""The reading half of a bulk queue pair: objects of the peer's arena come by RDMA READ.

Each pull is cut into pieces, and the pieces are posted in lists of which only the last asks for a completion. Several
pulls take turns, so that a small one never waits for a large one. Behind its last piece a pull READs the object's seal
(`zcactor.transport.verbs.seals`) and compares it.

A READ that fails puts both ends' queue pairs into ERR, and everything that was queued comes back as flushed. Then the
pair is connected anew (`zcactor.transport.verbs.connection`), the pull at fault fails, and the others are repeated.
Memory that READs may still write to is kept until every completion has come, whoever has stopped waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.verbs.base import MAX_U32, MAX_U64, CompletionStatus, Read, describe_status
from zcactor.transport.verbs.seals import SEAL_NBYTES, read_seal

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.base import RemoteRegion
    from zcactor.transport.verbs.base import Completion, QueuePair
    from zcactor.transport.verbs.slots import SlotArea

__all__ = ["MAX_READS", "PIECE_NBYTES", "Pull", "Puller", "pieces_of"]

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

READ_ID: Final = 1 << 61
"""Bit of the ``wr_id`` of READs; the low bits are the number of the list."""
LAST: Final = 1 << 62
"""Bit of that of the last one of a list."""


def pieces_of(nbytes: int, piece: int) -> int:
    """READs that `nbytes` take."""
    return -(-nbytes // piece)


@dataclass(slots=True, eq=False)
class Pull:
    """One object on its way."""

    region: RemoteRegion
    address: int
    lkey: int
    keep: object
    """What keeps the memory at `address`."""
    done: asyncio.Future[None]
    posted: int = 0
    """Bytes whose READs have been posted."""
    seal_slot: int = -1
    lists: int = 0
    """Lists posted whose completions have not come."""
    fault: int = 0
    """The first status that was none of success and flush."""
    flushed: bool = False
    """Some READ was flushed for another's fault."""
    attempts: int = 1
    abandoned: bool = False
    """Nobody waits for it any more."""
    reads: int = field(default=0)
    """Requests posted, seals not counted."""


class Puller:
    """All pulls from one peer. On the loop's thread.

    Args:
        qp: the bulk queue pair, which takes `MAX_READS` requests.
        seal_area: slots for seals, at least `MAX_READS` of them.
        piece: bytes of one READ.
        arena_address: where the peer's arena begins, in the peer.
        seals: address, rkey and number of entries of the peer's table.
        broken: called once when the queue pair has failed; all is fenced and drained when `drained` is True.
    """

    def __init__(
        self,
        qp: QueuePair,
        seal_area: SlotArea,
        piece: int,
        arena_address: int,
        seals: tuple[int, int, int],
        broken: Callable[[], None],
    ) -> None:
        self.reads = 0
        """READs posted for objects so far."""
        self.up = False
        """Whether requests may be posted: both ends are connected."""
        self._qp = qp
        self._area = seal_area
        self._piece = piece
        self._arena_address = arena_address
        self._seals = seals
        self._broken = broken
        self._free_seals = list(range(seal_area.count))
        self._ready: deque[Pull] = deque()  # with something left to post
        self._lists: deque[tuple[Pull, int, int]] = deque()  # posted, in order: pull, requests, number of the list
        self._under_way = 0  # requests in the queue pair
        self._next = 0
        self._failed = False
        self._lost: ConnectionLost | None = None

    @property
    def drained(self) -> bool:
        """Whether nothing is under way, so that no memory is written to any more."""
        return not self._lists

    async def pull(self, region: RemoteRegion, address: int, lkey: int, keep: object) -> None:
        """Bring `region` to `address`, which lies in a region with `lkey`.

        Cancelling stops waiting; `keep` is held until the last READ that was posted has ended.

        Raises:
            ObjectLost: the peer has no such memory under that rkey, or there lies another object by now.
            ConnectionLost: `lose` was called.
            ProtocolError: `region`, or what the peer has said about its arena and seals, leaves the address space.
        """
        if self._lost is not None:
            raise self._again(self._lost)
        self._check(region)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pull = Pull(region, address, lkey, keep, future)
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

    def _check(self, region: RemoteRegion) -> None:
        """What no request can carry would be refused when it is posted, in the middle of others' requests."""
        address, rkey, entries = self._seals
        inside = self._arena_address + region.offset + region.nbytes <= MAX_U64
        sealed = region.seal < entries and address + entries * SEAL_NBYTES <= MAX_U64 and rkey <= MAX_U32
        if not inside or region.rkey > MAX_U32 or (region.seal and not sealed):
            raise ProtocolError(
                f"the peer named {region.nbytes} bytes at {region.offset} of its arena at {self._arena_address:#x}, "
                f"with rkey {region.rkey:#x} and seal {region.seal} of {entries} at {address:#x}: nothing can lie there"
            )

    def pump(self) -> None:
        """Post what there is room for, a list of each pull in turn."""
        while self.up and self._ready and self._under_way + LIST_READS + 1 <= MAX_READS:
            pull = self._ready.popleft()
            if pull.abandoned:  # finished already, or by `_ended` once its lists have come back
                continue
            reads = self._next_list(pull)
            try:
                self._qp.post_reads(reads)
            except OSError:  # the queue pair is in no state to take requests: its failure has not been polled yet
                self._lists.pop()
                self._under_way -= len(reads)
                pull.lists -= 1
                pull.fault = pull.fault or CompletionStatus.GENERAL
                if pull.lists == 0:
                    self._ended(pull)
                self._fail()
                return
            if pull.posted < pull.region.nbytes:
                self._ready.append(pull)

    def _next_list(self, pull: Pull) -> list[Read]:
        region, at = pull.region, pull.posted
        reads: list[Read] = []
        self._next += 1
        number = READ_ID | self._next
        source = self._arena_address + region.offset
        while at < region.nbytes and len(reads) < LIST_READS:
            nbytes = min(self._piece, region.nbytes - at)
            reads.append(Read(number, pull.address + at, nbytes, pull.lkey, source + at, region.rkey, signalled=False))
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
        self._lists.append((pull, len(reads), number))
        return reads

    def completed(self, completion: Completion) -> None:
        """A request has ended: the last of a list, or one that failed."""
        if not self._lists:
            return
        pull, count, number = self._lists[0]
        if completion.status != CompletionStatus.SUCCESS:
            if completion.status == CompletionStatus.WR_FLUSH:
                pull.flushed = True
            elif not pull.fault:
                pull.fault = completion.status
            self._fail()
        if completion.wr_id != number | LAST:
            return
        self._lists.popleft()
        self._under_way -= count
        pull.lists -= 1
        over = (
            pull.posted == pull.region.nbytes or pull.fault or pull.flushed or pull.abandoned or self._lost is not None
        )
        if pull.lists == 0 and over:
            self._ended(pull)
        if self._failed and not self._lists:
            self._broken()
        elif not self._failed:
            self.pump()

    def _fail(self) -> None:
        """The queue pair is in ERR, or is put there: everything in it comes back."""
        if not self._failed:
            self._failed = True
            self.up = False
            self._qp.to_error()
            if not self._lists:
                self._broken()

    def fence(self) -> None:
        """Let the peer read nothing more through this queue pair, and let everything queued come back.

        Raises:
            OSError: the device failed.
        """
        self.up = False
        self._failed = True
        self._qp.to_error()

    def resume(self) -> None:
        """The queue pair is connected again, and so is the peer's."""
        self._failed = False
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
            self._finish(pull, ObjectLost(self._told(pull, describe_status(pull.fault))))
        elif pull.fault and pull.attempts == _ATTEMPTS:
            what = f"{describe_status(pull.fault)}, {pull.attempts} times"
            self._finish(pull, ConnectionLost(self._told(pull, what)))
        else:  # others' faults do not count: each of them ends a pull, so there is an end to them
            self._free_seal(pull)
            pull.attempts += bool(pull.fault)
            pull.posted = pull.fault = 0
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

    def lose(self, error: ConnectionLost) -> None:
        """The connection is gone: every pull fails now. Of those that are under way, `keep` is held until all READs
        have come back, which on a device that has failed they never do."""
        self._lost = error
        self.up = False
        pulls = dict.fromkeys((*self._ready, *(pull for pull, _, _ in self._lists)))
        self._ready.clear()
        for pull in pulls:
            if pull.lists == 0:
                self._finish(pull, self._again(error))
            elif not pull.done.done():
                pull.done.set_exception(self._again(error))
