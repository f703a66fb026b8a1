"""The driver for CUDA: over a stand-in for CUDA's calls everywhere, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from tests.conformance.device import GpuDriverSuite
from tests.conformance.device_peer import DevicePeer, finish, map_anew, mapped, read, until_done, write
from zcactor.device.cuda import CudaGpuDriver
from zcactor.device.driver import EVENT_NBYTES, CudaCode
from zcactor.errors import DeviceError, DeviceUnavailable

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import StandIn, opened_cuda
from tests.device.helpers import draw_openers, held

BUFFER = ctypes.create_string_buffer(64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "opener",
    [
        partial(opened_cuda, "devices=2,late=3"),
        partial(opened_cuda, "devices=2,peer=none,export=none,events=none,dmabuf=no,readonly=no"),
        partial(opened_cuda, "devices=2,captures=0.5"),
    ],
    ids=["with", "without", "captures"],
)
class TestOverFakeGpus(GpuDriverSuite):
    """The suite, over the stand-in for CUDA's calls."""


@pytest.mark.slow
class TestDrawn(GpuDriverSuite):
    """The same, by options that seeds draw. ``--rounds N`` draws N times as many."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the options of `TestDrawn`."""
    if metafunc.cls is TestDrawn and "opener" in metafunc.fixturenames:
        draw_openers(metafunc, opened_cuda)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("opener", [CudaGpuDriver])
class TestOnGpus(GpuDriverSuite):
    """The suite, on the GPUs of this machine."""


@pytest.mark.parametrize(
    ("options", "direct", "expected"),
    [("late=0", 1, (1, 1, 1, 1, 0, 1)), ("late=0", 0, (1, 1, 1, 1, 0, 0)), ("export=none", 1, (1, 0, 1, 1, 0, 1))],
)
def test_memory_is_made_with_what_the_gpu_has(options: str, direct: int, expected: tuple[int, ...]) -> None:
    """Type, handles, place, compression and GPUDirect, in the structure by which PyTorch's memory is made."""
    driver = opened_cuda(f"devices=2,{options}", GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=direct)
    assert struct.unpack("<iiii8xBB6x", driver.allocation_properties(1)) == expected


def test_what_a_gpu_can_do() -> None:
    with pytest.raises(DeviceUnavailable, match="no virtual memory"):
        opened_cuda(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=0)
    assert opened_cuda().exports and opened_cuda().shared_events and opened_cuda().exports_to_cards
    assert not opened_cuda("export=none").exports
    assert not opened_cuda(version=11010).shared_events
    assert not opened_cuda(DMA_BUF_SUPPORTED=0).exports_to_cards


@pytest.mark.parametrize(
    ("ordering", "options", "calls"), [(0, 1, [1]), (100, 3, [1]), (200, 0, [])], ids=["none", "own", "all"]
)
def test_writes_of_cards_are_flushed_where_the_gpu_asks_for_it(ordering: int, options: int, calls: list[int]) -> None:
    api = StandIn(
        "devices=2", GPU_DIRECT_RDMA_WRITES_ORDERING=ordering, GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS=options
    )  # fmt: skip
    CudaGpuDriver(api).flush(1)
    assert api.flushed == calls


