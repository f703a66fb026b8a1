"""Arrays on GPUs as other libraries take them: DLPack, ``__cuda_array_interface__``, CuPy's and PyTorch's own.

All are over the same bytes. A library queues work on streams by itself, so the bytes are noted as given to its stream:
later work on them, here or in another process, is ordered after the work on that.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zcactor.device.driver import LEGACY_STREAM
from zcactor.device.kinds import KDL_CUDA
from zcactor.device.streams import current_stream
from zcactor.device.work import LibraryLoan, lend, of_others

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.device.memory import GpuMemory

__all__ = [
    "DLTensor",
    "cuda_interface",
    "dl_types",
    "dlpack",
    "imported",
    "is_read_only",
    "library_stream",
    "note_given",
    "tensor_of",
    "to_cupy",
    "to_jax",
    "to_torch",
]

_READ_ONLY: Final = 1
"""DLPack's flag of versioned tensors whose bytes nobody may write to."""
_VERSIONED: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether NumPy makes versioned capsules, and those of read-only arrays: since 2.1."""
dl_types: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bfloat16": 4,
        "float8_e3m4": 7,
        "float8_e4m3": 8,
        "float8_e4m3b11fnuz": 9,
        "float8_e4m3fn": 10,
        "float8_e4m3fnuz": 11,
        "float8_e5m2": 12,
        "float8_e5m2fnuz": 13,
        "float8_e8m0fnu": 14,
    }
)
"""DLPack's codes for types of ml_dtypes."""


class DLTensor(ctypes.Structure):
    """DLPack's description of a tensor (dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """A capsule's content since DLPack 1.0; before, the tensor was its beginning."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_pointer: Final = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid: Final = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def tensor_of(capsule: Any) -> DLTensor:
    """The tensor in a capsule of DLPack, which lives as long as the capsule.

    Raises:
        TypeError: it is no such capsule, or its content was taken.
    """
    if _is_valid(capsule, b"dltensor_versioned"):
        content = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        return content.tensor  # type: ignore[no-any-return]
    if _is_valid(capsule, b"dltensor"):
        return DLTensor.from_address(_pointer(capsule, b"dltensor"))
    raise TypeError("__dlpack__ gave no capsule with a tensor of DLPack")


def is_read_only(capsule: Any) -> bool:
    """Whether a capsule of DLPack says that nobody may write to its bytes; False for one that cannot say it."""
    if not _is_valid(capsule, b"dltensor_versioned"):
        return False
    return bool(_Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).flags & _READ_ONLY)


class _Described(LibraryLoan):
    """A description of which NumPy makes an array, without a look at its bytes. The array keeps it, and it keeps the
    bytes."""

    def __init__(self, array: Any, dtype: np.dtype[Any], readonly: bool) -> None:
        super().__init__(array.holder)
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": dtype.str,
            "data": (array.address, readonly),
            "strides": array.strides,
        }


def _capsule(array: Any, readonly: bool, *, versioned: bool) -> tuple[Any, LibraryLoan]:
    """A capsule of DLPack, made by NumPy, whose functions also free it: consumers may do that on any thread. With it
    comes the loan that ends with it.

    Raises:
        BufferError: DLPack has no such dtype.
    """
    dtype = array.dtype
    code = dl_types.get(dtype.name) if dtype.type.__module__ == "ml_dtypes" else None
    if code is not None:
        dtype = np.dtype(f"u{dtype.itemsize}")
    # For NumPy the bytes are on the host; it hands the address on.
    loan = _Described(array, dtype, readonly)
    described = np.asarray(loan)
    capsule = described.__dlpack__(max_version=(1, 0)) if versioned else described.__dlpack__()
    tensor = tensor_of(capsule)
    tensor.device_type, tensor.device_id = KDL_CUDA, array.holder.gpu.index
    if code is not None:
        tensor.code = code
    return capsule, loan


def _give(stream: int, kept: object, loan: LibraryLoan) -> None:
    """Let work on a stream begin after that on the bytes of a loan, and be followed by later work on them."""
    holder = loan.holder
    gpu, work = holder.gpu, holder.work
    before = work.before_reading if holder.readonly else work.before_writing
    lend(before(gpu.index, stream))
    work.give(gpu.events, stream, kept, loan)


