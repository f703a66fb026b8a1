"""One rank of a group, in the process of its actor: the order of its operations, its messages to the other ranks."""

from __future__ import annotations

import math
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVarTuple

import numpy as np

from zcactor.collectives.cost import Line
from zcactor.collectives.hierarchy import Hierarchy
from zcactor.collectives.operations import SPOILED, Collective, Ending, Publication, for_all_ranks
from zcactor.collectives.service import GroupService
from zcactor.collectives.sources import own_source
from zcactor.collectives.steps import STEPS, ReducerStep, is_later, step_of
from zcactor.errors import ConnectionLost, GroupBroken, ProtocolError
from zcactor.exception_pickling import bare, text_of, type_name
from zcactor.logs import logger
from zcactor.marshal.arrays import dtype_code, dtype_from_code, root_of
from zcactor.marshal.packed import Packed
from zcactor.marshal.values import SCALARS
from zcactor.native import hot
from zcactor.objects.holders import granted, reached
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zcactor.collectives.sources import Piece
    from zcactor.peers.seating import Seat
    from zcactor.process.context import LocalProcess
    from zcactor.process.spinning import Spinner
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session
    from zcactor.transport.mapping import Mapped

__all__ = ["Member", "word_of"]

Ts = TypeVarTuple("Ts")

_HEAD_NBYTES: Final = 256
"""Bytes of a frame for all but data and signature, at most."""
_RANK_BITS: Final = 20
"""Bits of a PUSH frame's key for the rank that has sent it, the lowest; those above hold the operation, from 1 on."""
_RANK: Final = (1 << _RANK_BITS) - 1

dtype_from_code(dtype_code(np.dtype(np.uint8)))  # known to the native part: it is that of the memory for results


def word_of(key: bytes, rank: int) -> int:
    """The word by which PUSH frames name one member of a group.

    Args:
        key: names the group and its epoch.
        rank: of the member.
    """
    return int.from_bytes(blake2b(key, digest_size=8, salt=rank.to_bytes(4, "little")).digest(), "little")


def _is_publication(values: Any) -> bool:
    """Whether values of a PUSH frame are a call and a value; or these and the owner, offset and layout of memory; or
    these and an array over the memory for the result."""
    if type(values) is not list or len(values) not in (2, 5, 6) or type(values[0]) is not str:
        return False
    if len(values) == 2:
        return True
    if [*map(type, values[2:5])] != [bytes, int, bytes]:
        return False
    return len(values) == 5 or (type(values[5]) is np.ndarray and type(root_of(values[5])) is Lease)


class Registry(Protocol):
    """The groups of the process; see `zcactor.collectives.groups.Groups`."""

    process: LocalProcess
    counts: Any

    def offer_here(self, key: bytes, to: int, source: int, seq: int, memory: Block | Piece) -> None:
        """Take memory of this process that another member here has named."""

    def publish_here(self, key: bytes, to: int, source: int, seq: int, publication: Publication) -> None:
        """Take a publication of a member in this process, for another one."""

    def report(self, key: bytes, to: int, source: int, seq: int, failure: BaseException | None) -> None:
        """Take the report of rank `source`."""


