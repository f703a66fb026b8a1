"""Memory that leaves the process by handles of 64 bytes, for GPUs that export no descriptors: CUDA's legacy IPC.

The driver puts such memory where it likes. It ends with its process, and no mapping of it is read-only.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from zcactor.device.driver import HANDLE_NBYTES, CudaCode, Refused
from zcactor.errors import DeviceError

if TYPE_CHECKING:
    from zcactor.device.cuda.calls import CudaCalls

__all__ = ["CudaHandles"]

_ALREADY_ENABLED: Final = 704
"""``CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED``."""


class CudaHandles:
    """CUDA's calls for such memory. The context of the memory's GPU is current in each call.

    Args:
        cuda: makes the calls.
    """

    def __init__(self, cuda: CudaCalls) -> None:
        self._cuda: Final = cuda
        self._api: Final = cuda.api

    def work(self, device: int, nbytes: int) -> bool:
        """Whether memory of a GPU can be exported so. Allocates `nbytes` to try it: CUDA has no attribute for it.

        Raises:
            DeviceError: the GPU has no room, or its context is broken.
        """
        with self._cuda.current("export", device):
            address = self.allocate(device, nbytes)
            try:
                self.export(device, address)
            except DeviceError as error:
                if error.fatal:
                    raise
                return False
            finally:
                self._api.cuMemFree(address)
            return True

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate memory. Returns its address.

        Raises:
            DeviceError: the GPU has no room.
        """
        return int(self._cuda.ask("create", device, "cuMemAlloc", nbytes))

    def free(self, device: int, address: int) -> None:
        """Give memory of this process back."""
        self._cuda.ask("release", device, "cuMemFree", address)

    def export(self, device: int, address: int) -> bytes:
        """The handle of memory of this process.

        Raises:
            DeviceError: CUDA refuses.
        """
        handle = self._cuda.ask("export", device, "cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_NBYTES)

    def open(self, device: int, exported: bytes, nbytes: int) -> int:
        """Map memory of another process. Returns its address here.

        Raises:
            Refused: the handle is not one of memory of `nbytes` bytes.
            DeviceError: CUDA refuses.
        """
        if len(exported) != HANDLE_NBYTES:
            raise Refused(CudaCode.INVALID_VALUE, f"a handle has {HANDLE_NBYTES} bytes, not {len(exported)}")
        handle = self._api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), exported, HANDLE_NBYTES)  # releases of the package name its field differently
        lazy = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(self._cuda.ask("import_", device, "cuIpcOpenMemHandle", handle, lazy))
        found = self._cuda.ask("import_", device, "cuMemGetAddressRange", address)[1]
        if found != nbytes:
            self.close(device, address)
            raise Refused(CudaCode.INVALID_VALUE, f"the memory has {found} bytes, not {nbytes}")
        return address

    def close(self, device: int, address: int) -> None:
        """Undo `open`."""
        self._cuda.ask("release", device, "cuIpcCloseMemHandle", address)

    def let_access(self, device: int, context: Any) -> None:
        """Let a GPU, whose context is current, access the memory of another one's context. Idempotent.

        Raises:
            DeviceError: CUDA refuses.
        """
        try:
            self._cuda.ask("map", device, "cuCtxEnablePeerAccess", context, 0)
        except DeviceError as error:
            if error.code != _ALREADY_ENABLED:
                raise
