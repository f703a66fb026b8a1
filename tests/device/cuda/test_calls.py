"""Calls of CUDA: errors say which part is missing, or name the call."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from zcactor.device.cuda.calls import CudaCalls, bindings
from zcactor.errors import DeviceError, DeviceUnavailable
from zcactor.testing.device_peer import mapped

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
    with pytest.raises(DeviceUnavailable, match=r"install zcactor\[gpu\]"):
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
