"""Arrays on a GPU, for programs without a library for GPUs, and between programs with different ones."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, SupportsIndex

import numpy as np

from zcactor.device.driver import PATTERNS
from zcactor.device.interchange import cuda_interface, dlpack, to_cupy, to_torch
from zcactor.device.kinds import KDL_CUDA
from zcactor.device.memory import DeviceBlock, wait_on_host
from zcactor.device.streams import current_stream
from zcactor.exception_pickling import shown_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from zcactor.device.events import Moment
    from zcactor.device.memory import GpuMemory
    from zcactor.device.work import Work

__all__ = [
    "MOST_ROWS", "DeviceArray", "DeviceHolder", "Gone", "Rows", "array_over", "copy_result", "empty_array",
    "few_rows", "note_written", "rows_of",
]  # fmt: skip

MOST_ROWS: Final = 256
"""Copies that are queued for one array, at most: each takes the driver microseconds. With more it is faster to copy all
bytes between the first and the last element to the host and to pick the elements there."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One copy, for `zcactor.device.driver.GpuDriver.copy`."""

    destination: int
    """Bytes from the first element of the destination."""
    source: int
    count: int
    nbytes: int
    strides: tuple[int, int]


def rows_of(shape: Sequence[int], into: Sequence[int], out: Sequence[int], itemsize: int) -> Iterator[Rows]:
    """The copies that bring all elements of one array into another. Axes that are contiguous in both are one row, and
    the axis around them is the rows of one copy. Each further axis, and one that goes backwards, is a copy an element.

    Args:
        shape: elements along each axis.
        into: strides in bytes of the destination.
        out: the same of the source.
        itemsize: bytes of an element.
    """
    if 0 in shape:
        return
    axes = [(length, to, from_) for length, to, from_ in zip(shape, into, out, strict=True) if length > 1]
    axes.sort(key=lambda axis: -abs(axis[1]))
    nbytes, count, strides = itemsize, 1, (itemsize, itemsize)
    while axes and axes[-1][1:] == (nbytes, nbytes):
        nbytes *= axes.pop()[0]
    if axes and min(axes[-1][1:]) >= nbytes:
        length, *last = axes.pop()
        count, strides = length, (last[0], last[1])
    for place in product(*(range(length) for length, _, _ in axes)):
        yield Rows(
            sum(at * to for at, (_, to, _) in zip(place, axes, strict=True)),
            sum(at * from_ for at, (_, _, from_) in zip(place, axes, strict=True)),
            count,
            nbytes,
            strides,
        )


def few_rows(shape: Sequence[int], into: Sequence[int], out: Sequence[int], itemsize: int) -> list[Rows] | None:
    """The result of `rows_of` as a list; None where there are more than `MOST_ROWS`."""
    found = list(islice(rows_of(shape, into, out, itemsize), MOST_ROWS + 1))
    return None if len(found) > MOST_ROWS else found


_HANDED_OVER: Final = "this array was handed over by zc.move; only its receiver may use it, here it is unusable"


class DeviceHolder(Protocol):
    """The holder of an array's bytes: a block of this process, or a lease."""

    @property
    def gpu(self) -> GpuMemory:
        """The GPU by which this process reaches the bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def work(self) -> Work:
        """The work that is queued on the bytes."""

    @property
    def readonly(self) -> bool:
        """Whether nobody may write to the bytes."""


class Gone:
    """The holder of an array that was handed over; it keeps the former one."""

    def __init__(self, former: DeviceHolder) -> None:
        self.former: Final = former

    def _used(self) -> NoReturn:
        raise ValueError(_HANDED_OVER)

    gpu = nbytes = work = readonly = property(_used)


_READ_ONLY: Final = "the array is read-only: it was passed to an actor, or received from one; write to x.copy()"
_NO_COMPARING: Final = (
    "nothing looks at elements of an array on a GPU: compare zc.gpu.to_host(x) or x.as_cupy(), and use `x is y` and "
    "len(x) for the arrays themselves"
)
_CAN_REFUSE: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether NumPy can be told to make no copy: since 2.1."""
_STAND_IN: Final = np.zeros(1, np.uint8)
"""The bytes of all layouts. NumPy makes views of layouts, and never looks at the bytes."""


