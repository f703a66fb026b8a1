"""GPUs and arrays on them: which GPUs there are, ways between host and GPU, and streams.

The modules of `zcactor.device` are imported when a GPU is used first.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from zcactor.errors import DeviceUnavailable
from zcactor.exception_pickling import shown_class
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import check_unmasked, is_shareable
from zcactor.marshal.foreign import array_over_foreign
from zcactor.process.context import current

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from zcactor.device.array import DeviceArray
    from zcactor.device.memory import GpuMemory
    from zcactor.device.streams import GpuStream

__all__ = ["GpuInfo", "allocator", "empty_on", "gpus", "stream", "to_device", "to_host"]

_DEVICE: Final = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU that this process sees."""

    index: int
    """The number in this process, as in ``device="cuda:0"``."""
    uuid: str
    """The same in all processes of a host."""
    name: str
    total: int
    """Bytes of its memory."""
    free: int
    """Bytes of its memory that were not allocated at that moment."""
    driver: Literal["cuda", "fake"]


def gpus() -> list[GpuInfo]:
    """The GPUs that this process sees. The first call opens the driver.

    Returns:
        The GPUs in the order of their numbers; no GPU where the setting ``gpu`` is ``"off"``, or ``"auto"`` on a
        machine where CUDA does not work.

    Raises:
        NotInitialized: no runtime is running.
        DeviceUnavailable: the setting ``gpu`` is ``"cuda"``, which does not work here.
        ValueError: the options of fake GPUs in the setting ``gpu`` are malformed.
    """
    process = current()
    if process.config.gpu == "off":
        return []
    try:
        driver = process.store.devices().driver
    except DeviceUnavailable:
        if process.config.gpu == "auto":
            return []
        raise
    return [
        GpuInfo(each.index, each.uuid, each.name, each.total, driver.free(each.index), driver.kind)
        for each in driver.devices()
    ]


def _index(device: object) -> int:
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f"device {device!r}: it must be 'cpu', 'cuda' or 'cuda:' and a number, as 'cuda:1'")
    return int(match[1] or 0)


def _memory(device: object) -> GpuMemory:
    index = _index(device)
    memory: GpuMemory = current().store.devices().gpu(index)
    from zcactor.marshal.devices import pass_arrays

    pass_arrays()
    return memory


def empty_on(device: object, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
    """Make an uninitialised array on a GPU; see `zcactor.empty`."""
    memory = _memory(device)
    from zcactor.device.array import empty_array

    return empty_array(memory, shape, dtype)


def to_device(x: Any, device: str = "cuda") -> DeviceArray:
    """Bring an array to a GPU.

    Args:
        x: an ndarray, or any object that `numpy.asarray` accepts: it is copied, which is counted as "zc.gpu.to_device",
            and this waits until that is done. An array on another GPU is copied there, and nobody waits. One on the
            same GPU, of CuPy, PyTorch or another library, too, comes back as a `DeviceArray` over the same bytes.
        device: ``"cuda"``, which is the first GPU, or ``"cuda:1"`` and so on.

    Raises:
        NotInitialized: no runtime is running.
        DeviceUnavailable: this process sees no such GPU.
        TypeError: the elements of `x` are not plain bytes, or `x` has a mask.
        ValueError: `device` is malformed.
        OutOfMemory: the GPU has no room.
        DeviceError: the driver refuses.
    """
    process, memory = current(), _memory(device)
    from zcactor.device.array import DeviceArray, empty_array

    found = array_over_foreign(process.store, x)
    x = x if found is None else found
    if isinstance(x, DeviceArray):
        if x.uuid == memory.uuid:
            return x[...]
        made = empty_array(memory, x.shape, x.dtype)
        made.copy_from(x)
        return made
    check_unmasked(x, "zc.gpu.to_device")
    array = np.asarray(x)
    if not is_shareable(array.dtype):
        raise TypeError(f"dtype {array.dtype} is not plain bytes, which is all that a GPU holds: convert it first")
    made = empty_array(memory, array.shape, array.dtype)
    made.copy_from(array)
    process.copies.count("zc.gpu.to_device", array.nbytes)
    return made


def to_host(x: Any) -> npt.NDArray[Any]:
    """Bring an array to the host, into the store. This blocks the thread until the array is computed and copied.

    Args:
        x: an array on a GPU, of CuPy, PyTorch or another library, too. The copy is counted as "zc.gpu.to_host". A NumPy
            array comes back as it is.

    Returns:
        A writable, C-contiguous ndarray.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `x` is neither.
        OutOfMemory: the store has no room.
        ObjectLost: the process that computes the array, or one that it is computed from, has ended before that was
            done.
        DeviceError: the driver refuses, or work has broken the GPU's context.
    """
    if isinstance(x, np.ndarray):
        return x
    from zcactor.device.array import DeviceArray

    process = current()
    array = x if isinstance(x, DeviceArray) else array_over_foreign(process.store, x)
    if array is None:
        raise TypeError(f"zc.gpu.to_host takes an array on a GPU, not {shown_class(type(x))}")
    target = process.store.empty(array.shape, array.dtype)
    array.copy_to_host(target)
    process.copies.count("zc.gpu.to_host", array.nbytes)
    return target


def stream(device: str = "cuda") -> AbstractContextManager[GpuStream]:
    """Make a stream of a GPU, on which operations of arrays are queued within the block.

    The setting belongs to the context (PEP 567): it holds for this thread or task and for the tasks made inside the
    block. At the end of the block nobody waits: the queued work goes on.

    Args:
        device: ``"cuda"``, which is the first GPU, or ``"cuda:1"`` and so on.

    Raises:
        NotInitialized: no runtime is running.
        DeviceUnavailable: this process sees no such GPU.
        ValueError: `device` is malformed.
        DeviceError: the driver makes no stream.
    """
    return _on_stream(_memory(device))


def allocator(library: Literal["cupy", "torch"] = "cupy") -> AbstractContextManager[None]:
    """Let a library for GPUs allocate in the store within the block. Its arrays need no copy on their way then.

    For CuPy the setting belongs to the context (PEP 567): it holds for this thread or task and for the tasks made
    inside the block. For PyTorch it belongs to the thread, as of ``torch.cuda.use_mem_pool``. Both are for the GPU that
    is current in the library. Outside of such blocks the library allocates as before.

    Args:
        library: ``"cupy"``, or ``"torch"`` for PyTorch 2.5 or later.

    Raises:
        NotInitialized: no runtime is running.
        DeviceUnavailable: this process sees no GPU.
        ImportError: the library is not installed.
        OutOfMemory: at the beginning of the block, the GPU has no room for PyTorch's first memory.
        ValueError: there is no allocator for `library`; or, at the beginning of the block, an allocator of
            ``cupy.cuda.using_allocator`` is in force in this thread.
    """
    if library not in {"cupy", "torch"}:
        raise ValueError(f"there is no allocator for {library!r}: zc.gpu.allocator takes 'cupy' or 'torch'")
    _memory("cuda")
    devices = current().store.devices()
    if library == "torch":
        from zcactor.device.torch_memory import allocates_for_torch

        return allocates_for_torch(devices.torch_memory(), devices.gpus)
    from zcactor.device.allocator import allocates_for_cupy

    return allocates_for_cupy(devices.gpus)


@contextmanager
def _on_stream(memory: GpuMemory) -> Iterator[GpuStream]:
    from zcactor.device.streams import GpuStream, streams

    made = GpuStream(memory)
    token = streams.set(MappingProxyType({**streams.get(), memory.index: made.ptr}))
    try:
        yield made
    finally:
        streams.reset(token)
