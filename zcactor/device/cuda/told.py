"""Functions that CUDA calls when the work before them on a stream is done (``cuLaunchHostFunc``)."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.cuda.calls import CudaCalls

__all__ = ["queue"]

_queued: Final[dict[int, Callable[[], object]]] = {}
_numbers: Final = itertools.count(1)


def _call(number: int) -> None:
    """Call a function that was queued. CUDA's thread is the caller, which takes the interpreter's lock for it."""
    _queued.pop(number)()


_trampoline: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_call)
_ADDRESS: Final[Any] = ctypes.cast(_trampoline, ctypes.c_void_p).value


def queue(cuda: CudaCalls, device: int, stream: int, call: Callable[[], object]) -> None:
    """Queue a function on a stream, as `zcactor.device.driver.GpuDriver.tell` says. The device's context is current.

    Raises:
        DeviceError: the driver refuses.
    """
    number = next(_numbers)
    _queued[number] = call
    try:
        cuda.ask("tell", device, "cuLaunchHostFunc", stream, cuda.api.CUhostFn(_ADDRESS), number)
    except BaseException:
        del _queued[number]
        raise
