"""Adoption of objects whose owner has ended: a holder copies them, so that they can be passed on.

A reference is passed on by the id of its owner, and the receiver leases the object there. Where that fails, the
receiver asks the process that passed the reference on, whose pin still holds the object. That process copies the bytes,
once, and answers with an object of its own; the pin is released when that object is leased.

A single array that is still mapped keeps all memory of a process that has ended. So a holder of such arrays copies
their pages in the background, and maps the copies in the place of the pages: the same bytes, at the same addresses.
Then it unmaps the rest. Moved arrays stay where they are, because they may be written to at any moment. Once nobody
else maps the file that a moved array lies in, all other bytes are punched out of that file.

The copying rests half of the time, until somebody waits for the copies. Then it works at full speed, and the copies are
passed on as soon as they are made, before the memory of the ended process goes back to the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary, ref

from zcactor.api.passing import OwnRef, known_here
from zcactor.buggify import dawdle
from zcactor.errors import ObjectLost, ZcactorError
from zcactor.logs import logger
from zcactor.native import hot
from zcactor.objects.locations import LostPart
from zcactor.objectstore.bulk_copy import copy_in_bulk
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part
from zcactor.rpc.services import caller, remote
from zcactor.transport.mapping import Window

if TYPE_CHECKING:
    from zcactor.objects.locations import Locations
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Block, Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session
    from zcactor.transport.mapping import ArenaFile
    from zcactor.transport.os_process import OsProcess

__all__ = ["Adoptions"]

_REASON: Final = "owner ended"
_IN_THREAD_NBYTES: Final = 1 << 20
"""Bytes from which a thread copies: 1 MiB keeps the loop for up to 0.3 ms."""

_STEP_NBYTES: Final = 4 << 20
"""Bytes copied between two rests, which takes 1 ms: a caller that wants the copies waits as long, until several threads
make them."""
_ANSWER: Final = 0.01
"""Seconds in which an answer that has waited for the copies is sent. Mapping the copies takes milliseconds, in which no
page of the process can be touched for the first time."""
_DELAY: Final = 1.0
"""Seconds that an owner may keep memory after a connection's end, in order to save frames."""
_RETRY: Final = 1.0
"""Seconds until the next attempt to watch a process, after no descriptor was left for it."""

_Key = tuple[bytes, int, int, int]


class _Taking:
    """A thread's work on one mapping. The object is made on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.copied: asyncio.Future[None] = loop.create_future()
        """Done when all bytes are copied, or none will be."""
        self.wanted = threading.Event()
        """Set when a caller waits for the copies."""

    def set_copied(self) -> None:
        """Mark the copies as made. Idempotent. Called on the loop's thread."""
        if not self.copied.done():
            self.copied.set_result(None)

    def copy(self, to: int, low: int, nbytes: int) -> None:
        """Copy, and rest as long as each step took, because the process has other work. Called in the thread."""
        at = 0
        while at < nbytes and not self.wanted.is_set():
            begun = time.monotonic()
            step = min(_STEP_NBYTES, nbytes - at)
            hot.copy(to + at, low + at, step)
            at += step
            self.wanted.wait(time.monotonic() - begun)
        if at < nbytes:
            # Pages of the ended process that were not read here yet fault, which takes as long as their copy.
            copy_in_bulk(to + at, low + at, nbytes - at)


