"""The operations of a group, each as one member sees it: its publication, and its work on all publications.

Every operation begins with one *publication* from each member to each other: its call as text, which has to agree, and
its part of the data. With all of them a member either has its result at once, or does its share of the work in memory
that the members map, says that it is *done*, and has the result with the last of these reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from zcactor.errors import ConnectionLost, GroupMismatch, ProtocolError
from zcactor.exception_pickling import bare, text_of, type_name
from zcactor.lazy_numpy import np
from zcactor.native import hot
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zcactor.collectives.hierarchy import Hierarchy
    from zcactor.collectives.kinds import Array
    from zcactor.peers.seating import Seat
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call
    from zcactor.transport.mapping import Mapped

__all__ = ["SPOILED", "Barrier", "Collective", "Ending", "Publication", "Ranked", "Refusal", "for_all_ranks", "sealed"]

SPOILED: Final = ""
"""In place of a call: the publication that came was refused."""


class Ranked(Protocol):
    """The member that an operation belongs to; see `zcactor.collectives.member.Member`."""

    rank: int
    size: int
    eager_nbytes: int
    hierarchy: Hierarchy
    seats: Sequence[Seat]
    seat: Any
    """The native part, which has the number of the next operation."""

    def publish(self, operation: Collective, publication: Publication) -> None:
        """Publish an operation to all other ranks that was held back at its beginning."""

    def ended(self, operation: Collective) -> None:
        """Forget an operation that has ended here."""

    def offer(self, seq: int, block: Any) -> None:
        """Name the memory for the result to all other ranks."""

    def lend(self, rank: int, seq: int, piece: Any) -> None:
        """Let another rank read bytes of ours."""

    def report(self, seq: int, failure: BaseException | None, ranks: Iterable[int] | None = None) -> None:
        """Tell other ranks, or all, that this one is done with their memory of an operation."""

    def unreached(self, process: bytes, cause: str) -> None:
        """Break the group, because the memory of a process is not reached."""

    def writable(self, result: Any) -> Block | Mapped:
        """The memory of a result as this process writes to it."""

    async def input_of(self, rank: int, seq: int) -> tuple[int, bytes]:
        """The place of another rank's input in the arena of that rank's process, where the input is copied to."""


class Ending(Protocol):
    """The part of a member that ends with it, or later."""

    @property
    def lingers(self) -> bool:
        """Whether work may be under way yet after `close`. All ranks are needed for the work."""

    def abort(self) -> None:
        """End it at once, as the group is broken. Idempotent."""

    def close(self) -> None:
        """End it in order, as nobody holds the group any more. Idempotent."""


class Publication(NamedTuple):
    """The message of one rank to the others at its call."""

    signature: str
    data: Any = None
    """Bytes, an array or another value that came in the frame; our own publication has our array."""
    owner: bytes = b""
    """Process in whose arena the input lies."""
    offset: int = 0
    layout: bytes = b""
    result: Any = None
    """Memory for the result, from the rank that gives it; for a rank on another host, the sender's input. From another
    process it comes as a lease."""
    failure: BaseException | None = None
    """The error for which the rank cannot take part."""


def sealed(result: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The result of an operation as an array, in memory that nobody writes to any more, because all members are done.

    Args:
        result: the memory that the members have written to: a block of this process, or the lease of another's.
        dtype, shape: of the array.
    """
    if type(result) is Block:
        result.written = False
        result.store.seal(result)
    array: Array = np.asarray(result).view(dtype).reshape(shape)
    return array


