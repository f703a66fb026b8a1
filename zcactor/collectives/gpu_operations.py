"""The operations of a group on arrays that lie on GPUs, each as one member sees it.

The ranks publish their calls as for arrays on the host. Once all have published the same call, each queues its part of
the exchange on its GPU, and has its result: an array that later work is ordered after.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from zcactor.api.future import put
from zcactor.collectives.exchanges import AllToAll
from zcactor.collectives.gpu_exchange import GpuOutcome, Queued, exchange_of
from zcactor.collectives.gpu_sources import Borrowed
from zcactor.collectives.kinds import described
from zcactor.collectives.operations import Collective, Publication
from zcactor.device.array import DeviceArray, copy_result, empty_array, note_written
from zcactor.device.events import ordered
from zcactor.device.memory import DeviceBlock, wait_on_host
from zcactor.device.streams import streams
from zcactor.device.work import of_others
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code
from zcactor.marshal.devices import LibraryArray
from zcactor.marshal.values import decode_small, encode
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from zcactor.collectives.gpu_sources import GpuInput
    from zcactor.collectives.nccl import Communicator, Element
    from zcactor.collectives.operations import Ranked
    from zcactor.device.events import Moment
    from zcactor.device.memory import GpuMemory
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call

__all__ = [
    "AllGatherOnGpus",
    "AllReduceOnGpus",
    "AllToAllOnGpus",
    "BroadcastOnGpus",
    "ConcatenateOnGpus",
    "ReduceScatterOnGpus",
    "receive",
]

_ON_GPUS: Final = ", on GPUs"
"""The end of the signatures of exchanges on GPUs, so that ranks with arrays elsewhere have made another call."""


class OnGpus(Collective, ABC):
    """An exchange of arrays on GPUs.

    Args:
        process, call, signature: as for all operations.
        source: this rank's array.
    """

    def __init__(self, process: LocalProcess, call: Call, signature: str, source: GpuInput) -> None:
        super().__init__(process, call, signature)
        self.source = source
        self.gpu: GpuMemory | None = source.gpu
        self._loan = Borrowed(source.given)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        own = super().begin(member, seq)
        exchange_of(member).bind(self.source.gpu)  # type: ignore[arg-type]
        return own

    def run(self) -> None:
        """Queue this member's part, once all ranks have published the same call."""
        exchange_of(self.member).run(self)  # type: ignore[arg-type]

    @abstractmethod
    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`. Each operation has its own."""

    def refused(self, error: Exception) -> None:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        self._fail(error)

    def release(self) -> None:
        """Give the input back."""
        self._loan.end()


def _queued(
    operation: Any, gpu: GpuMemory, stream: int, sources: Sequence[GpuInput], targets: Sequence[DeviceArray],
    value: Any, outcome: GpuOutcome | None = None, *, writable: bool = False,
) -> Queued:  # fmt: skip
    """Note work that was queued on arrays, and make what gives the result.

    Args:
        operation: the operation.
        gpu, stream: as it was queued.
        sources: the arrays that were read.
        targets: those that were written.
        value: the result; a `LibraryArray`, or a list of such ones, becomes what it stands for.
        outcome: of the exchange; None for one that is to be made, as arrays have no other yet.
        writable: whether the caller may write to an array of ours that is the result.
    """
    moment = gpu.events.record(stream)
    outcome = outcome or GpuOutcome(moment, exchange_of(operation.member))
    for target in targets:
        note_written(target, moment, [outcome])
    written = {id(target.holder) for target in targets}
    for source in sources:
        if id(source.array.holder) not in written:
            source.array.holder.work.has_read(moment)
    made = value if isinstance(value, list) else [value]
    packed: Any = None
    if any(isinstance(each, LibraryArray) and each.library for each in made):
        packed = operation.process.marshaller.pack(value)
    elif isinstance(value, LibraryArray):
        value = _given(value.array, operation.process, writable)
    elif isinstance(value, list):
        value = [_given(each.array, operation.process, writable) for each in value]

    def complete() -> None:
        if packed is None:
            operation.complete(value)
        else:  # it becomes an array of the library in the thread that awaits it, on the stream that is current there
            operation.call.complete(Status.OK, *packed)
            operation._leave()

    return Queued(outcome, complete)


def _given(array: DeviceArray, process: LocalProcess, writable: bool) -> DeviceArray:
    """A result as the caller gets it: as on the host, nobody may write to those that all ranks have."""
    if not writable and isinstance(array.holder, DeviceBlock):
        array.holder.share(process.store)
    return array


def _order(gpu: GpuMemory, stream: int, sources: Sequence[GpuInput], targets: Sequence[DeviceArray]) -> None:
    """Let the work that comes next on a stream begin after that on its arrays. Other ranks cannot know that an array
    turns out to be lost, so the thread of the exchange waits for other processes' work, and for that of other groups.

    Raises:
        ObjectLost: a process has ended before that was done.
        DeviceError: the driver refuses.
    """
    for source in sources:
        wait_on_host(each for each in of_others(source.after) if not _is_before(each, gpu, stream))
        ordered(source.after, gpu.index, stream)
    for target in targets:
        target.holder.work.before_writing(gpu.index, stream)


def _is_before(moment: Moment, gpu: GpuMemory, stream: int) -> bool:
    """Whether work is an earlier exchange of the same group. When that is lost, so are all later ones."""
    return isinstance(moment, GpuOutcome) and moment.moment.lane == gpu.events.lane(stream)


@contextmanager
def _on(gpu: GpuMemory, stream: int) -> Iterator[None]:
    """Let work of arrays be queued on a stream."""
    token = streams.set(MappingProxyType({**streams.get(), gpu.index: stream}))
    try:
        yield
    finally:
        streams.reset(token)


class AllReduceOnGpus(OnGpus):
    """An allreduce.

    Args:
        process, call, source: as for `OnGpus`.
        element, op: of the reduction.
        out: the array for the result, if any, with the caller's object, and the stream on which its library works with
            the object that keeps it.
    """

    def __init__(
        self, process: LocalProcess, call: Call, source: GpuInput, element: Element, op: str,
        out: tuple[GpuInput, Any, tuple[int, object]] | None,
    ) -> None:  # fmt: skip
        array = source.array
        super().__init__(process, call, f"allreduce({described(array.dtype, array.shape)}, {op}{_ON_GPUS})", source)
        self.element, self.op, self.out = element, op, out
        self._target: DeviceArray | None = None

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`. Make the array for the result, so that all ranks hear where memory lacks."""
        own = super().begin(member, seq)
        array, out = self.source.array, self.out
        if out is not None and _fits(array, out[0]):
            self._target = out[0].given
        else:
            self._target = empty_array(array.holder.gpu, array.shape, array.dtype)
        return own

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        source, target, out = self.source, self._target, self.out
        assert target is not None
        _order(gpu, stream, [source], [target])
        if source.array.size:
            count = source.array.size * self.element.parts
            communicator.all_reduce(
                source.array.address, target.address, count, self.element.name, self.op, stream
            )  # fmt: skip
        if out is None:
            return _queued(self, gpu, stream, [source], [target], LibraryArray(target, source.library))
        outcome = GpuOutcome(gpu.events.record(stream), exchange_of(self.member))  # type: ignore[arg-type]
        if target is not out[0].given:
            note_written(target, outcome.moment)
            self.release()  # `out` may be the array itself
            with _on(gpu, stream):
                copy_result(out[0].given, target, outcome)
            target = out[0].given
        queued = _queued(self, gpu, stream, [source], [target], out[1], outcome)
        if out[0].library:  # its library does not ask for the work on its bytes
            gpu.events.record(stream).order(gpu.index, out[2][0])
        return queued


def _fits(array: DeviceArray, out: GpuInput) -> bool:
    """Whether NCCL may write the result for an array to `out`: it has no gaps, and does not lie across the array."""
    if out.array is not out.given:
        return False
    (low, high), (from_, to) = array.bounds(), out.given.bounds()
    return low == from_ or high <= from_ or to <= low


class ReduceScatterOnGpus(OnGpus):
    """A reduce_scatter.

    Args:
        process, call, source: as for `OnGpus`.
        element, op: of the reduction.
        bounds: the rows at which the array is cut, from 0 to its length.
        extra: the further text of the signature.
    """

    def __init__(
        self, process: LocalProcess, call: Call, source: GpuInput, element: Element, op: str, bounds: Sequence[int],
        extra: str,
    ) -> None:  # fmt: skip
        array = source.array
        super().__init__(
            process, call, f"reduce_scatter({described(array.dtype, array.shape)}, {op}{extra}{_ON_GPUS})", source
        )
        self.element, self.op, self._bounds = element, op, bounds

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`. Make the array for the result, so that all ranks hear where memory lacks."""
        own = super().begin(member, seq)
        array, rows = self.source.array, self._bounds[member.rank + 1] - self._bounds[member.rank]
        self._target = empty_array(array.holder.gpu, (rows, *array.shape[1:]), array.dtype)
        return own

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        source, target, element = self.source, self._target, self.element
        array = source.array
        _order(gpu, stream, [source], [target])
        row = array.itemsize * math.prod(array.shape[1:])
        each = row // array.itemsize * element.parts
        lengths = [high - low for low, high in itertools.pairwise(self._bounds)]
        if row and len(set(lengths)) == 1 and lengths[0]:
            communicator.reduce_scatter(
                array.address, target.address, lengths[0] * each, element.name, self.op, stream
            )  # fmt: skip
        elif row and any(lengths):
            with communicator.together():
                for root, (low, rows) in enumerate(zip(self._bounds, lengths, strict=False)):
                    if rows:
                        communicator.reduce(
                            array.address + low * row, target.address, rows * each, element.name, self.op, root, stream
                        )  # fmt: skip
        return _queued(self, gpu, stream, [source], [target], LibraryArray(target, source.library), writable=True)