class Adoptions:
    """The objects that one process has adopted. Used on the loop's thread.

    Args:
        pid: of the process.
        tasks: the tasks of the process.
        sessions: with its peers.
        connections: connect to processes whose objects are held here.
        requests: report the held objects to them.
        store: the store for copies.
        copies: counts the copies.
        locations: bring bytes that cannot be mapped.
    """

    def __init__(
        self, pid: int, tasks: Tasks, sessions: Sessions, connections: Connections, requests: Requests, store: Store,
        copies: CopyCounter, locations: Locations,
    ) -> None:  # fmt: skip
        self.count = 0
        """Number of objects that were ever adopted."""
        self._pid = pid
        self._tasks = tasks
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._store = store
        self._copies = copies
        self._locations = locations
        self._watched: dict[bytes, int] = {}  # pidfds by peer
        self._taking: dict[ArenaFile, _Taking] = {}
        """Arenas whose pages a thread replaces."""
        self._outlived: dict[bytes, dict[int, tuple[ref[ArenaFile], ...]]] = {}
        """The arena as each ended connection had it open, read-only and then writable, by peer and by number of the
        connection."""
        self._moved: dict[bytes, list[ref[ArenaFile]]] = {}
        """The writable memory of each peer that has ended, by peer."""
        self._late: set[bytes] = set()
        self._out_of_room = False
        self._made: WeakValueDictionary[_Key, Block] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Block]] = {}

    @remote(2)
    async def hold(self, ended: list[int], held: list[int]) -> None:
        """Note the objects of ours that the caller still holds of those leased by connections which have ended at its
        side.

        Args:
            ended: the caller's numbers of those connections.
            held: ids of the objects that it holds; it holds no others.
        """
        session = caller()
        for other in list(self._sessions.all()):
            hello = other.peer_hello
            if other.peer_process == session.peer_process and hello is not None and hello.session in ended:
                other.connection.abort()  # its end was not noticed here yet; the objects leased by it are parked then
                await other.connection.aclose()
        reader = session.connection.reader
        if reader is not None:
            self._store.parking.hold(reader, [(session.peer_process, number) for number in ended], set(held))

    @remote(3)
    async def lend(self, pin: int, kind: int, offset: int, nbytes: int) -> tuple[int, int]:
        """Adopt an object that we passed on to the caller, who cannot lease it from its owner, and lease it to the
        caller. Returns its id here, and the offset of its bytes in our arena.

        Args:
            pin: the pin by which we keep it for the caller.
            kind: a `RegionKind`.
            offset: of the bytes in the owner's arena.
            nbytes: the number of wanted bytes.

        Raises:
            ObjectLost: only the object's name is left here, or the caller has not been given the object.
            OutOfMemory: this process has no room for the object.
        """
        session = caller()
        holder = session.leases.get(pin) if pin >> 63 else None
        own: OwnRef | Block
        if kind == RegionKind.REF and (call := known_here(holder)) is not None:
            own, place = OwnRef(call), 0
        elif isinstance(holder, Lease | RemoteLease) and kind <= RegionKind.MOVED:
            low = offset - holder.offset
            if low < 0 or low + nbytes > holder.nbytes:
                raise ObjectLost(f"bytes {low} to {low + nbytes} of an object of {holder.nbytes} bytes")
            own, first = await self.adopt(holder, kind)
            place = first + low
        else:
            raise ObjectLost(f"pid {self._pid} has no value under that name")
        with session.lock:
            _, object_id, _ = own.grant(session)
        return object_id, place

    def left(self, session: Session, another: Session | None) -> None:
        """Note the end of a connection. Nothing more is mapped by it. Objects leased from its peer are adopted as soon
        as the peer's process has ended, and can neither write to its memory nor share it. A living peer keeps all
        objects that it has leased by the connection, until it learns which of them are still held.

        Args:
            session: the session that has ended.
            another: another session with the same peer, or None.
        """
        connection = session.connection
        mapping, owner = connection.mapping, connection.reader
        if mapping is None or owner is None:
            return
        files = [each.file for each in (mapping, connection.writable_mapping) if each is not None]
        connection.mapping = connection.writable_mapping = None  # objects over the windows keep them
        if session.parted and not any(each.leases for each in files):
            return
        both = tuple(map(ref, files))
        self._outlived.setdefault(session.peer_process, {})[session.number] = both
        if another is not None:
            self.met(another)
        self._watch(session.peer_process, owner)

    def met(self, session: Session) -> None:
        """Note that a connection to a peer is open: report which of the objects that were leased by ended connections
        are held."""
        if session.peer_process in self._outlived:
            self._tasks.start(self._tell(session))

    def let_go(self, peer: bytes) -> None:
        """Note that a peer has dropped an object, whose lease came by a connection that has ended."""
        if not self._tasks.closing and (peer in self._outlived or peer in self._moved) and peer not in self._late:
            self._late.add(peer)
            self._tasks.loop.call_later(_DELAY, self._tell_later, peer)

    def _tell_later(self, peer: bytes) -> None:
        self._late.discard(peer)
        if not self._tasks.closing:
            self._tasks.start(self._tell_again(peer))

    async def _tell_again(self, peer: bytes) -> None:
        if peer in self._moved:
            await self._punch(peer)
        elif peer in self._outlived:
            with contextlib.suppress(ZcactorError):  # the peer has ended, and keeps nothing
                await self._tell(await self._connections.connect(peer))

    async def _tell(self, session: Session) -> None:
        peer = session.peer_process
        outlived = self._outlived.get(peer, {})
        ended = list(outlived)
        done = [number for number in ended if not any(_leases_of(each()) for each in outlived[number])]
        held = {lease.id for files in outlived.values() for each in files for lease in _leases_of(each())}
        await dawdle("hold")
        try:
            await self._requests.ask(session, Adoptions.hold, ended, sorted(held))
        except ZcactorError:  # lost again: the next connection reports
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
        for file, *writable in self._outlived.pop(peer, {}).values():
            self._tasks.start(self._take_over(file, owner))
            if writable:
                self._moved.setdefault(peer, []).extend(writable)
        if peer in self._moved:
            self._tasks.start(self._punch(peer))

    async def _punch(self, peer: bytes) -> None:
        """Punch the memory of an ended peer, except held objects, as soon as no other process maps it."""
        left = [file for each in self._moved.get(peer, ()) if (file := each()) is not None and file.leases]
        if not left:
            self._moved.pop(peer, None)
        elif all(file.is_the_only_one() for file in left):
            await asyncio.to_thread(_punch_others, left)
        else:
            self._tasks.loop.call_later(_RETRY, self._punch_again, peer)

    def _punch_again(self, peer: bytes) -> None:
        if not self._tasks.closing:
            self._tasks.start(self._punch(peer))

    async def _take_over(self, arena: ref[ArenaFile], owner: OsProcess) -> None:
        if self._coming:  # so that nothing is copied twice
            await asyncio.wait(list(self._coming.values()))
        file = arena()
        windows = [] if file is None else file.windows
        if file in self._taking or any(window.in_use for window in windows):
            # A computation reads there, which began before the owner's end and is not to be copied for.
            self._tasks.loop.call_later(_RETRY, self._take_over_later, arena, owner)
        found = [(window, runs) for window in windows if not window.in_use and (runs := _runs_in(window))]
        if file is not None and file not in self._taking and found:
            taking = self._taking[file] = _Taking(self._tasks.loop)
            work = threading.Thread(target=self._work, args=(file, owner, found, taking), name="zcactor-adopting")
            work.daemon = True
            work.start()

    def _take_over_later(self, arena: ref[ArenaFile], owner: OsProcess) -> None:
        if not self._tasks.closing:
            self._tasks.start(self._take_over(arena, owner))

    def _work(self, file: ArenaFile, owner: OsProcess, found: list[tuple[Window, list[_Run]]], taking: _Taking) -> None:
        """Replace the pages of all leases of each window or, without room for the copies, of none. Runs in a thread."""
        loop, copied = self._tasks.loop, []
        try:
            for window, runs in found:
                blocks = self._copy_runs(window, owner, runs, taking)
                if blocks is not None:
                    copied.append((window, runs, blocks))
            count = sum([self._name(runs, blocks) for _, runs, blocks in copied])
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._copied, count, taking)
            if taking.wanted.is_set():
                time.sleep(_ANSWER)  # the loop answers callers, before this thread keeps it from new pages
            for window, runs, blocks in copied:
                self._replace(window, owner, runs, blocks)
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._taken_over, file, taking)

    def _copied(self, count: int, taking: _Taking) -> None:
        """Count the objects before anybody gets one of them, so that statistics taken afterwards include them."""
        self.count += count
        taking.set_copied()

    def _taken_over(self, file: ArenaFile, taking: _Taking) -> None:
        del self._taking[file]
        taking.set_copied()

    def _copy_runs(self, window: Window, owner: OsProcess, runs: list[_Run], taking: _Taking) -> list[Block] | None:
        """Make blocks with the bytes of `runs`; None without room for them."""
        store = self._store
        try:
            blocks = [_same_pages(run) or store.allocate_apart(run.nbytes) for run in runs]
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
                taking.copy(block.address, window.base + run.low, run.nbytes)
                self._copies.count(_REASON, run.nbytes)
                block.sealed = True
        return blocks

    @staticmethod
    def _name(runs: list[_Run], blocks: list[Block]) -> int:
        """Set the block that is passed on in the place of each lease. Returns the number of objects that this
        adopts."""
        adopted = set()
        for run, block in zip(runs, blocks, strict=True):
            for lease in run.leases:
                if lease.adopted is None:
                    adopted.add((lease.id, lease.offset, lease.nbytes))
                    lease.adopted = block, block.offset + lease.offset - run.low
        return len(adopted)

    def _replace(self, window: Window, owner: OsProcess, runs: list[_Run], blocks: list[Block]) -> None:
        """Map the blocks in the place of the copied pages, and give up the rest of the window."""
        fd = self._store.arena.fd
        try:
            for run, block in zip(runs, blocks, strict=True):
                for lease in run.leases:
                    lease.pages = block  # set before anything is mapped from the block
                window.replace(run.low, run.nbytes, fd, block.offset)
            window.give_up([(run.low, run.nbytes) for run in runs])
        except OSError as error:  # the store is closed, or mappings are used up: the old pages stay valid
            logger.debug("the memory of process %d, which has ended, stays: %s", owner.pid, error)

    def close(self) -> None:
        """Stop adopting. Idempotent."""
        for peer in list(self._watched):
            self._unwatch(peer)

    async def adopt(self, lease: Lease | RemoteLease, kind: int) -> tuple[Block, int]:
        """Make an object of this process with the bytes of `lease`.

        A read-only object is copied once while its lease is held here. An array that was moved here and is moved on is
        copied each time, because its receiver may write to it. Bytes that cannot be mapped are pulled: this process may
        reach an owner that others do not reach.

        Args:
            lease: a lease on an object that its owner does not lease to others any more.
            kind: value of a `RegionKind`.

        Returns:
            The object's block, and the offset of the bytes in this process's arena.

        Raises:
            OutOfMemory: the store has no room for the object.
            ObjectLost: the bytes cannot be mapped, and were not pulled while that was possible.
        """
        if isinstance(lease, RemoteLease):
            # Authenticated in any case: the asking process may want the bytes for a pickle, and does not know this
            # transfer.
            part = await self._locations.read(Part(kind, lease, lease.offset, lease.nbytes, authenticate=1))
            if isinstance(part.holder, LostPart):
                part.holder.raise_error()
            if not isinstance(part.holder, Lease):
                return part.holder, part.offset
            lease = part.holder
        if kind == RegionKind.MOVED:
            block = await self._copy(lease)
            return block, block.offset + lease.address % mmap.PAGESIZE
        taking = self._taking_of(lease)
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
                try:
                    found = self._made[key] = await asyncio.shield(task)
                finally:
                    del task  # an error has this frame in its traceback, and the task has the error
                found.sealed = True
            lease.adopted = found, found.offset + lease.address % mmap.PAGESIZE
        return lease.adopted

    def _taking_of(self, lease: Lease) -> _Taking | None:
        file = lease.mapping.file if type(lease.mapping) is Window else None
        return None if file is None else self._taking.get(file)

    def _arrived(self, key: _Key, _: object) -> None:
        del self._coming[key]

    async def _copy(self, lease: Lease) -> Block:
        """Copy the pages that a lease lies in into a block that begins at a page: the bytes keep their offset in the
        page."""
        low = lease.address - lease.address % mmap.PAGESIZE
        nbytes = -(-(lease.address + lease.nbytes - low) // mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._store.allocate_apart(nbytes, commit=False)
        if nbytes < _IN_THREAD_NBYTES:
            _copy_pages(block, lease, low, nbytes)
        else:
            await self._tasks.loop.run_in_executor(None, _copy_pages, block, lease, low, nbytes)
        self._copies.count(_REASON, nbytes)
        self.count += 1
        return block


def _leases_of(file: ArenaFile | None) -> list[Lease]:
    """The living leases on bytes of an arena."""
    return [] if file is None else file.leases


def _punch_others(files: list[ArenaFile]) -> None:
    """Give back all memory without leases."""
    for file in files:
        try:
            file.punch([(run.low, run.nbytes) for run in _runs(file.leases)])
        except OSError as error:
            logger.debug("memory of a process that has ended stays: %s", error)


class _Run(NamedTuple):
    """A run of adjacent pages of an arena, and the leases in them."""

    low: int
    """Offset in bytes from the start of the arena."""
    nbytes: int
    leases: list[Lease]


def _runs_in(window: Window) -> list[_Run]:
    """The pages of a window that leases lie in."""
    leases = [each() for each in window.leases.copy().values()]
    return _runs([lease for lease in leases if lease is not None and lease.nbytes])


def _runs(leases: list[Lease]) -> list[_Run]:
    """The pages that leases lie in, in order. Leases that share a page are in one run."""
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
    """The block that already has all pages of `run`, because its objects were adopted when they were passed on; or
    None."""
    found = {lease.adopted for lease in run.leases}
    if len(found) != 1 or (adopted := found.pop()) is None:
        return None
    block, offset = adopted
    return block if (block.nbytes, offset - block.offset) == (run.nbytes, run.leases[0].offset - run.low) else None


def _copy_pages(block: Block, lease: Lease, low: int, nbytes: int) -> None:
    """Copy `nbytes` from the address `low`. `lease` keeps the bytes, also when nobody waits for the copy any more."""
    block.store.commit(block.offset, 0, nbytes)
    copy_in_bulk(block.address, low, nbytes)
    del lease