def _layout(shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int] | None = None) -> npt.NDArray[Any]:
    """An array of that layout over memory that must not be looked at."""
    wanted = tuple(shape), dtype, None if strides is None else tuple(strides), dtype.char
    # NumPy calls some types equal that differ: of structures, and long and long long.
    return _known_layout(*wanted) if dtype.isbuiltin == 1 else _new_layout(*wanted)


def _new_layout(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: Sequence[int] | None, _: str
) -> npt.NDArray[Any]:
    if strides is None:
        sizes = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides = sizes if 0 not in shape else [dtype.itemsize] * len(shape)
    if not dtype.itemsize:
        return np.empty(shape, dtype)
    # NumPy's as_strided does not know the types of ml_dtypes.
    elements = np.ndarray((), f"V{dtype.itemsize}", np.lib.stride_tricks.as_strided(_STAND_IN, (dtype.itemsize,), (1,)))
    made = np.lib.stride_tricks.as_strided(elements, tuple(shape), tuple(strides), writeable=False)
    return made.view(dtype)


_known_layout: Final = functools.lru_cache(maxsize=1024)(_new_layout)
"""Programs use few layouts, and NumPy takes 30 us to make one."""


def _reshaped(view: npt.NDArray[Any], axes: Any) -> npt.NDArray[Any]:
    """`numpy.reshape` without a copy, which would look at the bytes."""
    if _CAN_REFUSE:
        return view.reshape(axes, copy=False)
    made = view.view()
    try:
        made.shape = axes
    except AttributeError as error:
        raise ValueError("Unable to avoid creating a copy while reshaping.") from error
    return made


def _is_index(key: object) -> bool:
    """Whether an index makes a view: an int, a slice, None or an ellipsis."""
    if key is None or key is Ellipsis or isinstance(key, slice):
        return True
    return isinstance(key, SupportsIndex) and not isinstance(key, bool | np.bool_ | np.ndarray)


