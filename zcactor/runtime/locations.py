"""Where the bytes of an object can be had: at its owner, and wherever somebody has a copy.

Processes that cannot map the owner's arena pull the bytes. A pulled copy is an object of the reader's own, and as good
as the first: so who comes next is sent to it, and an array that goes to many hosts goes down a tree. The owner decides,
one object at a time, because it knows who asked (`Spread`, and `Origins`, which answers for it). A reader asks, takes
the bytes from where it is told, and tells when it has them (`Locations`). What a location may answer is its own affair:
it gives a lease, as any owner does, or says that the copy is gone.

That readers serve as sources while the owner keeps the directory is Hoplite's idea (Zhuang et al., "Hoplite: Efficient
and Fault-Tolerant Collective Communication for Task-Based Distributed Systems", SIGCOMM 2021).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

from zcactor.errors import ObjectLost, OutOfMemory, ZcactorError
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind, check_bounds
from zcactor.rpc.parts import Part
from zcactor.runtime.nodes import machine_of
from zcactor.transport.base import RemoteRegion

if TYPE_CHECKING:
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.objectstore.store import Block
    from zcactor.rpc.session import Session
    from zcactor.runtime.process import Process

__all__ = [
    "AT_ONCE", "LOCATED_NBYTES", "LOCATED_READ_NBYTES", "OWNER", "Copy", "Locations", "LostPart", "Origins", "Spread",
    "own_machine",
]  # fmt: skip

LOCATED_NBYTES: Final = 1 << 20
"""Bytes from which on a reader asks where to take an object from. The question costs a round trip, about 60 us; TCP at
10 Gbit/s takes 900 us for so many bytes. Smaller objects would be delayed by more than they can gain."""
LOCATED_READ_NBYTES: Final = 256 << 20
"""The same by RDMA, which at 100 Gbit/s brings 1 MiB in 90 us, and this in 20 ms: below, the question would be seen. So
an array that a loop passes at each step takes a frame each way and the READs, and nothing else."""
AT_ONCE: Final = 2
"""Transfers of one object that run from one place. With one, a tree of N readers is N deep where a reader is slow; with
two it is about log2 N deep, and each gets half of a link."""
MAX_COPIES: Final = 1024
"""Copies of one object that its owner remembers: every one of so many hosts."""
MAX_VIEWS: Final = 64
"""Different stretches of one object that are kept apart; further ones are pulled from the owner."""
MAX_WAITING: Final = 512
"""Questions that wait for their answer in one process. The actor that answers has 1,000 calls open at most, and that
a transfer has ended is told by such a call, too."""
PATIENCE: Final = 60.0
"""Seconds that a question waits: as long as a data socket may be silent (`zcactor.transport.tcp_data.PATIENCE`). After
that whoever holds the others up hangs, and the owner serves once more."""
ATTEMPTS: Final = 4
"""How many locations a reader tries before it takes the bytes from the owner whatever that costs."""


class LostPart:
    """Stands for an object whose owner is gone; using it raises `ObjectLost`."""

    __slots__ = ("_error", "reason")

    def __init__(self, reason: str, error: ZcactorError | None = None) -> None:
        self.reason = reason
        self._error = error

    def raise_error(self) -> NoReturn:
        """Raise why it is lost: `ObjectLost`, or the error that it was given."""
        raise ObjectLost(self.reason) if self._error is None else self._error.with_traceback(None)

    @property
    def __array_interface__(self) -> Any:
        self.raise_error()

    def grant(self, _: Any) -> tuple[bytes, int, int]:
        """There is nothing to pass on."""
        self.raise_error()


def own_machine(config: Config, directory: Path) -> str:
    """What `Process.machine` is: the name of the host, where processes in the run directory `directory` prefer to map
    each other's arenas; empty where they do not."""
    return machine_of(directory) if config.transports.startswith("local") else ""


# ---------------------------------------------------------------- the owner's side


class Copy(NamedTuple):
    """A place where all bytes of an object are."""

    process: bytes
    """Its process id; empty for the owner's own object."""
    id: int
    """Of the object there."""
    offset: int
    """Bytes from the start of the arena there."""
    machine: str
    """See `Process.machine`."""


OWNER: Final = Copy(b"", 0, 0, "")


