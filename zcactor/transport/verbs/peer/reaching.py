"""Access of two ends to each other's memory: the keys of bytes, and their authentication.

A reference carries the key of the memory region around its bytes, if there is one. Without a key, or with a stale one,
the reader asks for the key over the socket. It also asks there for the tags of bytes that have to be authenticated.
Bytes that their owner cannot register are sent through the socket. Bytes with a destination that cannot be registered
pass through bounce buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory, ProtocolError
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.verbs.peer.bootstrap import (
    BROUGHT_NBYTES,
    MAX_KEYS,
    MAX_REASON,
    Ask,
    Bring,
    Brought,
    Exported,
    Message,
    Tag,
    Tagged,
)
from zcactor.transport.verbs.peer.tagging import CHUNK_NBYTES, REACH_NBYTES, ReadTags

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from zcactor.transport.bytes import Commit, RemoteRegion
    from zcactor.transport.stream.record_layer import Seals
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.peer.pull import Keys
    from zcactor.transport.verbs.peer.pulling import Puller

__all__ = ["Reach"]

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", Exported, Tagged, Brought)


class _Unregistered(Exception):
    """The failure of a peer that has the object, but cannot register its memory."""


async def _in_thread(work: Callable[[], _Result], nbytes: int, keep: object) -> _Result:
    """Run `work` on so many bytes, which `keep` holds, in a thread where that takes long. Returns its result.
    Cancelling does not stop the thread, and the bytes are held until it has ended."""
    if nbytes < CHUNK_NBYTES:
        return work()

    def held(_: object) -> _Result:
        return work()

    try:
        return await asyncio.to_thread(held, keep)
    except RuntimeError:  # the system cannot start another thread
        return work()


def _reason(error: Exception) -> str:
    """Return the text of `error`, cut to the length that a message allows."""
    return (str(error) or repr(error))[:MAX_REASON]


def _ends(counted: Iterable[tuple[int, int]]) -> Keys:
    """Convert keys with their numbers of bytes to keys with the ends of these bytes."""
    at, found = 0, []
    for nbytes, key in counted:
        at += nbytes
        found.append((at, key))
    return found


class Reach:
    """The access to memory in both directions of one connection. Runs on the loop's thread, except for `export`.

    Args:
        engine: the engine of this process.
        puller: posts the READs.
        pid: the peer's process number, for messages.
        lookup: as for `VerbsConnection`.
        may_read: ``may_read(object_id, offset, nbytes)``: whether the peer may read these bytes of ours.
        seals: as for `VerbsConnection`.
        leads: as for `VerbsConnection`.
        tell: sends a message to the peer, as long as there is a connection.
        start: runs an answer in a task that ends with the connection.
        ended: makes the error of a connection, from the description of its end.
        lose: ends the connection with an error, after a violation of the protocol.

    Attributes:
        keys: rkeys of the peer's arena, and the bytes that are known to be in their regions.
        asked: by number, the kind of the awaited answer, and its future, which gets None as the connection ends.
        lost: whether the connection has ended.
        by_socket: the last reason for bytes through the socket, in either direction.
    """

    def __init__(
        self, engine: Engine, puller: Puller, pid: int, lookup: Callable[[int], Any],
        may_read: Callable[[int, int, int], object], seals: Seals | None, *, leads: bool,
        tell: Callable[[Message], None], start: Callable[[Coroutine[Any, Any, None]], None],
        ended: Callable[[str], ConnectionLost], lose: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self.keys: dict[int, tuple[int, int]] = {}
        self.asked: dict[int, tuple[type[Exported | Tagged | Brought], asyncio.Future[Any]]] = {}
        self.lost = False
        self.by_socket = ""
        self._engine = engine
        self._puller = puller
        self._pid = pid
        self._lookup = lookup
        self._may_read = may_read
        self._tags = None if seals is None else ReadTags(seals.exporter, leads=leads)
        self._all = seals is not None and seals.integrity is Integrity.ARRAYS
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._start = start
        self._ended = ended
        self._lose = lose
        self._asks = 0

    def end(self) -> None:
        """Fail all questions, as the connection has ended."""
        self.lost = True
        for _, future in self.asked.values():
            if not future.done():
                future.set_result(None)

    def take(self, message: Message) -> bool:
        """Handle a question or an answer of the peer. False for other messages.

        Raises:
            ProtocolError: the answer does not belong to a question.
        """
        if isinstance(message, Ask):
            self._start(self._answer(message))
        elif isinstance(message, Tag) and self._tags is not None:
            self._start(self._answer_tag(message, self._tags))
        elif isinstance(message, Bring):
            self._answer_bring(message)
        elif isinstance(message, Exported | Tagged | Brought):
            kind, future = self.asked.get(message.number, (type(message), None))
            if kind is not type(message):
                raise ProtocolError(f"the peer answered {type(message).__name__.lower()!r} to another question")
            if future is not None and not future.done():
                future.set_result(message)
        else:
            return False
        return True

    def export(self, object_id: int, offset: int, nbytes: int) -> tuple[int, int]:
        """See `zcactor.transport.base.Connection.export`."""
        engine = self._engine
        region = engine.extents.find(offset, nbytes)
        if region is None and not engine.extents.registered(offset, nbytes):  # the reader asks for the key later
            with contextlib.suppress(RuntimeError):  # the loop is closed, as the process is ending
                self._loop.call_soon_threadsafe(engine.extents.ahead, offset, nbytes)
        return self._seal_of(object_id), 0 if region is None else region.rkey

    def _seal_of(self, object_id: int) -> int:
        seals = self._engine.seals
        found = seals.find(object_id)
        if not found:
            holder = self._lookup(object_id)
            if holder is not None:
                found = seals.seal(object_id, holder.offset, holder.nbytes, holder)
        return found

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """See `VerbsConnection.pull`, which has checked the bounds."""
        extents, nbytes = self._engine.extents, region.nbytes
        try:
            lkeys = _ends(
                (count, one.lkey) for count, one in await extents.keys(address - self._engine.arena.address, nbytes)
            )
        except (OSError, OutOfMemory) as error:
            if not self._engine.usable:
                raise
            extents.refused = f"arrays come by way of other registered memory, as theirs cannot be registered: {error}"
            lkeys = None
            if commit is not None:  # registered memory is committed already
                await _in_thread(partial(commit, 0, nbytes), nbytes, keep)
        try:
            await self._read(region, address, keep, lkeys)
        except _Unregistered as refusal:
            self.by_socket = f"arrays come by the socket beside, as {refusal}"
            await self._bring(region, address)
        if self._tags is not None and (region.authenticate or (self._all and not region.sealed)):
            await self._authenticate(self._tags, region, address, keep)

    async def _read(self, region: RemoteRegion, address: int, keep: object, lkeys: Keys | None) -> None:
        """Pull by READs, through bounce buffers without `lkeys`. Raises as `pull`, and `_Unregistered`."""
        seal, rkeys = region.seal, [(region.nbytes, region.rkey)] if region.rkey else self._known_keys(region)
        asked = not rkeys
        if asked:
            seal, rkeys = await self._ask(region)
        while True:
            named = replace(region, seal=seal, rkey=0)
            try:
                if lkeys is None:
                    await self._pull_by_way(named, address, rkeys)
                else:
                    await self._puller.pull(named, address, lkeys, keep, rkeys)
                break
            except ObjectLost:
                if asked:
                    raise
                asked = True
                self.keys.clear()
                found = await self._ask(region)
                if found == (seal, rkeys):
                    raise
                seal, rkeys = found

    async def _bring(self, region: RemoteRegion, address: int) -> None:
        """Pull through the socket, in pieces. Raises as `pull`."""
        for at in range(0, region.nbytes, BROUGHT_NBYTES):
            nbytes = min(BROUGHT_NBYTES, region.nbytes - at)
            question = partial(Bring, object_id=region.object_id, offset=region.offset + at, nbytes=nbytes)
            answer = await self._answer_to(Brought, question, region.nbytes)
            if len(answer.data) != nbytes:
                error = ProtocolError(f"process {self._pid} was asked for {nbytes} bytes, and sent {len(answer.data)}")
                self._lose(error)
                raise error
            ctypes.memmove(address + at, answer.data, nbytes)
        self._engine.extents.brought(region.nbytes)

    async def _authenticate(self, tags: ReadTags, region: RemoteRegion, address: int, keep: object) -> None:
        """Compare the tags of received bytes with the owner's. Raises as `pull`."""
        for start in range(0, region.nbytes, REACH_NBYTES):
            nbytes, offset = min(REACH_NBYTES, region.nbytes - start), region.offset + start
            question = partial(Tag, object_id=region.object_id, offset=offset, nbytes=nbytes)
            answer = await self._answer_to(Tagged, question, nbytes)
            place = region.object_id, offset, address + start, nbytes
            found = await _in_thread(partial(tags.of_theirs, answer.first, *place), nbytes, keep)
            if not hmac.compare_digest(answer.tags, found):
                error = ProtocolError(
                    f"{nbytes} bytes at {offset} of the arena of process {self._pid}, read by RDMA, are not its "
                    "own: they were changed on their way"
                )
                self._lose(error)
                raise error

    async def _pull_by_way(self, region: RemoteRegion, address: int, rkeys: Keys) -> None:
        """Pull through bounce buffers, in pieces."""
        at = 0
        while at < region.nbytes:
            loan = await self._engine.bounce.borrow()
            nbytes = min(loan.nbytes, region.nbytes - at)
            piece = replace(region, offset=region.offset + at, nbytes=nbytes)
            theirs = [(end - at, rkey) for end, rkey in rkeys if end > at]
            await self._puller.pull(piece, loan.address, ((nbytes, loan.lkey),), loan, theirs)
            ctypes.memmove(address + at, loan.address, nbytes)
            del loan
            at += nbytes
        self._engine.extents.copied(region.nbytes)

    def _known_keys(self, region: RemoteRegion) -> Keys:
        """Return the rkeys for an object across several extents, from earlier answers of the peer; empty where one of
        them is missing."""
        at, end = region.offset, region.offset + region.nbytes
        found: list[tuple[int, int]] = []
        while at < end:
            known = next(((high, rkey) for rkey, (low, high) in self.keys.items() if low <= at < high), None)
            if known is None:
                return []
            at = min(known[0], end)
            found.append((at - region.offset, known[1]))
        return found if region.seal else []

    async def _ask(self, region: RemoteRegion) -> tuple[int, Keys]:
        """Ask the peer for the seal and the rkeys of `region`.

        Raises:
            ObjectLost: the peer has freed the object.
            _Unregistered: the peer cannot register its memory.
            ConnectionLost: the connection is lost before or meanwhile.
        """
        at, seal = 0, 0
        rkeys: list[tuple[int, int]] = []
        while at < region.nbytes:
            left = partial(Ask, object_id=region.object_id, offset=region.offset + at, nbytes=region.nbytes - at)
            answer = await self._answer_to(Exported, left, region.nbytes)
            seal = seal or answer.seal
            for nbytes, rkey in answer.keys:
                low = region.offset + at
                at = min(at + nbytes, region.nbytes)
                rkeys.append((at, rkey))
                before = self.keys.get(rkey, (low, low))
                self.keys[rkey] = min(low, before[0]), max(region.offset + at, before[1])
            if not answer.keys:
                raise ObjectLost(f"process {self._pid} has no keys for {region.nbytes} bytes that are to be read")
        return seal, rkeys

    async def _answer_to(self, kind: type[_Answer], question: Callable[[int], Message], nbytes: int) -> _Answer:
        """Ask the peer a question about so many bytes, and return the answer.

        Args:
            kind: the kind of the answer.
            question: makes the question from its number.
            nbytes: bytes that the question is about, for messages.

        Raises:
            ObjectLost: the peer has freed the object.
            _Unregistered: the peer has the object, but cannot register its memory.
            ConnectionLost: the connection is lost before or meanwhile.
        """
        if self.lost:
            raise self._ended("is closed")
        self._asks = number = self._asks + 1 & 0xFFFFFFFF
        future: asyncio.Future[_Answer | None] = self._loop.create_future()
        self.asked[number] = kind, future
        try:
            self._tell(question(number))
            # Not by `asyncio.wait`: from Python 3.14 on, its frame refers to the task. The traceback of a task that was
            # cancelled would hold itself then, and the memory that `pull` writes to.
            answer = await future
        finally:
            self.asked.pop(number, None)
        if answer is None:
            raise self._ended("was lost")
        if answer.reason:
            raise self._refusal(answer, nbytes)
        return answer

    def _refusal(self, answer: Exported | Tagged | Brought, nbytes: int) -> ObjectLost | _Unregistered:
        """Make the error of an answer that has a reason instead of data."""
        if isinstance(answer, Exported) and answer.refused:
            return _Unregistered(f"process {self._pid} cannot register its memory {answer.reason}")
        return ObjectLost(f"process {self._pid} cannot let {nbytes} bytes be read: {answer.reason}")

    def _found(self, ask: Ask | Bring | Tag) -> tuple[Any, str]:
        """Find the object of a question. Returns it with the reason against an answer, which may be empty."""
        holder = self._lookup(ask.object_id)
        if holder is None:
            return None, "it has no such object any more"
        if not holder.offset <= ask.offset <= ask.offset + ask.nbytes <= holder.offset + holder.nbytes:
            return holder, f"they are not inside the object's {holder.nbytes} bytes"
        if not self._may_read(ask.object_id, ask.offset, ask.nbytes):
            return holder, "the reader holds no lease on the object"
        return holder, ""

    async def _answer_tag(self, ask: Tag, tags: ReadTags) -> None:
        holder, reason = self._found(ask)
        if reason:
            self._tell(Tagged(ask.number, reason=reason))
            return
        try:
            first = tags.begin(ask.nbytes)
            place = ask.object_id, ask.offset, self._engine.arena.address + ask.offset, ask.nbytes
            made = await _in_thread(partial(tags.of_ours, first, *place), ask.nbytes, holder)
        except Exception as error:  # of any kind, as the peer waits for an answer
            self._tell(Tagged(ask.number, reason=_reason(error)))
            return
        self._tell(Tagged(ask.number, first, made))

    async def _answer(self, ask: Ask) -> None:
        _, reason = self._found(ask)
        if reason:
            self._tell(Exported(ask.number, reason=reason))
            return
        try:
            found = await self._engine.extents.keys(ask.offset, ask.nbytes)
            keys = tuple((nbytes, region.rkey) for nbytes, region in found[:MAX_KEYS])
            seal = self._seal_of(ask.object_id)
        except (OSError, OutOfMemory) as error:
            self.by_socket = f"arrays go by the socket beside, as memory here cannot be registered: {error}"
            reason = f"on {socket.gethostname()}: {error}"[:MAX_REASON]
            self._tell(Exported(ask.number, reason=reason, refused=True))
            return
        except Exception as error:  # as above
            self._tell(Exported(ask.number, reason=_reason(error)))
            return
        self._tell(Exported(ask.number, keys, seal))

    def _answer_bring(self, ask: Bring) -> None:
        _, reason = self._found(ask)
        data = b"" if reason else ctypes.string_at(self._engine.arena.address + ask.offset, ask.nbytes)
        self._tell(Brought(ask.number, data, reason))
