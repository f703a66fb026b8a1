"""The holders of the bytes of arrays on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn, Protocol

if TYPE_CHECKING:
    from zcactor.device.memory import GpuMemory
    from zcactor.device.work import Work

__all__ = ["DeviceHolder", "Gone"]

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
