"""CuPy's memory from the store, so that arrays which CuPy makes need no copy on their way.

CuPy has one allocator for all, or one for each thread, and tasks of one thread would disturb each other. So one is
set, once. It looks up the setting of the current task, and where there is none it calls the allocator before it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from zcactor.device.interchange import imported, note_given
from zcactor.device.memory import DeviceBlock
from zcactor.device.work import LibraryLoan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zcactor.device.memory import GpuMemory

__all__ = ["allocates_for_cupy"]

_gpus: ContextVar[Sequence[GpuMemory]] = ContextVar("zcactor_cupy_gpus", default=())
"""The GPUs on which CuPy allocates in the store, in this task."""
_setting: Final = threading.Lock()
_before: Callable[[int], Any] | None = None
"""CuPy's allocator before ours."""


def _allocate(nbytes: int) -> Any:
    """Allocate memory for CuPy.

    Raises:
        OutOfMemory: the GPU has no room.
        DeviceError: the driver refuses.
    """
    gpus = _gpus.get()
    if not gpus:
        return None if _before is None else _before(nbytes)
    cuda = imported("cupy").cuda
    gpu = gpus[cuda.runtime.getDevice() if gpus[0].driver.kind == "cuda" else 0]
    block = DeviceBlock(gpu, nbytes)
    loan = LibraryLoan(block)
    note_given(loan, "cupy")
    return cuda.MemoryPointer(cuda.UnownedMemory(block.address, nbytes, loan, gpu.index), 0)


@contextmanager
def allocates_for_cupy(gpus: Sequence[GpuMemory]) -> Iterator[None]:
    """Let CuPy allocate in the store, in this task and those made inside.

    Args:
        gpus: the GPUs of this process.

    Raises:
        ImportError: CuPy is not installed.
        ValueError: ``cupy.cuda.using_allocator`` is in force in this thread.
    """
    global _before
    cuda = imported("cupy").cuda
    with _setting:
        current = cuda.get_allocator()
        if current is not _allocate:
            cuda.set_allocator(_allocate)
            _before = current
    token = _gpus.set(gpus)
    try:
        yield
    finally:
        _gpus.reset(token)