class _Gathering(OnGpus):
    """An exchange in which each rank has the arrays of all, whose layouts are published."""

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        return super().begin(member, seq)._replace(data=_layout_of(self.source.array))

    def layouts(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """The dtypes and shapes of the arrays of all ranks."""
        return [_layout_from(self.published[rank].data, rank) for rank in range(self.member.size)]


class ConcatenateOnGpus(_Gathering):
    """The arrays of all ranks, one behind the other along axis 0."""

    def __init__(self, process: LocalProcess, call: Call, source: GpuInput) -> None:
        array = source.array
        super().__init__(
            process, call, f"allgather({described(array.dtype, array.shape, rows=False)}{_ON_GPUS})", source
        )

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        source, array = self.source, self.source.array
        lengths = [shape[0] for _, shape in self.layouts()]
        target = empty_array(gpu, (sum(lengths), *array.shape[1:]), array.dtype)
        row = array.itemsize * math.prod(array.shape[1:])
        _order(gpu, stream, [source], [target])
        if len(set(lengths)) == 1:
            if array.nbytes:
                communicator.all_gather(array.address, target.address, array.nbytes, stream)
        else:
            first = list(itertools.accumulate(lengths, initial=0))
            places = [(target.address + a * row, n * row) for a, n in zip(first, lengths, strict=False)]
            _from_each(communicator, array, places, stream)
        return _queued(self, gpu, stream, [source], [target], LibraryArray(target, source.library))


class AllGatherOnGpus(_Gathering):
    """The arrays of all ranks, each as an array of its own."""

    def __init__(self, process: LocalProcess, call: Call, source: GpuInput) -> None:
        super().__init__(process, call, f"allgather(concat=False{_ON_GPUS})", source)

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        targets = [empty_array(gpu, shape, dtype) for dtype, shape in self.layouts()]
        _order(gpu, stream, [self.source], targets)
        _from_each(communicator, self.source.array, [(each.address, each.nbytes) for each in targets], stream)
        value = [LibraryArray(each, self.source.library) for each in targets]
        return _queued(self, gpu, stream, [self.source], targets, value)


def _from_each(communicator: Communicator, own: DeviceArray, places: Sequence[tuple[int, int]], stream: int) -> None:
    """Queue copying the array of each rank to its place: an address and a number of bytes."""
    if any(nbytes for _, nbytes in places):
        with communicator.together():
            for root, (address, nbytes) in enumerate(places):
                if nbytes:
                    communicator.broadcast(own.address, address, nbytes, root, stream)


class BroadcastOnGpus(OnGpus):
    """The array of one rank for all, at that rank. The others do `zcactor.collectives.exchanges.Broadcast`, and learn
    where the array lies by its publication.

    Args:
        process, call, source: as for `OnGpus`.
        root: this rank.
        value: the caller's array.
    """

    def __init__(self, process: LocalProcess, call: Call, root: int, source: GpuInput, value: Any) -> None:
        super().__init__(process, call, f"broadcast(root={root})", source)
        self.root, self.value = root, value

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        return super().begin(member, seq)._replace(data=_layout_of(self.source.array))

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        array, holder = self.source.array, self.source.given.holder
        _order(gpu, stream, [self.source], [])
        if array.nbytes:
            communicator.broadcast(array.address, array.address, array.nbytes, self.root, stream)
        if isinstance(holder, DeviceBlock):
            holder.share(self.process.store)
        return _queued(self, gpu, stream, [self.source], [], self.value)


class _Receiving:
    """The part of a rank that receives the array of another one."""

    gpu: GpuMemory | None = None

    def __init__(self, operation: Any, data: bytes) -> None:
        self._operation = operation
        self._dtype, self._shape = _layout_from(data, operation.root)

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        target = empty_array(gpu, self._shape, self._dtype)
        _order(gpu, stream, [], [target])
        if target.nbytes:
            communicator.broadcast(target.address, target.address, target.nbytes, self._operation.root, stream)
        return _queued(self._operation, gpu, stream, [], [target], LibraryArray(target, ""))

    def refused(self, error: Exception) -> None:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        self._operation._fail(error)


def receive(operation: Any, data: bytes) -> None:
    """Receive the array of the root of a broadcast, which lies on a GPU.

    Args:
        operation: the broadcast, as this rank sees it.
        data: the publication of the root.

    Raises:
        ProtocolError: it is malformed.
    """
    exchange_of(operation.member).run(_Receiving(operation, data))


class AllToAllOnGpus(AllToAll):
    """An array of each rank for each rank. Where another rank has passed other values, all go by reference."""

    def __init__(self, process: LocalProcess, call: Call, parts: Sequence[Any], sources: Sequence[GpuInput]) -> None:
        super().__init__(process, call, parts)
        self.sources = sources
        self.gpu: GpuMemory | None = sources[0].gpu

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        own = super().begin(member, seq)
        self._fits = exchange_of(member).takes(self.sources[0].gpu)  # type: ignore[arg-type]
        return own

    def for_rank(self, rank: int, own: Publication) -> Publication:
        """The publication with the value for `rank`, and with the layout of the array where NCCL can exchange it."""
        found = super().for_rank(rank, own)
        if own.failure is None and self._fits:
            return own._replace(data=[*found.data, _layout_of(self.sources[rank].array)])
        return found

    def run(self) -> None:
        """Queue this member's part; or give the references where a rank has passed something else."""
        others = [self.published[rank].data for rank in range(self.member.size) if rank != self.member.rank]
        if self._fits and all(type(data) is list and len(data) == 2 for data in others):
            exchange_of(self.member).run(self)  # type: ignore[arg-type]
        else:
            super().run()

    def queue(self, communicator: Communicator, gpu: GpuMemory, stream: int) -> Queued:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        targets = dict[int, DeviceArray]()
        rank = self.member.rank
        for other in range(self.member.size):
            if other != rank:
                dtype, shape = _layout_from(self.published[other].data[1], other)
                targets[other] = empty_array(gpu, shape, dtype)
        sent = [source for other, source in enumerate(self.sources) if other != rank]
        _order(gpu, stream, sent, list(targets.values()))
        if any(source.array.nbytes for source in sent) or any(target.nbytes for target in targets.values()):
            with communicator.together():
                for other, target in targets.items():
                    source = self.sources[other].array
                    if source.nbytes:
                        communicator.send(source.address, source.nbytes, other, stream)
                    if target.nbytes:
                        communicator.receive(target.address, target.nbytes, other, stream)
        queued = _queued(self, gpu, stream, sent, list(targets.values()), None)
        # Its own part is a reference already.
        received = [
            LibraryArray(targets[other], self.sources[0].library) if other != rank else None
            for other in range(self.member.size)
        ]
        value = [self.parts[rank] if each is None else put(each) for each in received]
        return queued._replace(complete=lambda: self.complete(value))

    def refused(self, error: Exception) -> None:
        """See `zcactor.collectives.gpu_exchange.Exchanging`."""
        self._fail(error)


def _layout_of(array: DeviceArray) -> bytes:
    """The dtype and the shape of an array, as ranks publish them."""
    return encode((dtype_code(array.dtype), array.shape))


def _layout_from(data: Any, rank: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the shape that a rank has published.

    Raises:
        ProtocolError: it has published none.
    """
    fields = decode_small(data) if type(data) is bytes else None
    if type(fields) is not list or len(fields) != 2 or type(fields[1]) is not list:
        raise ProtocolError(f"rank {rank} published no layout of an array on a GPU")
    if not all(type(each) is int and each >= 0 for each in fields[1]):
        raise ProtocolError(f"rank {rank} published a malformed shape")
    return dtype_from_code(fields[0]), tuple(fields[1])