class Spread:
    """Who takes the bytes of one object from where: the decisions of its owner, without any I/O.

    A reader that asks waits until `decide` has a place for it: a copy on its own machine, which it maps; else one from
    which fewer than `AT_ONCE` transfers run. The owner itself counts as such a place for the first `AT_ONCE` transfers,
    and after those only while there is no copy. Of readers on one machine one transfers, and the others wait for it.

    Attributes:
        copies: by process.
        running: of each reader that transfers, where from, and its machine.
        waiting: the machine of each reader that has no place yet, in the order in which they asked.
        direct: transfers from the owner, ever.
    """

    def __init__(self) -> None:
        self.copies: dict[bytes, Copy] = {}
        self.running: dict[bytes, tuple[Copy, str]] = {}
        self.waiting: dict[bytes, str] = {}
        self.direct = 0

    def ask(self, reader: bytes, machine: str) -> None:
        """A reader wants the bytes. It has none, whatever was known of it, and transfers nothing."""
        self.left(reader)
        self.waiting[reader] = machine

    def decide(self) -> list[tuple[bytes, Copy]]:
        """Those of the readers that wait no longer, and where each takes the bytes from."""
        load = Counter(copy.process for copy, _ in self.running.values())
        coming = {machine for _, machine in self.running.values()}
        near = {copy.machine: copy for copy in self.copies.values()}
        decided = []
        place: Copy | None = OWNER
        for reader, machine in list(self.waiting.items()):
            found = near.get(machine) if machine else None
            if found is None:
                if place is None or (machine and machine in coming):
                    continue
                found = place = self._place(load)
                if found is None:
                    continue
                load[found.process] += 1
                coming.add(machine)
                self.running[reader] = found, machine
                self.direct += found is OWNER
            del self.waiting[reader]
            decided.append((reader, found))
        return decided

    def _place(self, load: Counter[bytes]) -> Copy | None:
        if load[OWNER.process] < AT_ONCE and (self.direct < AT_ONCE or not self.copies):
            return OWNER
        copy = min(self.copies.values(), key=lambda copy: load[copy.process], default=None)
        return copy if copy is not None and load[copy.process] < AT_ONCE else None

    def ended(self, reader: bytes, copy: Copy | None) -> None:
        """The transfer of a reader is over, and it has a copy now, or it has not."""
        self.running.pop(reader, None)
        if copy is not None:
            self.copies[reader] = copy
            if len(self.copies) > MAX_COPIES:
                del self.copies[next(iter(self.copies))]

    def gone(self, process: bytes) -> None:
        """There is no copy at a process any more, or it cannot be reached."""
        self.copies.pop(process, None)

    def knows(self, process: bytes) -> bool:
        """Whether it matters here that a process is gone."""
        return process in self.copies or process in self.running or process in self.waiting

    def left(self, process: bytes) -> None:
        """Nothing is known of a process any more, and it wants nothing."""
        self.copies.pop(process, None)
        self.running.pop(process, None)
        self.waiting.pop(process, None)


class _Asked:
    """A `Spread`, and those who wait for its decisions."""

    __slots__ = ("answers", "spread")

    def __init__(self) -> None:
        self.spread = Spread()
        self.answers: dict[bytes, asyncio.Future[Copy]] = {}

    def decide(self) -> None:
        again = True
        while again:
            again = False
            for reader, copy in self.spread.decide():
                answer = self.answers.pop(reader)
                if answer.done():  # its task was cancelled
                    self.spread.left(reader)
                    again = True
                else:
                    answer.set_result(copy)

    def drop(self, reader: bytes) -> None:
        """It is gone, or waits no longer."""
        answer = self.answers.pop(reader, None)
        if answer is not None and not answer.done():
            answer.set_result(OWNER)
        if self.spread.knows(reader):
            self.spread.left(reader)
            self.decide()