class DeviceArray:
    """An array on a GPU. `zcactor.empty` and its relatives make it, and receivers get it.

    It has views, fills and copies, and no arithmetic. Operations are queued on the stream of `zcactor.gpu.stream`, else
    on the default stream, and nobody waits for them. They are ordered after all that other methods of arrays over the
    same bytes have queued, on any stream.

    An array is read-only once it was passed to an actor, here and there.
    """

    __slots__ = ("__weakref__", "_address", "_holder", "_view")

    def __init__(self, holder: DeviceHolder, address: int, view: npt.NDArray[Any]) -> None:
        self._holder = holder
        self._address = address
        """The address of the first element."""
        self._view = view
        """An array of the same layout, whose bytes must not be looked at."""

    @property
    def holder(self) -> DeviceHolder:
        """The holder of the bytes."""
        return self._holder

    @property
    def address(self) -> int:
        """The address of the first element, which no code of the host may touch."""
        return self._address

    def bounds(self) -> tuple[int, int]:
        """The lowest address of the elements' bytes, and the address after the highest."""
        low = high = self._address
        view = self._view
        if view.flags.c_contiguous:  # the usual case, which need not look at each axis
            return low, low + view.nbytes
        if view.size:
            reaches = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
            low += sum(reach for reach in reaches if reach < 0)
            high += sum(reach for reach in reaches if reach > 0) + self.itemsize
        return low, high

    # ---- facts

    @property
    def shape(self) -> tuple[int, ...]:
        """The elements along each axis."""
        return self._view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return self._view.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return self._view.strides

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._view.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._view.size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._view.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._view.nbytes

    @property
    def device(self) -> str:
        """The GPU, as ``"cuda:0"``, by the number that it has in this process."""
        return f"cuda:{self._holder.gpu.index}"

    @property
    def uuid(self) -> str:
        """The UUID of the GPU, which is the same in all processes of a host."""
        return self._holder.gpu.uuid

    @property
    def readonly(self) -> bool:
        """Whether `fill` and `copy_from` refuse."""
        return self._holder.readonly

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        if isinstance(self._holder, Gone):
            return f"<zcactor.gpu.DeviceArray of shape {self.shape}, {self.dtype}, handed over>"
        state = ", read-only" if self.readonly else ""
        return f"<zcactor.gpu.DeviceArray of shape {self.shape}, {self.dtype}, on {self.device}{state}>"

    def hand_over(self) -> None:
        """Let every use raise ValueError from now on."""
        self._holder = Gone(self._holder)

    def take_back(self) -> None:
        """Undo `hand_over`: the message that was to carry the array was never sent."""
        if isinstance(self._holder, Gone):
            self._holder = self._holder.former
            if isinstance(self._holder, DeviceBlock):
                self._holder.open_again()

    # ---- views

    def _viewed(self, view: npt.NDArray[Any]) -> DeviceArray:
        moved = view.__array_interface__["data"][0] - self._view.__array_interface__["data"][0]
        return DeviceArray(self._holder, self._address + moved, view)

    def __getitem__(self, key: Any) -> DeviceArray:
        keys = key if isinstance(key, tuple) else (key,)
        wrong = [each for each in keys if not _is_index(each)]
        if wrong:
            raise TypeError(
                f"arrays on a GPU take ints, slices, None and ... as indexes, not {shown_class(type(wrong[0]))}; for "
                "more use zc.gpu.to_host(x)"
            )
        return self._viewed(self._view[keys if any(each is Ellipsis for each in keys) else (*keys, ...)])

    def __iter__(self) -> NoReturn:
        raise TypeError("arrays on a GPU have no iterator; take parts by indexes, or use zc.gpu.to_host(x)")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(_NO_COMPARING)

    def __bool__(self) -> NoReturn:
        raise TypeError(_NO_COMPARING)

    __hash__ = object.__hash__

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same elements with other axes.

        Args:
            shape: elements along each axis, as a tuple or one by one; one may be -1.

        Raises:
            ValueError: the number of elements differs, or the strides would need a copy: use ``x.copy()`` first.
        """
        axes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self._viewed(_reshaped(self._view, axes))

    @property
    def T(self) -> DeviceArray:
        """The axes in reverse."""
        return self._viewed(self._view.T)

    def transpose(self, *axes: Any) -> DeviceArray:
        """The axes in another order, by default reversed.

        Raises:
            ValueError: `axes` are not each axis once.
        """
        return self._viewed(self._view.transpose(*axes))

    def view(self, dtype: npt.DTypeLike) -> DeviceArray:
        """The same bytes as elements of another type.

        Raises:
            TypeError: the elements of `dtype` are Python objects.
            ValueError: the bytes of the last axis are not whole elements of that type.
        """
        return self._viewed(self._view.view(np.dtype(dtype)))

    def view_of_bytes(self) -> DeviceArray:
        """The bytes of a contiguous array, as one axis of uint8.

        Raises:
            ValueError: the array is not contiguous.
        """
        if not self._view.flags.c_contiguous:
            raise ValueError("an array that is not contiguous has other bytes between its elements")
        return DeviceArray(self._holder, self._address, _layout((self.nbytes,), np.dtype(np.uint8)))

    # ---- work

    def fill(self, value: Any) -> None:
        """Queue setting all elements to `value`.

        Args:
            value: one element, converted by the rules of `numpy.full`.

        Raises:
            ValueError: the array is read-only, or `value` cannot become an element.
            OverflowError: `value` is an int beyond those of the dtype.
            TypeError: `value` is of a type that cannot become an element.
            DeviceError: the driver refuses.
        """
        self._writable()
        pattern = np.full((), value, self.dtype).tobytes()
        if not self.size:
            return
        width = min(self.itemsize, 4)
        if not self._view.flags.c_contiguous or self.itemsize not in PATTERNS or self._address % width:
            self._copy_from_host(np.full(self.shape, value, self.dtype))
            return
        gpu, work, stream = self._now()
        work.before_writing(gpu.index, stream)
        gpu.driver.fill(gpu.index, self._address, pattern, self.size, stream)
        note_written(self, gpu.events.record(stream))

    def copy_from(self, source: DeviceArray | npt.NDArray[Any]) -> None:
        """Queue copying all elements of another array. From a NumPy array, or from a GPU whose memory this one cannot
        access, it waits until that is done.

        Args:
            source: an array of the same shape and dtype, of any GPU or of NumPy.

        Raises:
            ValueError: the array is read-only, or shape or dtype differ.
            TypeError: `source` is no array.
            ObjectLost: the elements of `source` are never computed; see `copy_to_host`.
            DeviceError: the driver refuses.
        """
        self._writable()
        if not isinstance(source, DeviceArray | np.ndarray):
            raise TypeError(f"copy_from takes an array on a GPU or a NumPy array, not {shown_class(type(source))}")
        if source.shape != self.shape or source.dtype != self.dtype:
            raise ValueError(
                f"an array of shape {source.shape} and dtype {source.dtype} does not fit one of {self.shape} and "
                f"{self.dtype}; it must be the same"
            )
        if isinstance(source, np.ndarray):
            self._copy_from_host(source)
            return
        if source._holder is self._holder:
            source = source.copy()  # they may overlap
        self._queue(source)

    def copy(self) -> DeviceArray:
        """Queue copying the elements into a new array, which is writable and contiguous, on the same GPU.

        Raises:
            OutOfMemory: the GPU has no room.
            ObjectLost: the elements are never computed; see `copy_to_host`.
            DeviceError: the driver refuses.
        """
        made = empty_array(self._holder.gpu, self.shape, self.dtype)
        made._queue(self)
        return made

    def _now(self) -> tuple[GpuMemory, Work, int]:
        gpu = self._holder.gpu
        return gpu, self._holder.work, current_stream(gpu.index)

    def _writable(self) -> None:
        if self._holder.readonly:
            raise ValueError(_READ_ONLY)

    def _queue(self, source: DeviceArray, outcomes: Sequence[Moment] = ()) -> None:
        gpu, work, stream = self._now()
        copies = few_rows(self.shape, self.strides, source.strides, self.itemsize)
        if copies is None or not gpu.driver.can_access(gpu.index, source._holder.gpu.index):
            values = np.empty(source.shape, source.dtype)
            source.copy_to_host(values)
            self._copy_from_host(values, outcomes)
            return
        read = source._holder.work
        others = read.before_reading(gpu.index, stream)
        for each in outcomes:
            work.comes_after(each)  # before the copy, so that no reader takes its bytes for computed ones
        work.before_writing(gpu.index, stream)
        self._copy(gpu, copies, self._address, source._address, stream)
        moment = gpu.events.record(stream)
        note_written(self, moment, [*outcomes, *others])
        read.has_read(moment)

    @staticmethod
    def _copy(gpu: GpuMemory, copies: Sequence[Rows], into: int, out: int, stream: int) -> None:
        for rows in copies:
            to, from_ = into + rows.destination, out + rows.source
            gpu.driver.copy(gpu.index, to, from_, rows.count, rows.nbytes, rows.strides, stream)

    def _copy_from_host(self, source: npt.NDArray[Any], outcomes: Sequence[Moment] = ()) -> None:
        gpu, work, stream = self._now()
        copies = few_rows(self.shape, self.strides, source.strides, self.itemsize)
        if copies is None:
            low, scratch, view = self._on_host(read=not _is_whole(self))
            view[...] = source
            source, copies, address = scratch, [Rows(0, 0, 1, scratch.nbytes, (0, 0))], low
        else:
            address = self._address
        for each in outcomes:
            work.comes_after(each)
        work.before_writing(gpu.index, stream)
        self._copy(gpu, copies, address, source.__array_interface__["data"][0], stream)
        moment = gpu.events.record(stream)
        note_written(self, moment, outcomes)
        wait_on_host([moment])

    def _on_host(self, *, read: bool = True) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """Room on the host for all bytes from the first to the last of the elements, with a copy of them where they are
        `read`: their address here, the room, and the elements in it."""
        low, high = self.bounds()
        scratch = np.empty(high - low, np.uint8)
        if read:
            DeviceArray(self._holder, low, _layout(scratch.shape, scratch.dtype)).copy_to_host(scratch)
        return low, scratch, np.ndarray(self.shape, self.dtype, scratch, self._address - low, self.strides)

    def copy_to_host(self, target: npt.NDArray[Any]) -> None:
        """Copy the elements into a NumPy array, and wait until that is done; `zcactor.gpu.to_host` makes the array.

        Args:
            target: an array of the same shape and dtype, writable.

        Raises:
            ObjectLost: the process that computes the elements, or those that they are computed from, has ended before
                that was done.
            DeviceError: the driver refuses.
        """
        gpu, work, stream = self._now()
        copies = few_rows(self.shape, target.strides, self.strides, self.itemsize)
        if copies is None:
            target[...] = self._on_host()[2]
            return
        wait_on_host(work.writes())  # not only the stream: it does not notice that a process has ended
        work.before_reading(gpu.index, stream)
        self._copy(gpu, copies, target.__array_interface__["data"][0], self._address, stream)
        moment = gpu.events.record(stream)
        work.has_read(moment)
        wait_on_host([moment])

    # ---- other libraries

    def as_cupy(self) -> Any:
        """A ``cupy.ndarray`` over the same bytes, whose work is ordered after that which is queued here. CuPy knows no
        read-only arrays: nobody may write to the bytes of one that is.

        Raises:
            ImportError: CuPy is not installed.
            DeviceError: the driver refuses.
        """
        return to_cupy(self)

    def as_torch(self) -> Any:
        """A ``torch.Tensor`` over the same bytes. As for `as_cupy`, nobody may write to the bytes of a read-only array.

        Raises:
            ImportError: PyTorch is not installed.
            ValueError: a stride is negative.
            BufferError: PyTorch has no such dtype.
            DeviceError: the driver refuses.
        """
        return to_torch(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array for other libraries, version 3 of Numba's protocol. The stream is that of `zcactor.gpu.stream`."""
        return cuda_interface(self)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of DLPack for other libraries.

        Args:
            stream: the consumer's stream, whose work comes after that which is queued here; None or 1 for the default
                stream, -1 for no order.
            max_version: the latest version of DLPack that the consumer knows.
            dl_device: the wanted device.
            copy: whether the consumer wants a copy.

        Raises:
            BufferError: DLPack has no such dtype, another device is wanted, or the array is read-only and the
                consumer's version cannot say so.
            ValueError: `stream` is malformed.
            DeviceError: the driver refuses.
        """
        return dlpack(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number for CUDA, and the GPU's index."""
        return KDL_CUDA, self._holder.gpu.index

    def __reduce__(self) -> NoReturn:
        raise TypeError("an array on a GPU cannot be pickled; pass zc.gpu.to_host(x)")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("an array on a GPU does not become a NumPy array by itself: use zc.gpu.to_host(x)")


