"""Functions that CUDA calls, over the stand-in."""

from __future__ import annotations

import threading

import pytest

from zcactor.errors import DeviceError

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import opened_cuda
from zcactor.device.cuda import told


def test_a_function_is_kept_until_it_was_called() -> None:
    driver, called = opened_cuda(), threading.Event()
    before = len(told._queued)
    driver.tell(0, driver.stream(0), called.set)
    assert called.wait(60)
    assert len(told._queued) == before


def test_a_function_that_was_refused_is_not_kept() -> None:
    driver = opened_cuda()
    before = len(told._queued)
    stream = driver.stream(0)
    del driver._state.streams[stream]
    driver._api.gpus.end_stream(0, driver._api._stream(stream))
    with pytest.raises(DeviceError, match="cuLaunchHostFunc"):
        driver.tell(0, stream, bool)
    assert len(told._queued) == before