class Origins:
    """The objects of one process that others take from each other. On the loop's thread.

    What is known of an object goes with it.
    """

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[Block, dict[tuple[int, int], _Asked]] = WeakKeyDictionary()
        self._waiting = 0

    def spread(self, block: Block, offset: int, nbytes: int) -> Spread | None:
        """What is known of these bytes of an object; None where nobody has asked."""
        asked = self._asked.get(block, {}).get((offset, nbytes))
        return None if asked is None else asked.spread

    async def source(
        self, reader: bytes, block: Block, offset: int, nbytes: int, machine: str, failed: bytes = b""
    ) -> Copy:
        """Where a reader is to take bytes of an object from; answered when it can begin. Cancelling it is as if the
        reader had not asked.

        Args:
            reader: its process id. It holds a lease on the object.
            block: the object.
            offset: bytes from the start of the arena.
            nbytes: of what it reads.
            machine: the reader's.
            failed: the process that it was sent to before and got nothing from.
        """
        stretches = self._asked.setdefault(block, {})
        asked = stretches.get((offset, nbytes))
        if asked is None:
            if len(stretches) >= MAX_VIEWS:
                return OWNER
            asked = stretches[offset, nbytes] = _Asked()
        asked.spread.gone(failed)
        asked.drop(reader)  # who asks again has given up what it asked before
        answer: asyncio.Future[Copy] = asyncio.get_running_loop().create_future()
        asked.answers[reader] = answer
        asked.spread.ask(reader, machine)
        asked.decide()
        if not answer.done() and self._waiting >= MAX_WAITING:
            asked.drop(reader)
        if answer.done():
            return answer.result()
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            return OWNER
        finally:
            self._waiting -= 1
            if asked.answers.get(reader) is answer:  # it was not answered
                asked.drop(reader)

    def ended(
        self, reader: bytes, block: Block, offset: int, nbytes: int, copy: Copy | None, failed: bytes = b""
    ) -> None:
        """The transfer of a reader is over.

        Args:
            reader, block, offset, nbytes, failed: as in `source`.
            copy: what the reader has now, if it has.
        """
        asked = self._asked.get(block, {}).get((offset, nbytes))
        if asked is not None:
            asked.spread.gone(failed)
            asked.spread.ended(reader, copy)
            asked.decide()

    def left(self, process: bytes) -> None:
        """A peer is gone, or has to connect anew."""
        if self._asked:
            for stretches in list(self._asked.values()):
                for asked in stretches.values():
                    asked.drop(process)


# ---------------------------------------------------------------- the reader's side

_Key = tuple[bytes, int, int, int]


class _Near:
    """Kept by a `Lease` whose bytes are mapped from a copy: the lease on the copy, and that on the object itself."""

    __slots__ = ("copy", "lease")

    def __init__(self, lease: RemoteLease, copy: Lease) -> None:
        self.lease = lease
        self.copy = copy


def _returned(_: int) -> None:
    """What a `_Near` keeps is returned by itself."""


