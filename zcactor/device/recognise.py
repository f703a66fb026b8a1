"""Other libraries' arrays on GPUs, read without asking a driver where that is possible."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

import numpy as np

from zcactor.device.interchange import dl_types, is_read_only, library_stream, tensor_of
from zcactor.device.kinds import is_parameter
from zcactor.device.streams import current_stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zcactor.device.kinds import Kind
    from zcactor.device.memory import GpuMemory

__all__ = ["IMMUTABLE", "TORCH_ONLY", "Foreign", "read"]

_DL_KINDS: Final[Mapping[int, str]] = MappingProxyType({0: "i", 1: "u", 2: "f", 5: "c", 6: "b"})
"""NumPy's kinds of dtypes by DLPack's codes."""
TORCH_ONLY: Final = ("bfloat16", "float8")
"""The beginnings of the names of PyTorch's types that NumPy lacks."""


IMMUTABLE: Final = "immutable"
"""The version of elements to which nobody may write."""


class Foreign(NamedTuple):
    """An array of another library."""

    library: str
    """The library whose type the receiver gets: ``"cupy"``, ``"jax"``, ``"torch"`` with more behind colons, or none."""
    address: int
    """The address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next along each axis."""
    dtype: np.dtype[Any]
    stream: int | None
    """The stream after whose work the elements are computed; None where they are."""
    kept: object
    """The object that keeps the bytes."""
    stream_kept: object = None
    """The object that keeps the stream."""
    readonly: bool = False
    """Whether nobody may write to the bytes."""
    version: object = None
    """The version of the elements: equal versions mean that nobody has written to the elements in between. `IMMUTABLE`
    where nobody may, None where the library counts no writes."""


def read(kind: Kind, value: Any, gpus: Sequence[GpuMemory]) -> Foreign | None:
    """Read an array.

    Args:
        kind: the result of `zcactor.device.kinds.kind_of`.
        value: the array.
        gpus: the GPUs that this process sees; at least one.

    Returns:
        The array; None where its elements are of no type that NumPy or ml_dtypes has, or it has no plain layout.

    Raises:
        DeviceError: the driver refuses.
    """
    if kind == "cupy":
        place = value.data
        stream, kept = library_stream(_gpu(gpus, place.device_id), "cupy")
        return Foreign("cupy", place.ptr, value.shape, value.strides, value.dtype, stream, place.mem, kept)
    if kind == "torch":
        return _torch(value, gpus)
    return _dlpack(value, gpus) if kind == "dlpack" else _interface(value)


def _gpu(gpus: Sequence[GpuMemory], index: int) -> GpuMemory:
    """The GPU of an index, and the first one for an index that is unknown: only the stream depends on it."""
    return gpus[index] if 0 <= index < len(gpus) else gpus[0]


def _torch(tensor: Any, gpus: Sequence[GpuMemory]) -> Foreign | None:
    name, library = str(tensor.dtype).removeprefix("torch."), "torch"
    if name.startswith(TORCH_ONLY):
        library, dtype = f"torch:{name}", np.dtype(f"u{tensor.element_size()}")
    else:
        try:
            dtype = np.dtype(name)
        except TypeError:
            return None
    if tensor.requires_grad:
        library = f"{library}:grad"
    if is_parameter(tensor):
        library = f"{library}:parameter"
    stream, kept = library_stream(_gpu(gpus, tensor.device.index), "torch")
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return Foreign(
        library, tensor.data_ptr(), tuple(tensor.shape), strides, dtype, stream, tensor, kept,
        version=None if tensor.is_inference() else _Version(tensor),  # tensors of inference have no count
    )  # fmt: skip


class _Version:
    """PyTorch's count of the writes to a tensor's elements, with the tensor to which the count belongs: another tensor
    over the same bytes may have a count of its own."""

    def __init__(self, tensor: Any) -> None:
        self._of: Final = ref(tensor if tensor._base is None else tensor._base)
        self._count: Final = tensor._version

    def __eq__(self, other: object) -> bool:  # tensors compare their elements
        of = self._of()
        return isinstance(other, _Version) and of is not None and of is other._of() and self._count == other._count

    __hash__ = None  # type: ignore[assignment]


def _interface(value: Any) -> Foreign | None:
    try:
        interface = value.__cuda_array_interface__
    except AttributeError:  # as of arrays that are on the host after all
        return None
    if interface.get("mask") is not None:
        return None
    described = interface["typestr"]
    dtype = np.dtype(interface["descr"] if described[1] == "V" and interface.get("descr") else described)
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    # Before version 3, what comes after work on the default stream is ordered.
    stream = interface.get("stream") if interface["version"] >= 3 else 1
    strides = _packed(shape, dtype.itemsize) if strides is None else tuple(strides)
    address, readonly = interface["data"]
    version = IMMUTABLE if readonly else None
    return Foreign("", address, shape, strides, dtype, 0 if stream == 1 else stream, value, None, readonly, version)


def _dlpack(value: Any, gpus: Sequence[GpuMemory]) -> Foreign | None:
    stream = current_stream(_gpu(gpus, value.__dlpack_device__()[1]).index)
    try:
        capsule = value.__dlpack__(stream=stream or 1, max_version=(1, 0))
    except TypeError:  # a library older than versions
        capsule = value.__dlpack__(stream=stream or 1)
    tensor, readonly = tensor_of(capsule), is_read_only(capsule)
    dtype = _dl_dtype(tensor.code, tensor.bits) if tensor.lanes == 1 else None
    if dtype is None:
        return None
    shape = tuple(tensor.shape[: tensor.ndim])
    known = tuple(each * dtype.itemsize for each in tensor.strides[: tensor.ndim]) if tensor.strides else None
    strides = _packed(shape, dtype.itemsize) if known is None else known
    address = (tensor.data or 0) + tensor.byte_offset
    # The capsules of some versions do not say whether the bytes may be written to.
    library = "jax" if type(value).__module__.partition(".")[0] in {"jax", "jaxlib"} else ""
    version = IMMUTABLE if library or readonly else None  # JAX has no other arrays
    return Foreign(library, address, shape, strides, dtype, stream, (value, capsule), None, True, version)


def _dl_dtype(code: int, bits: int) -> np.dtype[Any] | None:
    kind = _DL_KINDS.get(code)
    if kind is not None and not bits % 8:
        return np.dtype(f"{kind}{bits // 8}")
    name = next((each for each, known in dl_types.items() if known == code), "")
    try:
        import ml_dtypes
    except ImportError:
        return None
    scalar = getattr(ml_dtypes, name, None) if name else None
    return None if scalar is None else np.dtype(scalar)


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array without gaps."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