class Member:
    """One rank of a group. Used on the loop's thread.

    Args:
        groups: the groups of this process.
        key: names the group and its epoch, among all processes.
        epoch: number of the epoch.
        rank: this rank.
        seats: the places of all ranks.
    """

    def __init__(self, groups: Registry, key: bytes, epoch: int, rank: int, seats: Sequence[Seat]) -> None:
        self.groups = groups
        self.process = groups.process
        self.key = key
        self.epoch = epoch
        self.rank = rank
        self.seats = seats
        self.size = len(seats)
        self.eager_nbytes = 0
        """Bytes of the largest input that travels in frames; the same on all ranks."""
        self.hierarchy = Hierarchy(range(self.size))
        """The ranks by host."""
        self.line = Line(0.0, math.inf)
        """The cost of bytes from a rank on another host."""
        self.spinner: Spinner | None = None
        """The wakefulness of the loop after each message; None lets it sleep."""
        self.exchange: Ending | None = None
        """The exchanges of arrays on GPUs, from the first on; see `zcactor.collectives.gpu_exchange.exchange_of`."""
        self.kept = True
        """Whether the process still has this member."""
        self.warned = -math.inf
        """The time of the loop when a long wait was logged last."""
        self.steps: dict[int, ReducerStep] = {}
        """The steps of reducers that some rank has not ended, by number."""
        self.next_step = 0
        """The number of the next step of this rank."""
        self.broken: tuple[int, str, str, int] | None = None
        """The arguments of `GroupBroken`. Each call gets an error of its own: one that was raised refers to the frames
        of its caller, and by them to the group, which would never be forgotten."""
        self.word = word_of(key, rank)
        """The name of this member in PUSH frames."""
        self.recipes: dict[tuple[Any, tuple[int, ...], str], Any] = {}
        """The facts of sums of small arrays that this rank has made, by dtype, shape and kind; see
        `zcactor.collectives.fast_path.Recipe`."""
        self._others = [rank_ for rank_ in range(self.size) if rank_ != rank]
        self._words = {other: word_of(key, other) for other in self._others}
        self._peers = [(other, seats[other].process, self._words[other]) for other in self._others]
        self._used = self.process.sessions.used
        self.operations: dict[int, Collective] = {}
        self.meetings: dict[int, Any] = {}
        """Those of the operations that have a meeting, by operation."""
        self._early: dict[int, dict[int, Publication | tuple[str, Any]]] = {}
        """Publications of operations that this rank has not called yet, or only the call and the value of each. Each
        rank has at most one for each call that it has made."""
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        """Beginnings of inputs that do not fit one frame, by operation and rank."""
        self.seat = hot.Seat(rank, self.size, self.meetings, self._early, self._pieces, self.pushed)
        """The native part, which takes PUSH frames and has the number of the next operation."""

    # ---------------------------------------------------------------- our calls

    def begin(self, operation: Collective) -> None:
        """Begin the next operation in the order of the group."""
        if self.broken is not None:
            operation.release()
            operation.call.fail(GroupBroken(*self.broken))
            return
        self._stay_awake()
        self.groups.counts.collectives += 1
        step = operation.step
        try:
            seq = operation.place(self)
        except ValueError as error:
            operation.release()
            operation.call.fail(error)
            return
        if step is not None and (excuse := step.excuse_for(seq)) is not None:
            operation.release()
            operation.call.fail(excuse)
            return
        self.operations[seq] = operation
        if operation.meeting is not None:
            self.meetings[seq] = operation.meeting
        try:
            own = operation.begin(self, seq)
        except Exception as error:  # no memory, say: all ranks get the error, and none waits for this one
            operation.readers.clear()
            own = Publication(operation.signature, failure=bare(error, None))
            operation.held = False
        if not operation.held:
            self.publish(operation, own)
        for rank, each in self._early.pop(seq, {}).items():
            operation.arrived(rank, each if type(each) is Publication else Publication(*each))
        if self.operations.get(seq) is operation:
            operation.arrived(self.rank, own)

    def begin_promptly(self, operation: Collective, data: Any) -> None:
        """Begin the next operation, of which all ranks get its call and one value. It does what `begin` does, with
        fewer steps."""
        if self.broken is not None:
            self.begin(operation)
            return
        if self.spinner is not None:
            self.spinner.touch()
        self.groups.counts.collectives += 1
        seat, meeting, signature = self.seat, operation.meeting, operation.signature
        seq = seat.next
        seat.next = seq + 1
        operation.member, operation.seq = self, seq
        self.operations[seq] = operation
        self.meetings[seq] = meeting
        if not operation.held:
            self.publish_to_all(seq, operation, data)
        early = self._early.pop(seq, None)
        if early is not None:
            for rank, each in early.items():
                if type(each) is Publication:
                    operation.arrived(rank, each)
                else:
                    meeting.take(rank, *each)
        if seq in self.operations:
            meeting.take(self.rank, signature, data)

    def publish_to_all(self, seq: int, operation: Collective, data: Any) -> None:
        """Publish a call and a value to all, by the shortest way where that is open."""
        values, whole = (operation.signature, data), operation.whole
        key, used = (seq + 1) << _RANK_BITS | self.rank, self._used
        for rank, process, word in self._peers:
            session = used.get(process)
            if session is not None and session.closed is None:
                try:
                    if session.wire.publish(key, word, values, whole):
                        continue
                except ConnectionLost:  # its end breaks the group
                    continue
            self._publish(rank, seq, operation, Publication(*values))

    def close(self) -> None:
        """End all operations, as nobody holds the group any more. Work queued on GPUs is still done, on all ranks."""
        if self.exchange is not None:
            self.exchange.close()
        if self.broken is None:
            self._end((-1, "", "nobody holds the group any more"), GroupService.forget, self.key)

    def _stay_awake(self) -> None:
        if self.spinner is not None:
            self.spinner.touch()

    def ended(self, operation: Collective) -> None:
        """Forget an operation that has ended here."""
        self.operations.pop(operation.seq, None)
        if operation.meeting is not None:
            self.meetings.pop(operation.seq, None)

    def writable(self, result: Any) -> Block | Mapped:
        """The memory of a result as this process writes to it: at its `address`, which is valid as long as the returned
        object lives.

        Raises:
            ConnectionLost, LookupError: this process has no write access, or has it no more.
        """
        if type(result) is Block:
            return result
        connection = self.process.sessions.used[result.owner].connection
        return connection.map(result.offset, result.nbytes, writable=True)  # type: ignore[no-any-return]

    async def input_of(self, rank: int, seq: int) -> tuple[int, bytes]:
        """Ask another rank for the place of its input in the arena of its own process, to which it copies the input
        where that lies elsewhere.

        Returns:
            Offset and layout, as in `Publication`.
        """
        session = await self.process.connections.connect(self.seats[rank].process)
        offset, layout = await self.process.requests.ask(session, GroupService.input, self.key, rank, seq)
        return offset, layout

    def own_input(self, seq: int) -> tuple[int, bytes]:
        """Take our input of an operation that others wait for to memory of this process; see `input_of`.

        Raises:
            OutOfMemory: there is no room for it.
            ProtocolError: there is no such operation.
        """
        operation = self.operations.get(seq)
        if operation is None or getattr(operation, "source", None) is None:
            raise ProtocolError(f"rank {self.rank} of a group has no input of operation {seq}")
        source = operation.source = own_source(self.process, operation.source)  # type: ignore[attr-defined]
        return source.offset, source.layout

    # ---------------------------------------------------------------- to the others

    def publish(self, operation: Collective, own: Publication) -> None:
        """Publish an operation to all other ranks."""
        plain = own.result is None and own.failure is None and not own.owner and not own.offset
        if plain and own.signature == operation.signature and type(operation).for_rank is Collective.for_rank:
            self.publish_to_all(operation.seq, operation, own.data)
            return
        for rank in self._others:
            self._publish(rank, operation.seq, operation, own)

    def _publish(self, rank: int, seq: int, operation: Collective, own: Publication) -> None:
        publication = operation.for_rank(rank, own)
        block, whole, data = publication.result, operation.whole, publication.data
        failed = publication.failure is not None
        here = self.seats[rank].process == self.process.process
        session = None
        if not here:
            session = self._session(rank)
            if session is None or (not failed and self._push(session, rank, seq, publication, whole)):
                return
        if whole and type(data) is np.ndarray:  # the array may change as soon as this rank has its result
            data = data.tobytes()
            publication = publication._replace(data=data)
        if session is None:
            self.process.loop.call_soon(self.groups.publish_here, self.key, rank, self.rank, seq, publication)
            return
        head = (self.key, rank, self.rank, seq, publication.signature)
        room = session.connection.eager_limit - _HEAD_NBYTES - len(publication.signature)
        if type(data) is bytes and 0 < room < len(data):
            rest = (len(data) - 1) // room * room
            for low in range(0, rest, room):
                piece = self.key, rank, self.rank, seq, data[low : low + room]
                self.process.requests.send(session, GroupService.piece, piece, more=True)
            data = data[rest:]
        failure = publication.failure
        if failure is None:
            try:
                told = self._carried(data)
            except BaseException as error:  # of pickling: no rank may wait for this one
                failure = error
        if failure is not None:
            told = self._carried_failure(failure)
        body = (*head, failure is not None, told, publication.owner, publication.offset, publication.layout)
        if block is None:
            self.process.requests.send(session, GroupService.publish, body)
            return
        with session.lock:
            block.grant(session)
        call = self.process.requests.tell(
            session, GroupService.publish_with, (*body, block.id, block.offset, block.nbytes)
        )
        if call is not None:
            call.add_callback(partial(self._answered, session, block))

    def _push(self, session: Session, rank: int, seq: int, publication: Publication, whole: bool) -> bool:
        """Send a publication in a PUSH frame. Returns False for one that has to go another way.

        Args:
            session: with the process of `rank`.
            rank, seq, publication: as told to it.
            whole: whether an array travels in the frame.
        """
        signature, data, owner, offset, layout, block, _ = publication
        values: tuple[Any, ...] = (signature, data)
        if block is not None:
            if type(block) is not Block or block.nbytes < session.connection.eager_limit:
                return False  # a small one would travel by value
            store = self.process.store
            store.seal(block)  # towards NumPy: the ranks write to its memory by address, and pass no array of it on
            store.export(block)
            values = signature, data, owner, offset, layout, np.asarray(block)
        elif owner or offset:
            values = signature, data, owner, offset, layout
        key, word, wire = (seq + 1) << _RANK_BITS | self.rank, self._words[rank], session.wire
        try:
            if wire.publish(key, word, values, whole):
                return True
            if block is not None:
                return False
            if whole and type(data) is np.ndarray:
                data = data.tobytes()
                values = signature, data
            if data is not None and type(data) is not bytes:
                return False
            room = session.connection.eager_limit - _HEAD_NBYTES - len(signature) - len(layout)
            if (0 if data is None else len(data)) > room:
                return False
            payload, _, _ = self.process.marshaller.pack(list(values))
            session.publish(key, word, payload)
        except ConnectionLost:  # its end breaks the group
            pass
        return True

    @staticmethod
    def _answered(session: Session, block: Block | Piece, call: Any) -> None:
        """Take the lease back where the peer has no such member: it has made none of it."""
        if call.error is None and call.decoded and call.value is False:
            with session.lock:
                if session.leases.get(block.id) is not None:
                    session.leases.release(block.id, 1)

    def offer(self, seq: int, block: Block) -> None:
        """Name the memory for the result of an operation to all other ranks."""
        for rank in self._others:
            self.lend(rank, seq, block)

    def lend(self, rank: int, seq: int, memory: Block | Piece) -> None:
        """Name memory of ours to another rank, which reads it, or writes the result to it."""
        if self.seats[rank].process == self.process.process:
            self.process.loop.call_soon(self.groups.offer_here, self.key, rank, self.rank, seq, memory)
            return
        session = self._session(rank)
        if session is None:
            return
        with session.lock:
            memory.grant(session)
        call = self.process.requests.tell(
            session, GroupService.offer, (self.key, rank, self.rank, seq, memory.id, memory.offset, memory.nbytes)
        )
        if call is not None:
            call.add_callback(partial(self._answered, session, memory))

    def report(self, seq: int, failure: BaseException | None, ranks: Iterable[int] | None = None) -> None:
        """Tell other ranks, or all, that this one is done with their memory of an operation."""
        for rank in self._others if ranks is None else ranks:
            self._report_to(rank, seq, failure)

    def _report_to(self, rank: int, seq: int, failure: BaseException | None) -> None:
        if self.seats[rank].process == self.process.process:
            self.process.loop.call_soon(self.groups.report, self.key, rank, self.rank, seq, failure)
            return
        session = self._session(rank)
        if session is None:
            return
        if failure is None:
            try:
                if session.wire.publish((seq + 1) << _RANK_BITS | self.rank, self._words[rank], (), True):
                    return
            except ConnectionLost:  # its end breaks the group
                return
        told = None if failure is None else self._carried_failure(failure)
        self.process.requests.send(session, GroupService.report, (self.key, rank, self.rank, seq, told))

    def _carried(self, value: Any) -> Any:
        """A value as a message to another process carries it. All but plain ones are packed once more, so that the
        operation of the rank that unpacks them gets the error of unpickling, and not the whole message."""
        if type(value) in SCALARS:
            return value
        return Packed(*self.process.marshaller.pack(value))

    def _carried_failure(self, failure: BaseException) -> Any:
        """A failure as a message carries it: as text, where it cannot be pickled."""
        try:
            return self._carried(for_all_ranks(failure))
        except BaseException:  # a foreign __reduce__ may raise anything, and no rank may wait for this one
            return self._carried(RuntimeError(f"{type_name(type(failure))}: {text_of(failure)}"))

    def unpacked(self, carried: Any) -> tuple[Any, Exception | None]:
        """The value that a message of another rank has carried, or the error of unpacking it: of unpickling, or of
        reading an array, for which there may be no room."""
        if type(carried) is not Packed:
            return carried, None
        try:
            return self.process.marshaller.unpack(carried.payload, carried.parts, carried.flags), None
        except ProtocolError:
            raise
        except BaseException as error:  # a foreign class may raise anything, and no rank may wait for this one
            return None, for_all_ranks(error)

    def _session(self, rank: int) -> Session | None:
        """The session with the process of `rank`; None where it is lost, which breaks the group."""
        session = self.process.sessions.used.get(self.seats[rank].process)
        if session is not None and session.closed is None:
            return session
        return None

    # ---------------------------------------------------------------- from the others

    def pushed(self, key: int, values: Any, parts: Sequence[Part], flags: int) -> None:
        """Take what a PUSH frame has brought: a publication, or with no values the report that its rank is done. A
        message that no other rank can have sent is refused and logged.

        Args:
            key: as in `_push`.
            values: as a list, or packed.
            parts, flags: of the packed values; negative flags for a list.
        """
        rank, seq = key & _RANK, (key >> _RANK_BITS) - 1
        operation = self.operations.get(seq)
        try:
            if flags >= 0:
                values, failure = self.unpacked(Packed(values, parts, flags))
                if failure is not None:
                    self.spoiled(rank, seq, failure)
                    return
            if type(values) is list and not values:
                self.check(rank, seq)
                self.reported(rank, seq, None)
                return
            if not _is_publication(values):
                raise ProtocolError(f"PUSH {key:#x} for a member of a group brought no publication")
            if operation is not None and len(values) == 2 and rank in self._words:
                if self.spinner is not None:
                    self.spinner.touch()
                operation.take(rank, values[0], values[1])
            elif len(values) == 6:
                signature, data, owner, offset, layout, array = values
                self.published(rank, seq, Publication(signature, data, owner, offset, layout, root_of(array)))
            else:
                self.published(rank, seq, Publication(*values))
        except ProtocolError as error:
            logger.exception("a message of a group was refused")
            self.spoiled(rank, seq, error)

    def spoiled(self, rank: int, seq: int, error: Exception, *, memory: bool = False) -> None:
        """Fail an operation on all ranks, because a message of `rank` for it was refused: no rank waits for ever. A
        message that no other rank can have sent spoils nothing."""
        if rank not in self._words:
            return
        operation = self.operations.get(seq)
        if operation is not None:
            operation.spoiled(rank, error, memory=memory)
        elif self.broken is None and self._is_ahead(seq):
            self._early.setdefault(seq, {}).setdefault(rank, Publication(SPOILED, failure=error))

    def _is_ahead(self, seq: int) -> bool:
        """Whether this rank may still call an operation."""
        if seq < STEPS:
            return bool(seq >= self.seat.next)
        number = step_of(seq)
        return number in self.steps or is_later(number, self.next_step)

    def piece(self, rank: int, seq: int, data: bytes) -> None:
        """Take a piece of an input that does not fit one frame. The last one comes with the publication."""
        self.check(rank, seq)
        if self.broken is None and (seq in self.operations or self._is_ahead(seq)):
            self._pieces.setdefault((seq, rank), []).append(data)

    def check(self, rank: int, seq: int) -> None:
        """Refuse a message that no other rank can have sent.

        Raises:
            ProtocolError: there is no such rank or operation.
        """
        if not 0 <= rank < self.size or rank == self.rank or seq < 0:
            raise ProtocolError(f"operation {seq} of rank {rank} came to rank {self.rank} of a group of {self.size}")

    def published(self, rank: int, seq: int, publication: Publication) -> None:
        """Take a publication of another rank."""
        self.check(rank, seq)
        self._stay_awake()
        pieces = self._pieces.pop((seq, rank), None) if self._pieces else None
        if pieces is not None:
            if type(publication.data) is not bytes:
                raise ProtocolError(f"rank {rank} published no bytes after pieces of its input")
            publication = publication._replace(data=b"".join([*pieces, publication.data]))
        operation = self.operations.get(seq)
        if self.broken is not None and operation is None:
            self._report_to(rank, seq, None)
        elif operation is not None:
            operation.arrived(rank, publication)
        elif self._is_ahead(seq):
            self._early.setdefault(seq, {})[rank] = publication

    def offered(self, rank: int, seq: int, memory: Any) -> None:
        """Take memory that another rank has named for an operation."""
        operation = self.operations.get(seq)
        if operation is not None:
            operation.offered(rank, memory)

    def reported(self, rank: int, seq: int, failure: BaseException | None) -> None:
        """Take the report of another rank that it is done with the memory of an operation."""
        self._stay_awake()
        operation = self.operations.get(seq)
        if operation is not None:
            operation.reported(rank, failure)

    def lost(self, process: bytes, cause: str) -> None:
        """Note that a process has ended, or is not connected any more, and with it its ranks."""
        self.unreached(process, cause)
        ranks = [rank for rank, seat in enumerate(self.seats) if seat.process == process]
        for operation in list(self.operations.values()):
            for rank in ranks:
                operation.reported(rank, None)

    def unreached(self, process: bytes, cause: str) -> None:
        """Break the group, because messages or memory of a process are not reached. The process may live, and its ranks
        use our memory until they report."""
        rank = next((rank for rank, seat in enumerate(self.seats) if seat.process == process), None)
        if rank is not None:
            self.break_up(rank, self.seats[rank].label, cause)

    def break_up(self, rank: int, actor: str, cause: str) -> None:
        """End all operations with `GroupBroken`, now and from now on, and tell the other ranks. The first cause
        counts. Work on GPUs that a group has left behind is ended, too."""
        if self.broken is None or (self.exchange is not None and self.exchange.lingers):
            if self.exchange is not None:
                self.exchange.abort()
            self._end((rank, actor, cause), GroupService.broken, self.key, rank, actor, cause)

    def _end(self, fault: tuple[int, str, str], method: Callable[[Any, *Ts], None], *values: *Ts) -> None:
        self.broken = self.broken or (*fault, self.epoch)
        self.seat.open = False
        others = {self.seats[other].process: other for other in self._others if other != fault[0]}
        for process, other in others.items():
            session = None if process == self.process.process else self._session(other)
            if session is not None:
                self.process.requests.send(session, method, values)
        self._pieces.clear()
        early, self._early = self._early, {}
        for seq, publications in early.items():
            for each in publications:
                self._report_to(each, seq, None)
        self.steps.clear()
        for operation in list(self.operations.values()):
            operation.abandon(GroupBroken(*self.broken))

    def over(self, step: ReducerStep) -> None:
        """Forget a step that all ranks have ended, with what came for operations that this rank has not called."""
        self.steps.pop(step.number, None)
        for seq in [seq for seq in self._early if seq >= STEPS and step_of(seq) == step.number]:
            del self._early[seq]
        for seq, rank in [key for key in self._pieces if key[0] >= STEPS and step_of(key[0]) == step.number]:
            del self._pieces[seq, rank]

    # ---------------------------------------------------------------- leases

    def lease(self, rank: int, object_id: int, offset: int, nbytes: int) -> Any:
        """Make our lease on memory that `rank` has granted: mapped, or to be read where it cannot be mapped."""
        owner = self.seats[rank].process
        session = self.process.sessions.used[owner]
        region = Region(RegionKind.ARRAY, owner, object_id, offset, nbytes, 0, 0, 0, 0)
        if not session.connection.maps:
            return self.process.locations.remote(session, region).holder
        holder = granted(self.process.process, session, region)
        return reached(session, region, holder).holder