class Locations:
    """Brings the bytes of objects that cannot be mapped, each once: who wants them while they come waits for the same
    transfer, and who wants them later is given what has come, for as long as anybody here has it. On the loop's thread.

    Arrays that were moved to us take no part: each is somebody's to write to.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._here: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Part]] = {}

    def remote(self, session: Session, region: Region) -> Part:
        """The part for an object of the peer of `session`, which has granted us the lease: bytes to be read, or to be
        passed on as they are.

        Raises:
            ProtocolError: they do not lie in the peer's arena.
        """
        kind, owner, object_id, offset, nbytes, _, seal, rkey = region
        check_bounds(region, session.connection.peer.arena_nbytes)
        return Part(kind, RemoteLease(owner, object_id, offset, nbytes, session, seal, rkey), offset, nbytes)

    def known(self, region: Region) -> Part | None:
        """The part for an object whose bytes have come before and are still here."""
        kind, owner, object_id, offset, nbytes, *_ = region
        if kind != RegionKind.ARRAY:
            return None
        holder = self._here.get((owner, object_id, offset, nbytes))
        return None if holder is None else Part(kind, holder, holder.offset, nbytes)

    def bring(self, part: Part) -> Part | asyncio.Task[Part]:
        """`part` itself, unless it is a lease on bytes elsewhere: then the part that has them here, or a task that gets
        them. The task belongs to all who want them, and does not raise: what cannot be had is a `LostPart`. A lease
        ends with the last part that has it."""
        lease = part.holder
        if type(lease) is not RemoteLease:
            return part
        if part.kind != RegionKind.ARRAY:
            return self._process.begin(self._bring(part))
        key = lease.owner, lease.id, part.offset, part.nbytes
        holder = self._here.get(key)
        if holder is not None:
            return Part(part.kind, holder, holder.offset, part.nbytes)
        task = self._coming.get(key)
        if task is None:
            task = self._coming[key] = self._process.begin(self._bring(part))
            task.add_done_callback(partial(self._arrived, key))
        return task

    async def read(self, part: Part) -> Part:
        """The same, when it is here. Cancelling it leaves the transfer to others, and to those who come."""
        found = self.bring(part)
        del part
        if isinstance(found, Part):
            return found
        await asyncio.wait((found,))
        return found.result()

    def _arrived(self, key: _Key, task: asyncio.Task[Part]) -> None:
        del self._coming[key]
        if not task.cancelled() and task.exception() is None:
            holder = task.result().holder
            if type(holder) is not LostPart:
                self._here[key] = holder

    async def _bring(self, part: Part) -> Part:
        kind, lease, _, nbytes = part
        try:
            least = LOCATED_READ_NBYTES if lease.session.connection.kind == "verbs" else LOCATED_NBYTES
            if kind == RegionKind.ARRAY and nbytes >= least:
                holder = await self._from_anywhere(lease)
            else:
                holder = await self._pull(kind, lease.owner, lease)
        except OutOfMemory as error:
            return Part(kind, LostPart(f"there is no room for it here: {error}", error.with_traceback(None)), 0, 0)
        except (ZcactorError, OSError) as error:
            return Part(kind, LostPart(f"it could not be brought here: {error}"), 0, 0)
        return Part(kind, holder, holder.offset, nbytes)

    async def _pull(self, kind: int, owner: bytes, lease: RemoteLease) -> Block:
        """An object of ours with the bytes of a lease, which is on one of the process `owner` or on a copy of it."""
        process, connection, nbytes = self._process, lease.session.connection, lease.nbytes
        block = process.placements.take(owner, nbytes)
        wanted = RemoteRegion(lease.id, lease.offset, nbytes, lease.seal, lease.rkey)
        await connection.pull(wanted, block.address, block)
        if connection.kind == "verbs":
            process.counters.bytes_read += nbytes
        else:
            process.counters.bytes_received += nbytes
        block.sealed = kind != RegionKind.MOVED
        return block

    async def _from_anywhere(self, lease: RemoteLease) -> Block | Lease:
        """The bytes from where their owner says; from the owner itself where that leads nowhere."""
        process, failed = self._process, b""
        for _ in range(ATTEMPTS):
            try:
                place, object_id, offset = await process.ask(
                    lease.session, "source", lease.id, lease.offset, lease.nbytes, process.machine, failed
                )
            except ZcactorError:  # the owner is gone, or has no such object: pulling from it says so
                break
            failed = b""
            if not place:
                break
            try:
                return await self._from_copy(lease, Region(RegionKind.ARRAY, place, object_id, offset, lease.nbytes, 0))
            except OutOfMemory:
                self._tell(lease, None)
                raise
            except (ZcactorError, OSError):
                failed = place
        if failed:
            self._tell(lease, None, failed)
        try:
            block = await self._pull(RegionKind.ARRAY, lease.owner, lease)
        except (ZcactorError, OSError):
            self._tell(lease, None)
            raise
        self._tell(lease, block)
        return block

    async def _from_copy(self, lease: RemoteLease, region: Region) -> Block | Lease:
        process = self._process
        session = await process.connect(region.owner)
        if not await process.ask(session, "lease", region.id):
            raise ObjectLost(f"process {region.owner.hex()[:8]} has no copy of it any more")
        connection = session.connection
        if not connection.maps:
            block = await self._pull(RegionKind.ARRAY, lease.owner, self.remote(session, region).holder)
            self._tell(lease, block)
            return block
        check_bounds(region, connection.peer.arena_nbytes)
        address = connection.map(region.offset, region.nbytes)
        copy = Lease(
            region.owner, region.id, region.offset, region.nbytes, address, connection.mapping, session.release
        )  # fmt: skip
        # It stands for the owner's object: when the process with the copy is gone it can be passed on all the same.
        return Lease(lease.owner, lease.id, lease.offset, lease.nbytes, address, _Near(lease, copy), _returned)

    def _tell(self, lease: RemoteLease, block: Block | None, failed: bytes = b"") -> None:
        """Tell the owner that a transfer has ended, and how."""
        copy_id, copy_offset = 0, 0
        if block is not None:
            copy_id, copy_offset = self._process.store.export(block), block.offset
        facts = lease.id, lease.offset, lease.nbytes, copy_id, copy_offset, self._process.machine, failed
        self._process.start_task(self._told(lease.session, facts))

    async def _told(self, owner: Session, facts: tuple[Any, ...]) -> None:
        with contextlib.suppress(ZcactorError):  # it is gone, and what it knew with it
            await self._process.ask(owner, "located", *facts)
