"""CUDA's own events, where processes cannot share them."""

from __future__ import annotations

import pytest

from tests.conformance.device_peer import finish
from zcactor.device.driver import EVENT_NBYTES, CudaCode
from zcactor.errors import DeviceError

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import opened_cuda
from tests.device.helpers import held


def test_they_stay_in_the_process() -> None:
    driver = opened_cuda("devices=2,events=none")
    event, stream = driver.event(0), driver.stream(0)
    calls = driver._api
    with held(calls.gpus, calls._stream(stream)):
        driver.record(0, event, stream)
        assert not driver.done(0, event) and not driver.event_is_lost(0, event)
        driver.wait(0, 0, event)
        assert not driver.idle(0, 0)
    finish(driver, 0)
    assert driver.done(0, event)
    for code, call in (
        (CudaCode.NOT_SUPPORTED, lambda: driver.export_event(0, event)),
        (CudaCode.NOT_SUPPORTED, lambda: driver.open_event(0, bytes(EVENT_NBYTES))),
        (CudaCode.INVALID_HANDLE, lambda: driver.record(1, event, 0)),
        (CudaCode.INVALID_HANDLE, lambda: driver.done(0, event + 1)),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == code
    driver.end_event(0, event)
    with pytest.raises(DeviceError, match="there is no event"):
        driver.end_event(0, event)
