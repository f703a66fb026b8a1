"""Objects whose owner has ended, made their own by those who hold them, so that they can be passed on.

A reference is passed on by the name of its owner, and whoever gets it leases the object there. Where that fails, it
asks the process that passed it on, whose pin holds the object still. That one copies the bytes, once, and answers with
an object of its own; the pin goes when that is leased.

One array that is still mapped keeps all of the memory of a process that has ended. So whoever holds such arrays copies
the pages that they lie in, in the background, and maps the copies in the place of the pages: the same bytes, at the
same addresses. Then it lets go of the rest. What was moved stays where it is, for it may be written to at any moment.
Once nobody else maps the file that it lies in, all else is punched out of that.

That work rests half of the time, until somebody waits for its copies: then it takes what it can get of the machine, and
they are passed on as soon as they are made, before the memory of the dead goes back to the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import threading
import time
from ctypes import memmove
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary, ref

from zcactor.buggify import dawdle
from zcactor.errors import ZcactorError
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.parallel import in_parallel
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part
from zcactor.runtime.locations import LostPart

if TYPE_CHECKING:
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Block, Store
    from zcactor.rpc.session import Session
    from zcactor.runtime.connections import Connections
    from zcactor.runtime.locations import Locations
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.tasks import Tasks
    from zcactor.transport.mapping import Mapping
    from zcactor.transport.os_process import OsProcess

__all__ = ["Adoptions"]

_REASON: Final = "owner ended"
_IN_THREAD_NBYTES: Final = 1 << 20
"""Bytes from which on a thread copies: 1 MiB keeps the loop for up to 0.3 ms."""

_STEP_NBYTES: Final = 4 << 20
"""Bytes copied between two rests, 1 ms: so long somebody who wants the copies waits until several threads make them."""
_ANSWER: Final = 0.01
"""Seconds in which an answer leaves that has waited for the copies: mapping them takes milliseconds, and no page of the
process can be touched for the first time meanwhile."""
_SHARE_NBYTES: Final = 4 << 20
"""Bytes that one of several threads copies at a time: 1 ms, next to which taking a share is nothing."""
_DELAY: Final = 1.0
"""Seconds that an owner may keep memory after a connection's end for the sake of frames saved."""
_RETRY: Final = 1.0
"""Seconds until the next attempt to watch a process for which no descriptor was left."""

logger = logging.getLogger("zcactor")
_Key = tuple[bytes, int, int, int]


class _Taking:
    """A thread's work on one mapping. Made on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.copied: asyncio.Future[None] = loop.create_future()
        """Done when all is copied, or nothing will be."""
        self.wanted = threading.Event()
        """Set when somebody waits for the copies."""

    def set_copied(self) -> None:
        """Idempotent. On the loop's thread."""
        if not self.copied.done():
            self.copied.set_result(None)

    def copy(self, to: int, low: int, nbytes: int) -> None:
        """In the thread: copy, and rest as long as that took, since the process has other work."""
        at = 0
        while at < nbytes and not self.wanted.is_set():
            begun = time.monotonic()
            step = min(_STEP_NBYTES, nbytes - at)
            memmove(to + at, low + at, step)
            at += step
            self.wanted.wait(time.monotonic() - begun)
        if at < nbytes:
            _copy_fast(to + at, low + at, nbytes - at)