def array_over(
    holder: DeviceHolder, address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> DeviceArray:
    """Make an array over bytes that a holder keeps.

    Args:
        holder: the holder.
        address: address of the first element.
        shape: elements along each axis.
        dtype: type of the elements.
        strides: bytes from one element to the next along each axis.
    """
    return DeviceArray(holder, address, _layout(shape, dtype, strides))


def empty_array(gpu: GpuMemory, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
    """Make an uninitialised, C-contiguous array on a GPU, aligned to 256 bytes.

    Raises:
        OutOfMemory: the GPU has no room.
        DeviceError: the driver refuses.
    """
    view = _layout(shape, dtype)
    block = DeviceBlock(gpu, view.nbytes)
    return DeviceArray(block, block.address, view)


def copy_result(array: DeviceArray, result: DeviceArray, outcome: Moment) -> None:
    """Queue copying the result of an exchange; see `DeviceArray.copy_from`. From now on the array is lost where the
    exchange is.

    Args:
        array: the array, of the same shape and dtype, over other bytes.
        result: the result, whose own writes leave the outcome out: a loss may not fail the rank that is not at fault.
        outcome: of the exchange.

    Raises:
        ValueError: the array is read-only.
        DeviceError: the driver refuses.
    """
    array._writable()
    array._queue(result, [outcome])


def note_written(array: DeviceArray, moment: Moment, others: Sequence[Moment] = ()) -> None:
    """Note that all elements were written; see `zcactor.device.work.Work.has_written`."""
    array.holder.work.has_written(moment, others, whole=_is_whole(array))


def _is_whole(array: DeviceArray) -> bool:
    """Whether the elements are all bytes of the holder. A library's array may have some at the same place, and gaps."""
    extent = array.itemsize
    axes = [(abs(stride), length) for length, stride in zip(array.shape, array.strides, strict=True) if length > 1]
    for stride, length in sorted(axes):
        if stride != extent:
            return False
        extent *= length
    return array.nbytes == array.holder.nbytes