class Collective:
    """One operation as one member sees it. Used on the loop's thread, except for `__init__`.

    Args:
        process: this process.
        call: the promise of the result.
        signature: the call as text. It has to be the same on all ranks.
    """

    # Attributes that rarely change are defaults of the class, because an operation may be as short as a call.
    whole = False
    """Whether an array that is published travels in the frame, and is not shared."""
    held = False
    """Whether the others get our publication later, with the result."""
    meeting: Any = None
    """The native part's collection of the publications; None where Python takes them."""
    step: Any = None
    """The step of a reducer that the operation belongs to; see `zcactor.collectives.steps.ReducerStep`."""
    lent: Array | None = None
    """The input, where it is read-only until the end."""
    claimed: Array | None = None
    """The array that takes the result, and is read-only until then."""
    member: Ranked
    seq = -1
    working = False
    told = False
    """Whether the others know that this member is done with their memory."""
    failure: BaseException | None = None

    def __init__(self, process: LocalProcess, call: Call, signature: str) -> None:
        self.process = process
        self.call = call
        self.signature = signature
        self.published: dict[int, Publication] = {}
        """Publications by rank, our own among them."""
        self.readers: set[int] = set()
        """Other ranks that may read our memory: those that have not said that they are done."""

    # ---------------------------------------------------------------- for the member

    def place(self, member: Ranked) -> int:
        """Take the next number in the order of the group, or of the step.

        Raises:
            ValueError: a step has no more operations.
        """
        if self.step is not None:
            place: int = self.step.next_place()
            return place
        seat = member.seat
        seq: int = seat.next
        seat.next = seq + 1
        return seq

    def begin(self, member: Ranked, seq: int) -> Publication:
        """Take number `seq` in the order of the group. Returns our own publication."""
        self.member, self.seq = member, seq
        return Publication(self.signature)

    def for_rank(self, rank: int, own: Publication) -> Publication:
        """Our publication for `rank`, made of the `own` one."""
        del rank
        return own

    def take(self, rank: int, signature: str, data: Any) -> None:
        """Take the publication of `rank`, which is no more than a call and a value."""
        self.arrived(rank, Publication(signature, data))

    def arrived(self, rank: int, publication: Publication) -> None:
        """Take the publication of `rank`."""
        if self.published.setdefault(rank, publication) is not publication:
            raise ProtocolError(f"rank {rank} published operation {self.seq} of a group twice")
        if len(self.published) == self.member.size:
            self._all_told()

    def _all_told(self) -> None:
        if self.failure is None:
            self._all_here()
        elif not self.told:  # a rank that had all of them before us has failed, or we have refused a message
            self.worked(self.failure)

    def spoiled(self, rank: int, error: Exception, *, memory: bool) -> None:
        """Fail on all ranks, because a message of `rank` was refused.

        Args:
            rank: the sender.
            error: the cause.
            memory: whether the message names memory; otherwise it is a publication, and spoils nothing where the rank
                has published.
        """
        if memory:
            if self.failure is None:
                self.failure = error
            if not self.working and not self.told and not self.missing_publications:
                self.worked(error)
        elif rank in self.missing_publications:
            self.arrived(rank, Publication(SPOILED, failure=error))

    def excuse(self, error: BaseException) -> None:
        """Fail, because a rank has ended its step without this operation: nobody does a part of it."""
        self._leave()
        self.call.fail(error)

    def offered(self, rank: int, memory: Any) -> None:
        """Take memory that `rank` has named after the publications: for the result, or bytes to read.

        Raises:
            ProtocolError: it is not what the operation needs.
        """
        del rank, memory
        raise ProtocolError(f"memory was named for {self.signature}, which needs none")

    def reported(self, rank: int, failure: BaseException | None) -> None:
        """Take the report of `rank` that it reads and writes no memory of this operation any more."""
        self.readers.discard(rank)
        if self.failure is None:
            self.failure = failure
        if self.failure is not None and not self.working and not self.told:
            if len(self.published) < self.member.size:
                return
            self._tell(None)  # this rank waits for memory that does not come
        if not self.readers and self.told:
            self._end()

    def abandon(self, error: BaseException) -> None:
        """Fail the call, because a member is gone. Memory that others may still read is kept until they report."""
        if self.failure is None:
            self.failure = error
        if not self.working:
            if not self.told:
                self._tell(None)
            if not self.readers:
                self._leave()
        self.call.fail(error)

    @property
    def missing_publications(self) -> tuple[int, ...]:
        """The ranks that have not called."""
        return tuple([rank for rank in range(self.member.size) if rank not in self.published])

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not called, or otherwise those that are not done."""
        return self.missing_publications or tuple(sorted(self.readers))

    # ---------------------------------------------------------------- for subclasses

    def _all_here(self) -> None:
        first = self.published[0]
        for rank in range(self.member.size):
            publication = self.published[rank]
            if publication.failure is not None:
                if publication.signature == SPOILED:  # at the other ranks it was not, and they do their parts
                    self.worked(publication.failure)
                else:
                    self._fail(publication.failure)
                return
        for rank in range(1, self.member.size):
            theirs = self.published[rank].signature
            if theirs != first.signature:
                self._fail(GroupMismatch((0, rank), (first.signature, theirs)))
                return
        try:
            self.run()
        except Exception as error:  # of this member alone; the others must not wait for it
            self.worked(error)

    def run(self) -> None:
        """Do this member's part, once all ranks have published the same call."""
        self.complete(None)

    def with_memory(self, result: Any, use: Callable[[Block | Mapped], None]) -> None:
        """Call ``use(memory)`` with the memory of `result` as this process writes to it: at once, or once it has write
        access. A connection that was opened from both ends at the same moment may have been replaced since."""
        try:
            memory = self.member.writable(result)
        except (ConnectionLost, LookupError):
            self.working = True
            self.process.tasks.start(self._open(result, use))
            return
        use(memory)

    async def _open(self, result: Any, use: Callable[[Block | Mapped], None]) -> None:
        try:
            session = await self.process.connections.connect(result.owner)
            await session.connection.open_writable()
            use(self.member.writable(result))
        except Exception as error:  # of this member alone; the others must not wait for it
            self.worked(error)

    def worked(self, failure: BaseException | None = None) -> None:
        """Note the end of this member's work on memory that others share, and tell them."""
        self.working = False
        if failure is not None:
            failure = bare(failure, None)  # its frames hold this operation, and so its memory
            if self.failure is None:
                self.failure = failure
        self._tell(failure)
        if not self.readers:
            self._end()

    def _tell(self, failure: BaseException | None) -> None:
        self.told = True
        self.member.report(self.seq, failure)

    def _end(self) -> None:
        """Finish, once nobody reads or writes memory of this operation."""
        if self.failure is not None:
            self._fail(self.failure)
            return
        try:
            self.finish()
        except Exception as error:
            self._fail(error)

    def finish(self) -> None:
        """Make the result, once every member has done its part."""
        self.complete(None)

    def complete(self, value: Any) -> None:
        """Give the result. A thread that waits for it finds the input writable again."""
        self._leave()
        self.call.complete_plain(value)

    def _fail(self, error: BaseException) -> None:
        self._leave()
        self.call.fail(error)

    def _leave(self) -> None:
        self.release()
        self.member.ended(self)

    def release(self) -> None:
        """Give back the arrays that were lent and claimed. Idempotent."""
        lent, self.lent = self.lent, None
        if lent is not None:
            hot.give_back(lent)
        claimed, self.claimed = self.claimed, None
        if claimed is not None:
            hot.give_back(claimed)


class Barrier(Collective):
    """Nothing but the publications."""


def for_all_ranks(error: BaseException) -> Exception:
    """The failure of one rank as all ranks get it: as text, if it would end more of another rank than an operation."""
    if issubclass(type(error), Exception):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{type_name(type(error))}: {text_of(error)}")


class Refusal(Collective):
    """The place of an operation that this rank cannot take part in: all ranks get the error.

    Args:
        process, call: as for all operations.
        what: the call as text.
        error: the cause.
    """

    def __init__(self, process: LocalProcess, call: Call, what: str, error: BaseException) -> None:
        super().__init__(process, call, what)
        self.error = for_all_ranks(error)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        return Publication(self.signature, failure=self.error)
