"""Calls of CUDA: errors say which part is missing, or name the call."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conformance.device_peer import mapped
from zcactor.device.array import empty_array
from zcactor.device.cuda import CudaGpuDriver, calls
from zcactor.device.cuda.calls import CudaCalls, bindings, free_by_nvml
from zcactor.device.store import DeviceStore
from zcactor.errors import DeviceError, DeviceUnavailable
from zcactor.testing import until

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import StandIn, opened_cuda


class Starting(StandIn):
    """CUDA that starts with a code, or has no library."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self._code = code

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if not self._code:
            raise RuntimeError("libcuda.so.1 was not found")
        return (self.CUresult(self._code),)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "is not installed on this machine.*libcuda.*ZCACTOR_GPU=fake"),
        (100, "shows no GPU.*CUDA_VISIBLE_DEVICES"),
        (999, "does not start: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_without_a_gpu(code: int, text: str) -> None:
    with pytest.raises(DeviceUnavailable, match=text):
        CudaCalls(Starting(code))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(bindings(), "cuInit")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'zcactor\[gpu\]'"):
        bindings()


def test_a_broken_context() -> None:
    driver = opened_cuda("fail=fatal")
    address, event = mapped(driver, 0, driver.granularity), driver.event(0)
    driver.fill(0, address, b"a", 1, 0)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS.*start it again") as caught:
        while True:
            driver.record(0, event, 0)
            driver.done(0, event)
    assert caught.value.fatal


TELLING = ("inconsistent state", "must be terminated", "cannot be used anymore", "uncorrectable", "shutting down")
"""The words by which the documentation of an error says that no more work is done."""


def test_errors_that_end_all_work_are_known_by_their_documentation() -> None:
    api = bindings()
    telling = [
        error for error in api.CUresult if any(words in " ".join((error.__doc__ or "").split()) for words in TELLING)
    ]
    assert len(telling) > 10, "the bindings document their errors"
    assert [error.name for error in telling if int(error) not in calls._FATAL] == []


async def test_contexts_are_made_where_arrays_are() -> None:
    """Each takes some 500 MiB of its GPU."""
    api = StandIn("devices=8")
    store = DeviceStore(CudaGpuDriver(api), None, 0, asyncio.get_running_loop())
    array = empty_array(store.gpu(3), (1000,), np.dtype("f4"))
    assert store.driver.can_access(3, 4)
    seen = array.holder.gpu.arena
    page = np.zeros(4096, "u1")
    store.driver.pin(page.ctypes.data, page.nbytes)
    store.driver.unpin(page.ctypes.data, page.nbytes)
    assert store.driver.owner_of(page.ctypes.data) is None
    del array
    await until(lambda: not seen.taken, "the memory has gone back")
    assert api.retained == [3]


class NvmlStandIn:
    """Stands for the module ``cuda.bindings.nvml``.

    Args:
        fails: the call that fails, and its error.
    """

    class NvmlError(Exception):
        """NVML's."""

    def __init__(self, fails: str = "", error: type[Exception] = RuntimeError) -> None:
        self.fails = fails
        self.error = error
        self.uuids: list[str] = []

    def _check(self, call: str) -> None:
        if call == self.fails:
            raise self.error("of NVML")

    def init_v2(self) -> None:
        self._check("init")

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        self._check("handle")
        self.uuids.append(uuid)
        return len(self.uuids)

    def device_get_memory_info_v2(self, handle: int) -> Any:
        self._check("memory")
        return SimpleNamespace(free=handle << 30)


def test_free_memory_is_told_without_contexts() -> None:
    api, nvml = StandIn("devices=8"), NvmlStandIn()
    driver = CudaGpuDriver(api, nvml)
    assert [driver.free(index) for index in range(8)] == [each << 30 for each in range(1, 9)]
    assert nvml.uuids == [each.uuid for each in driver.devices()] and not api.retained
    driver.stream(3)
    assert driver.free(3) == api.gpus.free(3), "where there is a context, CUDA is asked"
    with pytest.raises(DeviceUnavailable):
        driver.free(8)


@pytest.mark.parametrize("call", ["init", "handle", "memory"])
@pytest.mark.parametrize("error", [RuntimeError, NvmlStandIn.NvmlError])
def test_free_memory_where_nvml_does_not_answer(call: str, error: type[Exception]) -> None:
    api = StandIn("devices=2")
    driver = CudaGpuDriver(api, NvmlStandIn(call, error))
    assert driver.free(1) == api.gpus.free(1)
    assert api.retained == [1]


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    assert free_by_nvml(None, "GPU-1") is None