def dlpack(array: Any, stream: int | None, max_version: tuple[int, int] | None, device: Any, copy: bool | None) -> Any:
    """Make a capsule; see `zcactor.gpu.DeviceArray.__dlpack__`."""
    gpu = array.holder.gpu
    if device is not None and tuple(device) != (KDL_CUDA, gpu.index):
        raise BufferError(f"the array is on {array.device}; bring it elsewhere by zc.gpu.to_host or zc.gpu.to_device")
    if stream is not None and (type(stream) is not int or stream < -1 or not stream):
        raise ValueError(f"stream {stream!r}: it must be None, -1, 1 for the default stream, or a stream's handle")
    if copy:
        array = array.copy()
    versioned = _VERSIONED and max_version is not None and max_version[0] >= 1
    if array.readonly and not versioned:
        raise BufferError(
            "the array is read-only, which the consumer's version of DLPack cannot say: use x.as_cupy(), x.as_torch() "
            "or x.copy()"
        )
    capsule, loan = _capsule(array, array.readonly, versioned=versioned)
    if stream == -1:  # the consumer needs no order, and does not say where it works
        lend(of_others(array.holder.work.writes()))
        array.holder.work.give(gpu.events, -1, None, loan)
    else:
        stream = stream or LEGACY_STREAM
        _give(stream, gpu.events.keeper(stream), loan)
    return capsule


def cuda_interface(array: Any) -> dict[str, Any]:
    """The value of ``__cuda_array_interface__``, version 3."""
    gpu = array.holder.gpu
    stream = current_stream(gpu.index)
    _give(stream, gpu.events.keeper(stream), LibraryLoan(array.holder))
    interface: dict[str, Any] = {
        "version": 3,
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.address if array.size else 0, array.readonly),
        "strides": array.strides,
        "stream": stream or LEGACY_STREAM,
    }
    if array.dtype.names is not None:
        interface["descr"] = array.dtype.descr
    return interface


def imported(name: str) -> Any:
    """Import a library.

    Raises:
        ImportError: it is not installed.
    """
    found = sys.modules.get(name)  # importlib takes 3 us to look there
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        return found
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed here: install it, or use the array as it is", name=name) from error


def library_stream(gpu: GpuMemory, library: str) -> tuple[int, object]:
    """The stream on which a library queues work in this thread, and the object that keeps it; None for a stream that
    nobody here keeps. With fake GPUs, which no library can use, it is the stream of this task."""
    if gpu.driver.kind == "cuda" and library in {"cupy", "torch"}:
        module = imported(library)
        current: Any
        if library == "cupy":
            current = module.cuda.get_current_stream(gpu.index)
            return current.ptr, None if isinstance(current, module.cuda.ExternalStream) else current
        current = module.cuda.current_stream(gpu.index)
        # The number of PyTorch's own streams, which it never ends, is not their handle.
        return current.cuda_stream, None if current.stream_id == current.cuda_stream else current
    stream = current_stream(gpu.index)
    return stream, gpu.events.keeper(stream)


def note_given(loan: LibraryLoan, library: str) -> None:
    """Note that a library has the bytes of a loan, and let its work on its current stream begin after that which is
    queued on them.

    Raises:
        ObjectLost: the process that computes the bytes has ended before that was done.
        DeviceError: the driver refuses.
    """
    _give(*library_stream(loan.holder.gpu, library), loan)


def to_cupy(array: Any) -> Any:
    """The CuPy array; see `zcactor.gpu.DeviceArray.as_cupy`."""
    cupy, loan = imported("cupy"), LibraryLoan(array.holder)
    cuda = cupy.cuda
    note_given(loan, "cupy")
    low, high = array.bounds()
    memory = cuda.UnownedMemory(low, high - low, loan, array.holder.gpu.index)
    place = cuda.MemoryPointer(memory, array.address - low)
    return cupy.ndarray(array.shape, array.dtype, place, array.strides)


def to_torch(array: Any) -> Any:
    """The tensor; see `zcactor.gpu.DeviceArray.as_torch`."""
    torch = imported("torch")
    if any(stride < 0 for stride in array.strides):
        raise ValueError("PyTorch has no tensors with negative strides: use x.copy().as_torch()")
    # PyTorch has no read-only tensors.
    capsule, loan = _capsule(array, False, versioned=False)
    note_given(loan, "torch")
    return torch.from_dlpack(capsule)


class _ForJax:
    """An array as JAX takes it. JAX's own arrays are read-only, and it says so of no capsule that it takes.

    Args:
        array: the array.
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, self._array.holder.gpu.index

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        capsule, loan = _capsule(self._array, False, versioned=False)
        _give(stream or LEGACY_STREAM, None, loan)
        return capsule


def to_jax(array: Any) -> Any:
    """The array as one of JAX's, over the same bytes, whose work is ordered after that which is queued here.

    Raises:
        ImportError: JAX is not installed.
        DeviceError: the driver refuses.
    """
    return imported("jax").dlpack.from_dlpack(_ForJax(array))
