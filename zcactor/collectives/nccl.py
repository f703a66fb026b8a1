"""NCCL, which exchanges memory between the GPUs of a group's ranks, by CuPy's binding.

CuPy and NCCL are imported when a group is first given arrays on GPUs.
"""

from __future__ import annotations

import importlib
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from zcactor.collectives.kinds import check_op

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import numpy as np

__all__ = ["Communicator", "CupyNccl", "Element", "Nccl", "element_of", "found_nccl"]

_ELEMENTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "int8": 0,
        "uint8": 1,
        "int32": 2,
        "uint32": 3,
        "int64": 4,
        "uint64": 5,
        "float16": 6,
        "float32": 7,
        "float64": 8,
        "bfloat16": 9,
    }
)
"""NCCL's numbers of types (``ncclDataType_t`` of nccl.h)."""
_OPS: Final[Mapping[str, int]] = MappingProxyType({"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4})
"""NCCL's numbers of operations (``ncclRedOp_t``); a mean is its ``ncclAvg``."""
_BYTES: Final = _ELEMENTS["uint8"]
_OLDEST: Final = 21000
"""NCCL 2.10, the first with ``ncclAvg`` and bfloat16."""


class Element(NamedTuple):
    """The type of the elements of a reduction as NCCL has it."""

    name: str
    """The name of its dtype."""
    parts: int
    """Number of them in an element of the array: 2 for complex numbers."""


class Communicator(Protocol):
    """The end of one rank. Its methods queue work on a stream and return. One thread calls them at a time, except for
    `abort`. Memory is given by addresses on the rank's GPU.

    Raises:
        Exception: NCCL has failed. The communicator is of no use any more.
    """

    def all_reduce(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        """Queue the reduction of `count` elements of all ranks to each of them; `target` may be `source`."""

    def reduce(self, source: int, target: int, count: int, element: str, op: str, root: int, stream: int) -> None:
        """Queue the reduction of `count` elements of all ranks to `target` at rank `root`."""

    def reduce_scatter(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        """Queue the reduction of `count` elements for each rank, whose `target` gets its own."""

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Queue putting `nbytes` of each rank one behind the other at each."""

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Queue copying `nbytes` from `source` at rank `root` to `target` at each rank."""

    def send(self, source: int, nbytes: int, peer: int, stream: int) -> None:
        """Queue sending bytes to a rank, within `together`."""

    def receive(self, target: int, nbytes: int, peer: int, stream: int) -> None:
        """Queue receiving bytes from a rank, within `together`."""

    def together(self) -> AbstractContextManager[None]:
        """Queue what is called within the block as one: no order among it is waited for."""

    def check(self) -> None:
        """Raise the error that work has met since it was queued, such as a lost link or peer; none in most cases."""

    def abort(self) -> None:
        """End all work that was queued, done or not. Any thread may call this, at any time."""

    def destroy(self) -> None:
        """Give the communicator up, once all work is done."""


class Nccl(Protocol):
    """The maker of communicators."""

    def new_id(self) -> Any:
        """The id of a new communicator, for all its ranks. It is sent to them as it is."""

    def connect(self, device: int, size: int, rank: int, name: Any) -> Communicator:
        """Make the end of one rank. It returns when all ranks have called it.

        Args:
            device: the index of the rank's GPU in this process.
            size: number of ranks.
            rank: of this end.
            name: the result of `new_id` at one of the ranks.
        """


def element_of(dtype: np.dtype[Any], op: str, what: str) -> Element:
    """The elements by which NCCL reduces arrays of `dtype`.

    Raises:
        ValueError: there is no such op.
        TypeError: the op is not defined for `dtype`, or NCCL has no such elements.
    """
    check_op(dtype, op, what)
    if dtype.kind == "c" and op in {"sum", "mean"} and dtype.isnative and dtype.itemsize <= 16:
        return Element(f"float{dtype.itemsize * 4}", 2)  # added part by part
    name = "uint8" if dtype.kind == "b" else dtype.name
    if name not in _ELEMENTS or not dtype.isnative:
        raise TypeError(
            f"{what}: NCCL has no {op} of dtype {dtype} on GPUs; it reduces {', '.join(_ELEMENTS)}, bools (min, max) "
            "and complex numbers (sum, mean); pass zc.gpu.to_host(x), or another dtype"
        )
    return Element(name, 1)


class CupyNccl:
    """The maker of communicators by CuPy.

    Args:
        cupy: the module.
        nccl: the module ``cupy.cuda.nccl``.
    """

    def __init__(self, cupy: Any, nccl: Any) -> None:
        self._cupy: Final = cupy
        self._nccl: Final = nccl

    def new_id(self) -> Any:
        """See `Nccl.new_id`. It is bytes, and a tuple of ints before CuPy 14."""
        return self._nccl.get_unique_id()

    def connect(self, device: int, size: int, rank: int, name: Any) -> Communicator:
        """See `Nccl.connect`."""
        with self._cupy.cuda.Device(device):
            made = self._nccl.NcclCommunicator(size, name, rank)
        return _CupyCommunicator(self._nccl, self._cupy.cuda.Device, device, made)


class _CupyCommunicator:
    """A communicator of CuPy. Its GPU is made current for each call, as NCCL wants it."""

    def __init__(self, nccl: Any, on: Any, device: int, made: Any) -> None:
        self._nccl: Final = nccl
        self._on: Final = on
        self._device: Final = device
        self._made: Final = made

    def all_reduce(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        with self._on(self._device):
            self._made.allReduce(source, target, count, _ELEMENTS[element], _OPS[op], stream)

    def reduce(self, source: int, target: int, count: int, element: str, op: str, root: int, stream: int) -> None:
        with self._on(self._device):
            self._made.reduce(source, target, count, _ELEMENTS[element], _OPS[op], root, stream)

    def reduce_scatter(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        with self._on(self._device):
            self._made.reduceScatter(source, target, count, _ELEMENTS[element], _OPS[op], stream)

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        with self._on(self._device):
            self._made.allGather(source, target, nbytes, _BYTES, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        with self._on(self._device):
            self._made.broadcast(source, target, nbytes, _BYTES, root, stream)

    def send(self, source: int, nbytes: int, peer: int, stream: int) -> None:
        with self._on(self._device):
            self._made.send(source, nbytes, _BYTES, peer, stream)

    def receive(self, target: int, nbytes: int, peer: int, stream: int) -> None:
        with self._on(self._device):
            self._made.recv(target, nbytes, _BYTES, peer, stream)

    def together(self) -> AbstractContextManager[None]:
        return _Together(self._nccl)

    def check(self) -> None:
        self._made.check_async_error()

    def abort(self) -> None:
        self._made.abort()

    def destroy(self) -> None:
        with self._on(self._device):
            self._made.destroy()


class _Together:
    """A group of NCCL's calls. It is ended after an error too, as NCCL counts beginnings and ends by thread."""

    def __init__(self, nccl: Any) -> None:
        self._nccl: Final = nccl

    def __enter__(self) -> None:
        self._nccl.groupStart()

    def __exit__(self, *_: object) -> None:
        self._nccl.groupEnd()


def found_nccl(kind: str, load: Any = importlib.import_module) -> Nccl | str:
    """NCCL for the GPUs of this process; or the reason why there is none, and the next step.

    Args:
        kind: of the GPUs' driver, ``"cuda"`` or ``"fake"``.
        load: imports a module by its name.
    """
    if kind != "cuda":
        return "NCCL does not know fake GPUs"
    try:
        cupy = load("cupy")
    except ImportError:
        return "CuPy is not installed here: install both for your CUDA, such as cupy-cuda13x and nvidia-nccl-cu13"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where there is no NCCL
        nccl = load("cupy.cuda.nccl")
    if not nccl.available:
        return "CuPy finds no NCCL here: install that for CuPy's CUDA, such as nvidia-nccl-cu13"
    version = nccl.get_version()
    if version < _OLDEST:
        return f"NCCL {version} is too old: install 2.10 or later, as nvidia-nccl-cu13 is"
    return CupyNccl(cupy, nccl)