@pytest.mark.parametrize(
    "lacks",
    [{"GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 2, "GPU_DIRECT_RDMA_WRITES_ORDERING": 100}, {"DMA_BUF_SUPPORTED": 0}],
)
def test_writes_of_cards_that_cannot_be_ordered(lacks: dict[str, int]) -> None:
    with pytest.raises(DeviceError, match="network card") as caught:
        CudaGpuDriver(StandIn("", 13000, **lacks)).flush(0)
    assert (caught.value.call, caught.value.code) == ("flush", CudaCode.NOT_SUPPORTED)


def test_fills_become_few_calls() -> None:
    calls = StandIn()
    driver = CudaGpuDriver(calls)
    address = mapped(driver, 0, driver.granularity)
    for pattern in (b"a", b"ab", b"abcd", bytes(8), b"\1\0\0\0" * 4):
        driver.fill(0, address, pattern, 1000, 0)
    finish(driver, 0)
    assert len(calls.calls) == 5
    driver.fill(0, address, b"abcdefgh", 3, 0)
    assert read(driver, 0, address, 24) == b"abcdefgh" * 3


def test_rows_further_apart_than_a_pitch_are_copied_one_by_one() -> None:
    calls = StandIn(MAX_PITCH=100)
    driver = CudaGpuDriver(calls)
    address = mapped(driver, 0, driver.granularity)
    write(driver, 0, address, bytes(range(200)) * 2)
    calls.calls.clear()
    driver.copy(0, address + 1000, address, 3, 2, (2, 100), 0)
    driver.copy(0, address + 2000, address, 3, 2, (2, 101), 0)
    assert [each[3] for each in calls.calls] == [3, 1, 1, 1]
    assert read(driver, 0, address + 1000, 6) == bytes((0, 1, 100, 101, 0, 1))
    assert read(driver, 0, address + 2000, 6) == bytes((0, 1, 101, 102, 2, 3))


def test_streams_of_other_libraries() -> None:
    calls = StandIn()
    driver = CudaGpuDriver(calls)
    event, (_, foreign) = driver.event(0), (calls.cuCtxPushCurrent(1), calls.cuStreamCreate(1)[1])
    driver.record(0, event, int(foreign))
    for wrong in (3, -8, int(foreign) + 4):
        with pytest.raises(DeviceError) as caught:
            driver.record(0, event, wrong)
        assert caught.value.code == CudaCode.INVALID_HANDLE
    for call in (partial(driver.end_stream, 0, int(foreign)), partial(driver.end_stream, 0, 0)):
        with pytest.raises(DeviceError, match="was made for GPU 0"):
            call()


def test_memory_of_other_libraries() -> None:
    calls = StandIn()
    driver = CudaGpuDriver(calls)
    address = mapped(calls.gpus, 0, driver.granularity)
    assert driver.owner_of(address + 5) == (0, address, driver.granularity)


def test_failures_name_the_call() -> None:
    driver = opened_cuda("fail=export")
    handle, nbytes = driver.create(0, driver.granularity), driver.granularity
    address = map_anew(driver, 0, handle, nbytes)
    with pytest.raises(DeviceError, match="export on GPU 0 failed with error 999: cuMemExportToShareableHandle"):
        driver.export(0, address, nbytes)
    os.close(driver.export(0, address, nbytes))
    fds = len(os.listdir("/proc/self/fd"))
    driver.unmap(0, address, nbytes)
    with pytest.raises(DeviceError):
        driver.export(0, address, nbytes)
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(DeviceError, match="has 2097152 bytes, not 4194304"):
        driver.map(0, driver.reserve(0, 2 * driver.granularity), handle, 2 * driver.granularity, True)


@pytest.mark.parametrize("call", ["map", "unmap", "release"])
def test_a_failure_changes_nothing(call: str) -> None:
    driver = opened_cuda(f"fail={call}")
    nbytes = driver.granularity
    handle, base = driver.create(0, nbytes), driver.reserve(0, nbytes)
    steps: dict[str, Callable[[], object]] = {
        "map": partial(driver.map, 0, base, handle, nbytes, True),
        "unmap": partial(driver.unmap, 0, base, nbytes),
        "release": partial(driver.release, 0, handle),
    }
    for name, step in steps.items():
        if name == call:
            with pytest.raises(DeviceError, match=f"^{call} on GPU 0"):
                step()
        step()
    assert driver.free(0) == driver.devices()[0].total


@pytest.mark.slow
def test_events_of_a_process_that_has_ended() -> None:
    driver = opened_cuda()
    with DevicePeer(opened_cuda) as peer:
        event = peer.call("event", 0)
        address = peer.call("mapped", 0, driver.granularity)
        peer.call("fill", 0, address, b"a", 1, 0)
        peer.call("record", 0, event, 0)
        peer.call("finish", 0, 0)
        peer.share_events(driver)
        exported = peer.call("export_event", 0, event)
        opened = driver.open_event(0, exported)
        with pytest.raises(DeviceError, match="there is no event -1"):
            driver.record(0, opened, 0)
        assert not driver.event_is_lost(0, opened)
        until_done(driver, 0, opened)  # the number is written behind the work
        peer.kill()
    assert not driver.event_is_lost(0, opened) and driver.done(0, opened), "its work was done before"
    driver.end_event(0, opened)
    with DevicePeer(opened_cuda) as peer:
        peer.share_events(driver)  # and the page of a process that has ended is not known any more
    with pytest.raises(DeviceError, match="whose page is known"):
        driver.open_event(0, exported)


def test_it_ends_with_the_last_reference() -> None:
    calls = StandIn("devices=2")
    driver = CudaGpuDriver(calls)
    nbytes = driver.granularity
    mapped(driver, 1, nbytes)
    driver.create(0, nbytes)
    driver.stream(1)
    driver.event(0)
    ended = weakref.ref(driver)
    assert sorted(calls.retained) == [0, 1]
    del driver
    gc.collect()
    assert ended() is None and not calls.retained
    assert all(calls.gpus.free(each.index) == each.total for each in calls.gpus.devices())


def test_events_that_processes_cannot_share() -> None:
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
