"""Calls of CUDA by ``cuda.bindings.driver``: their errors, the contexts that they need, and facts about GPUs."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any, Final

from zcactor.device.driver import CAPTURED, LEGACY_STREAM, CudaCode, GpuFacts, Refused
from zcactor.errors import DeviceError, DeviceUnavailable, ForkedProcess

__all__ = ["CudaCalls", "bindings", "free_by_nvml"]

_NOT_READY: Final = 600
_NO_DEVICE: Final = 100
_FATAL: Final = frozenset(
    {4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}
)  # fmt: skip
"""Errors after which the context does no more work, by the documentation of ``CUresult``."""
_NAME_NBYTES: Final = 256
_ON_STREAMS: Final = frozenset({"copy", "fill", "record", "wait"})
"""The calls that only queue work on a stream."""
_CONTEXTS_SINCE: Final = 12050
"""The driver's version from which on an event stands for all work of a context."""


class CudaCalls:
    """The calls of CUDA for the GPUs that this process sees. Any thread may make them.

    Args:
        api: the module ``cuda.bindings.driver``, or what stands in its place in a test.

    Raises:
        DeviceUnavailable: there is no driver, or no GPU. The message says which.
    """

    def __init__(self, api: Any) -> None:
        self.api: Final = api
        self.pid: Final = os.getpid()
        self._lock: Final = threading.RLock()  # a finalizer that makes arrays may run inside it
        self.contexts: Final[dict[int, Any]] = {}
        """The primary context of each device that was used, which other libraries of the process use, too."""
        _initialise(api)
        self.version: Final[int] = self.ask("devices", -1, "cuDriverGetVersion")
        count = self.ask("devices", -1, "cuDeviceGetCount")
        self.devices: Final = [self.ask("devices", each, "cuDeviceGet", each) for each in range(count)]

    def ask(self, call: str, device: int, name: str, *arguments: Any) -> Any:
        """Make a call of CUDA.

        Args:
            call: the call of `zcactor.device.driver.GpuDriver` for it, which the error names.
            device: index of the GPU; -1 for no particular one.
            name: of CUDA's call.
            arguments: its arguments.

        Returns:
            Its one result, or all where there are several.

        Raises:
            DeviceError: CUDA refuses.
        """
        code, *results = getattr(self.api, name)(*arguments)
        if code:
            raise DeviceError(call, int(code), device, int(code) in _FATAL, f"{name}: {code.name}")
        return results[0] if len(results) == 1 else results

    def make_event(self, call: str, device: int) -> int:
        """Make an event of CUDA's, which tells no times. The device's context is current.

        Raises:
            DeviceError: CUDA refuses.
        """
        return int(self.ask(call, device, "cuEventCreate", int(self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def is_ready(self, call: str, device: int, name: str, handle: int) -> bool:
        """Make a call that asks whether work is done.

        Raises:
            DeviceError: the call, or work before it, has failed.
        """
        code, *_ = getattr(self.api, name)(handle)
        if code and code != _NOT_READY:
            raise DeviceError(call, int(code), device, int(code) in _FATAL, f"{name}: {code.name}")
        return not code

    def check_process(self) -> None:
        """Check that this is the process that has opened CUDA.

        Raises:
            ForkedProcess: it is a forked child.
        """
        if os.getpid() != self.pid:
            raise ForkedProcess("a forked process cannot use the GPUs of its parent: start it by spawn")

    def named(self, name: str, device: int) -> _Named:
        """A context manager that checks a call, and names it in errors of the block.

        Raises:
            ForkedProcess: this is a forked child.
            DeviceUnavailable: there is no such GPU.
            DeviceError: the block raises `Refused`.
        """
        self.check_process()
        if not 0 <= device < len(self.devices):
            raise DeviceUnavailable(f"there is no GPU {device}: this process sees {len(self.devices)}")
        return _Named(name, device)

    def current(self, name: str, device: int) -> _Current:
        """As `named`; the device's context is current in the block. A thread that has no context keeps it, as CUDA's
        runtime does it. Calls that are no work on a stream invalidate captures of graphs by other threads
        (cuStreamBeginCapture in global mode, as PyTorch's), unless this thread says that they have nothing to do with
        them.

        Raises:
            ForkedProcess: this is a forked child.
            DeviceUnavailable: there is no such GPU.
            DeviceError: CUDA gives no context, or the block raises `Refused`.
        """
        self.check_process()
        if not 0 <= device < len(self.devices):
            raise DeviceUnavailable(f"there is no GPU {device}: this process sees {len(self.devices)}")
        context = self._context(name, device)
        now = int(self.ask(name, device, "cuCtxGetCurrent"))
        pops = now not in {0, int(context)}
        if pops:
            self.ask(name, device, "cuCtxPushCurrent", context)
        elif not now:
            self.ask(name, device, "cuCtxSetCurrent", context)
        return _Current(name, device, self.api, pops, name not in _ON_STREAMS)

    def somewhere(self, name: str) -> _Current:
        """As `current`, for a call that needs the context of any GPU: one that is in use, as each takes 300 MiB and
        more of its GPU."""
        self.check_process()
        if not self.contexts and int(self.ask(name, -1, "cuCtxGetCurrent")):
            return self.relaxed(name, -1)
        return self.current(name, min(self.contexts, default=0))

    def relaxed(self, name: str, device: int) -> _Current:
        """As `current`, for a block that sees to the context itself."""
        return _Current(name, device, self.api, False, True)

    def _context(self, call: str, device: int) -> Any:
        contexts = self.contexts
        if device not in contexts:
            with self._lock:
                if device not in contexts:
                    with self.relaxed(call, device):
                        made = self.ask(call, device, "cuDevicePrimaryCtxRetain", self.devices[device])
                        if contexts.setdefault(device, made) is not made:  # a finalizer has retained it meanwhile
                            self.ask(call, device, "cuDevicePrimaryCtxRelease", self.devices[device])
        return contexts[device]

    def record_all(self, device: int, event: int) -> None:
        """Record an event of CUDA's behind all work of a GPU, whose context is current.

        Raises:
            DeviceError: CUDA refuses.
        """
        if self.version >= _CONTEXTS_SINCE:
            self.ask("record_all", device, "cuCtxRecordEvent", self.contexts[device], event)
        else:
            self.ask("record_all", device, "cuCtxSynchronize")
            self.ask("record_all", device, "cuEventRecord", event, LEGACY_STREAM)

    def check_not_captured(self, call: str, device: int, stream: int) -> None:
        """Check that a stream does its work, which is not captured into a graph: work of ours would be a part of the
        graph, and a question its end. The device's context is current.

        Raises:
            DeviceError: the stream is captured, or CUDA refuses to say.
        """
        code, status = self.api.cuStreamIsCapturing(stream)
        if code or int(status):
            number = int(code) or CudaCode.CAPTURE_UNSUPPORTED
            raise DeviceError(call, number, device, number in _FATAL, CAPTURED)

    def attribute(self, device: int, name: str) -> int:
        """An attribute of a GPU, by its name without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.ask("devices", device, "cuDeviceGetAttribute", attribute, self.devices[device]))

    def has(self, device: int, name: str) -> bool:
        """Whether a GPU has what an attribute stands for."""
        return self.attribute(device, name) != 0

    def fact(self, index: int) -> GpuFacts:
        """UUID, name and memory of a GPU, or of a slice of one."""
        device = self.devices[index]
        # The older call gives the UUID of the GPU for each of its slices. Some releases of the package have no other.
        ask = "cuDeviceGetUuid_v2" if hasattr(self.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        raw = bytes(self.ask("devices", index, ask, device).bytes).hex()
        parts = (raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:])
        name = self.ask("devices", index, "cuDeviceGetName", _NAME_NBYTES, device).split(b"\0")[0].decode()
        total = self.ask("devices", index, "cuDeviceTotalMem", device)
        return GpuFacts(index, ("MIG-" if " MIG " in name else "GPU-") + "-".join(parts), name, total)

    def locate(self, location: Any, device: int) -> None:
        """Let a ``CUmemLocation`` stand for a GPU."""
        location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device


class _Named:
    """The block of one call: a refusal in it becomes an error that names the call. A generator would cost as much as a
    call of the driver."""

    __slots__ = ("_device", "_name")

    def __init__(self, name: str, device: int) -> None:
        self._name = name
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Refused):
            raise DeviceError(self._name, error.code, self._device, False, error.reason) from error


class _Current(_Named):
    """The same; at its end the context and the mode of captures are those of before."""

    __slots__ = ("_api", "_mode", "_pops", "_relaxes")

    def __init__(self, name: str, device: int, api: Any, pops: bool, relaxes: bool) -> None:
        super().__init__(name, device)
        self._api = api
        self._pops = pops
        self._relaxes = relaxes

    def __enter__(self) -> None:
        if self._relaxes:
            relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            _, self._mode = self._api.cuThreadExchangeStreamCaptureMode(relaxed)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._relaxes:
            self._api.cuThreadExchangeStreamCaptureMode(self._mode)
        if self._pops:
            self._api.cuCtxPopCurrent()
        super().__exit__(kind, error, traceback)


def bindings() -> Any:
    """The module ``cuda.bindings.driver``.

    Raises:
        DeviceUnavailable: it is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceUnavailable(
            f"the package cuda-bindings cannot be imported ({error}): pip install 'zcactor[gpu]', or set gpu to 'fake' "
            "(ZCACTOR_GPU=fake) for fake GPUs"
        ) from error
    return driver


def free_by_nvml(nvml: Any, uuid: str) -> int | None:
    """Bytes of a GPU's memory that are not allocated, asked without a context on the GPU: a context takes 300 MiB and
    more of that memory.

    Args:
        nvml: the module ``cuda.bindings.nvml``, or what stands in its place in a test; None to import that module.
        uuid: of the GPU, or of a slice of one.

    Returns:
        The bytes; None where NVML is missing or does not answer for this GPU.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("cuda.bindings.nvml")
        except ImportError:  # releases before 13 have no such module
            return None
    try:
        nvml.init_v2()  # counted; the first one of a process loads the library
        return int(nvml.device_get_memory_info_v2(nvml.device_get_handle_by_uuid(uuid)).free)
    except (RuntimeError, nvml.NvmlError):  # no library, or a GPU whose memory is the host's
        return None


def _initialise(api: Any) -> None:
    try:
        (code,) = api.cuInit(0)
    except RuntimeError as error:  # cuda.pathfinder found no library
        raise DeviceUnavailable(
            f"NVIDIA's driver is not installed on this machine, or not visible in this container ({error}); set gpu to "
            "'fake' (ZCACTOR_GPU=fake) for fake GPUs"
        ) from error
    if code == _NO_DEVICE:
        raise DeviceUnavailable("NVIDIA's driver shows no GPU to this process; CUDA_VISIBLE_DEVICES limits them")
    if code:
        raise DeviceUnavailable(f"NVIDIA's driver does not start: {code.name}; nvidia-smi may say more")