class Adoptions:
    """What one process has made its own. On the loop's thread.

    Args:
        tasks: of the process.
        connections: to those of whose objects something is held.
        requests: tell them what.
        store: where copies lie.
        copies: are counted.
        locations: bring bytes that cannot be mapped.
    """

    def __init__(
        self, tasks: Tasks, connections: Connections, requests: Requests, store: Store, copies: CopyCounter,
        locations: Locations,
    ) -> None:  # fmt: skip
        self.count = 0
        """Objects adopted, ever."""
        self._tasks = tasks
        self._connections = connections
        self._requests = requests
        self._store = store
        self._copies = copies
        self._locations = locations
        self._watched: dict[bytes, int] = {}  # pidfds by peer
        self._taking: dict[Mapping, _Taking] = {}
        """Those that a thread replaces the pages of."""
        self._outlived: dict[bytes, dict[int, tuple[ref[Mapping], ...]]] = {}
        """By peer and by number of a connection that has ended: what was mapped by it, read-only and then writable."""
        self._moved: dict[bytes, list[ref[Mapping]]] = {}
        """By peer that is gone: the writable mappings of its memory."""
        self._late: set[bytes] = set()
        self._out_of_room = False
        self._made: WeakValueDictionary[_Key, Block] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Block]] = {}

    def left(self, session: Session, another: Session | None) -> None:
        """A connection has ended. Nothing more is mapped by it, and what is leased from its peer is taken over as soon
        as that is gone, and can neither write to its memory nor give it to others. As long as the peer lives it keeps
        all that it has leased by the connection, until it is told what is still held.

        Args:
            session: which has ended.
            another: with the same peer, if there is one.
        """
        connection = session.connection
        mapping, owner = connection.mapping, connection.reader
        if mapping is None or owner is None:
            return
        both = tuple(ref(each) for each in (mapping, connection.writable_mapping) if each is not None)
        connection.mapping = connection.writable_mapping = None  # what points into them keeps them
        self._outlived.setdefault(session.peer_process, {})[session.number] = both
        if another is not None:
            self.met(another)
        self._watch(session.peer_process, owner)

    def met(self, session: Session) -> None:
        """There is a connection to a peer: it is told what we hold of what it had leased by others."""
        if session.peer_process in self._outlived:
            self._tasks.start(self._tell(session))

    def let_go(self, peer: bytes) -> None:
        """Something that a peer had leased by a connection that has ended is not held any more."""
        if not self._tasks.closing and (peer in self._outlived or peer in self._moved) and peer not in self._late:
            self._late.add(peer)
            self._tasks.loop.call_later(_DELAY, lambda: self._tasks.start(self._tell_again(peer)))

    async def _tell_again(self, peer: bytes) -> None:
        self._late.discard(peer)
        if peer in self._moved:
            await self._punch(peer)
        elif peer in self._outlived:
            with contextlib.suppress(ZcactorError):  # it has ended, and keeps nothing
                await self._tell(await self._connections.connect(peer))

    async def _tell(self, session: Session) -> None:
        peer = session.peer_process
        outlived = self._outlived.get(peer, {})
        ended = list(outlived)
        done = [number for number in ended if not any(_leases_of(each()) for each in outlived[number])]
        held = {lease.id for mappings in outlived.values() for each in mappings for lease in _leases_of(each())}
        await dawdle("hold")
        try:
            await self._requests.ask(session, "hold", ended, sorted(held))
        except ZcactorError:  # lost again: the next connection tells
            return
        for number in done:
            outlived.pop(number, None)
        if not outlived:
            self._outlived.pop(peer, None)
            self._unwatch(peer)

    def _watch(self, peer: bytes, owner: OsProcess) -> None:
        if self._tasks.closing or not owner.pid or peer in self._watched or peer not in self._outlived:
            return
        try:
            fd = owner.open()
        except OSError:  # no descriptor is left
            self._tasks.loop.call_later(_RETRY, self._watch, peer, owner)
            return
        if fd is None:
            self._gone(peer, owner)
        else:
            self._watched[peer] = fd
            self._tasks.loop.add_reader(fd, self._gone, peer, owner)

    def _unwatch(self, peer: bytes) -> None:
        fd = self._watched.pop(peer, None)
        if fd is not None:
            self._tasks.loop.remove_reader(fd)
            os.close(fd)

    def _gone(self, peer: bytes, owner: OsProcess) -> None:
        self._unwatch(peer)
        for mapping, *writable in self._outlived.pop(peer, {}).values():
            found = mapping()
            if found is not None and found.leases:
                self._tasks.start(self._take_over(found, owner))
            if writable:
                self._moved.setdefault(peer, []).extend(writable)
        if peer in self._moved:
            self._tasks.start(self._punch(peer))

    async def _punch(self, peer: bytes) -> None:
        """Punch what is not held out of the memory of a peer that is gone, as soon as nobody else maps it."""
        left = [mapping for each in self._moved.get(peer, ()) if (mapping := each()) is not None and mapping.leases]
        if not left:
            self._moved.pop(peer, None)
        elif all(mapping.is_the_only_one() for mapping in left):
            await asyncio.to_thread(_punch_others, left)
        else:
            self._tasks.loop.call_later(_RETRY, self._punch_again, peer)

    def _punch_again(self, peer: bytes) -> None:
        if not self._tasks.closing:
            self._tasks.start(self._punch(peer))

    async def _take_over(self, mapping: Mapping, owner: OsProcess) -> None:
        if self._coming:  # nothing is copied twice
            await asyncio.wait(list(self._coming.values()))
        found = [lease for lease in _leases_of(mapping) if lease.nbytes]
        if found:
            taking = self._taking[mapping] = _Taking(self._tasks.loop)
            work = threading.Thread(target=self._work, args=(mapping, owner, found, taking), name="zcactor-adopting")
            work.daemon = True
            work.start()

    def _work(self, mapping: Mapping, owner: OsProcess, leases: list[Lease], taking: _Taking) -> None:
        """In a thread: all of it or, where there is no room, nothing."""
        loop, runs = self._tasks.loop, _runs(leases)
        try:
            blocks = self._copy_runs(mapping, owner, runs, taking)
            if blocks is not None:
                count = self._name(runs, blocks)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._copied, count, taking)
                if taking.wanted.is_set():
                    time.sleep(_ANSWER)
                self._replace(mapping, owner, runs, blocks)
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._taken_over, mapping, taking)

    def _copied(self, count: int, taking: _Taking) -> None:
        """Counted before anybody gets one of them, so that a look at the counts afterwards finds them."""
        self.count += count
        taking.set_copied()

    def _taken_over(self, mapping: Mapping, taking: _Taking) -> None:
        del self._taking[mapping]
        taking.set_copied()

    def _copy_runs(self, mapping: Mapping, owner: OsProcess, runs: list[_Run], taking: _Taking) -> list[Block] | None:
        """Blocks with the bytes of `runs`; None where there is no room."""
        store = self._store
        try:
            blocks = [_same_pages(run) or store.allocate(run.nbytes, mmap.PAGESIZE) for run in runs]
        except ZcactorError as error:
            if not self._out_of_room:
                self._out_of_room = True
                logger.warning(
                    "the memory of process %d, which has ended, stays as long as arrays of it are held here: %s",
                    owner.pid, error,
                )  # fmt: skip
            return None
        for run, block in zip(runs, blocks, strict=True):
            if not block.sealed:
                taking.copy(block.address, mapping.address + run.low, run.nbytes)
                self._copies.count(_REASON, run.nbytes)
                block.sealed = True
        return blocks

    @staticmethod
    def _name(runs: list[_Run], blocks: list[Block]) -> int:
        """Say of each lease what is passed on in its place; how many objects are ours now that were not before."""
        adopted = set()
        for run, block in zip(runs, blocks, strict=True):
            for lease in run.leases:
                if lease.adopted is None:
                    adopted.add((lease.id, lease.offset, lease.nbytes))
                    lease.adopted = block, block.offset + lease.offset - run.low
        return len(adopted)

    def _replace(self, mapping: Mapping, owner: OsProcess, runs: list[_Run], blocks: list[Block]) -> None:
        """Map the blocks in the place of what was copied, and let go of the rest."""
        fd = self._store.arena.fd
        try:
            for run, block in zip(runs, blocks, strict=True):
                for lease in run.leases:
                    lease.pages = block  # before anything is mapped from it
                mapping.replace(run.low, run.nbytes, fd, block.offset)
            mapping.give_up([(run.low, run.nbytes) for run in runs])
        except OSError as error:  # the store was closed, or there are too many mappings: what is there is right
            logger.debug("the memory of process %d, which has ended, stays: %s", owner.pid, error)

    def close(self) -> None:
        """Take nothing over any more. Idempotent."""
        for peer in list(self._watched):
            self._unwatch(peer)

    async def adopt(self, lease: Lease | RemoteLease, kind: int) -> tuple[Block, int]:
        """An object of ours with the bytes of `lease`, and their offset in our arena.

        What is only read is copied once for as long as anybody here holds the lease; what was moved to us, and is moved
        on, each time: it is somebody's to write to. Bytes that cannot be mapped are pulled: some may reach an owner
        whom others do not.

        Args:
            lease: on an object that its owner does not lease to others any more.
            kind: a `RegionKind`.

        Raises:
            OutOfMemory: the store has no room for it.
            ObjectLost: its bytes cannot be mapped, and were not pulled as long as that was possible.
        """
        if isinstance(lease, RemoteLease):
            # Authenticated in any case: whoever asks may want them for a pickle, and knows of this transfer nothing.
            part = await self._locations.read(Part(kind, lease, lease.offset, lease.nbytes, authenticate=1))
            if isinstance(part.holder, LostPart):
                part.holder.raise_error()
            if not isinstance(part.holder, Lease):
                return part.holder, part.offset
            lease = part.holder
        if kind == RegionKind.MOVED:
            block = await self._copy(lease)
            return block, block.offset + lease.address % mmap.PAGESIZE
        taking = self._taking.get(lease.mapping)
        if taking is not None:
            taking.wanted.set()
            await asyncio.shield(taking.copied)
        if lease.adopted is None:
            key = lease.owner, lease.id, lease.offset, lease.nbytes
            found = self._made.get(key)
            if found is None:
                task = self._coming.get(key)
                if task is None:
                    task = self._coming[key] = self._tasks.begin(self._copy(lease))
                    task.add_done_callback(partial(self._arrived, key))
                found = self._made[key] = await asyncio.shield(task)
                found.sealed = True
            lease.adopted = found, found.offset + lease.address % mmap.PAGESIZE
        return lease.adopted

    def _arrived(self, key: _Key, _: object) -> None:
        del self._coming[key]

    async def _copy(self, lease: Lease) -> Block:
        """The pages that a lease lies in, in a block that begins at a page: the bytes lie in theirs as they did."""
        low = lease.address - lease.address % mmap.PAGESIZE
        nbytes = -(-(lease.address + lease.nbytes - low) // mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._store.allocate(nbytes, mmap.PAGESIZE)
        if nbytes < _IN_THREAD_NBYTES:
            memmove(block.address, low, nbytes)
        else:
            await self._tasks.loop.run_in_executor(None, _copy_pages, block, lease, low, nbytes)
        self._copies.count(_REASON, nbytes)
        self.count += 1
        return block


def _leases_of(mapping: Mapping | None) -> list[Lease]:
    """What lives of what points into a mapping. One that is being lost on another thread may be among them."""
    found = () if mapping is None else [seen() for seen in mapping.leases.copy().values()]
    return [lease for lease in found if lease is not None]


def _punch_others(mappings: list[Mapping]) -> None:
    """Give back all that is not leased."""
    for mapping in mappings:
        try:
            mapping.punch([(run.low, run.nbytes) for run in _runs(_leases_of(mapping))])
        except OSError as error:
            logger.debug("memory of a process that has ended stays: %s", error)


class _Run(NamedTuple):
    """Pages of a mapping that follow each other, and what lies in them."""

    low: int
    """Bytes from the start."""
    nbytes: int
    leases: list[Lease]


def _runs(leases: list[Lease]) -> list[_Run]:
    """The pages that leases lie in, in order. Those that share a page are in one run."""
    runs: list[_Run] = []
    for lease in sorted(leases, key=attrgetter("offset")):
        low = lease.offset - lease.offset % mmap.PAGESIZE
        high = -(-(lease.offset + lease.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = runs[-1] if runs else None
        if last is not None and low < last.low + last.nbytes:
            last.leases.append(lease)
            runs[-1] = last._replace(nbytes=max(last.nbytes, high - last.low))
        else:
            runs.append(_Run(low, high - low, [lease]))
    return runs


def _same_pages(run: _Run) -> Block | None:
    """The block that has all of the pages already, because what lies in them was adopted when it was passed on."""
    found = {lease.adopted for lease in run.leases}
    if len(found) != 1 or (adopted := found.pop()) is None:
        return None
    block, offset = adopted
    return block if (block.nbytes, offset - block.offset) == (run.nbytes, run.leases[0].offset - run.low) else None


def _copy_fast(to: int, low: int, nbytes: int) -> None:
    """Copy in several threads where it is much. Pages of the dead that were not read here yet fault, which takes as
    long as their copy. Each thread takes the next share when it is done with one: one may get less of the machine."""
    shares = iter(range(0, nbytes, _SHARE_NBYTES))

    def take(_start: int, _stop: int) -> None:
        for at in shares:
            memmove(to + at, low + at, min(_SHARE_NBYTES, nbytes - at))

    in_parallel(take, nbytes)


def _copy_pages(block: Block, lease: Lease, low: int, nbytes: int) -> None:
    """Copy `nbytes` from the address `low`, which `lease` keeps, also when nobody waits for it any more."""
    _copy_fast(block.address, low, nbytes)
    del lease
