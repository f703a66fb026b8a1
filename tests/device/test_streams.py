"""Streams of a program."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.device.helpers import held, opened
from zcactor.device.array import empty_array
from zcactor.device.streams import GpuStream, current_stream, streams
from zcactor.errors import DeviceError


def test_a_stream_is_done_when_its_work_is() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream, array = GpuStream(gpu), empty_array(gpu, (10,), np.dtype("u1"))
        assert stream.done() and stream.__cuda_stream__() == (0, stream.ptr)
        with held(store.driver, stream.ptr):
            assert stream.done()
            token = streams.set({0: stream.ptr})
            array.fill(1)
            streams.reset(token)
            assert not stream.done()
        stream.synchronize()
        while not stream.done():  # the event is a little earlier than the end of its own record
            stream.synchronize()


def test_the_default_stream() -> None:
    assert current_stream(0) == current_stream(3) == 0


def test_streams_end_with_their_object() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        number = GpuStream(gpu).ptr
        gc.collect()
        with pytest.raises(DeviceError):
            gpu.driver.idle(0, number)


@pytest.mark.parametrize("call", ["stream", "end_stream"])
def test_failures(call: str) -> None:
    with opened(f"fail={call}") as store:
        if call == "stream":
            with pytest.raises(DeviceError):
                GpuStream(store.gpu(0))
        else:
            GpuStream(store.gpu(0))
        assert GpuStream(store.gpu(0)).done()
