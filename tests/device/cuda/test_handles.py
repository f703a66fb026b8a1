"""Memory that leaves the process by handles, over the stand-in for CUDA's calls."""

from __future__ import annotations

from functools import partial

import pytest

from zcactor.device.driver import HANDLE_NBYTES, CudaCode
from zcactor.errors import DeviceError
from zcactor.testing.device_peer import DevicePeer, read, write

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import StandIn, opened_cuda
from zcactor.device.cuda import CudaGpuDriver


def _code(caught: pytest.ExceptionInfo[DeviceError]) -> CudaCode:
    return CudaCode(caught.value.code)


def test_all_gpus_that_reach_memory_may_access_it() -> None:
    calls = StandIn("devices=3,export=legacy")
    driver = CudaGpuDriver(calls)
    nbytes = driver.granularity
    for _ in range(2):  # the second time they may already
        handle = driver.create(1, nbytes)
        place = driver.map(1, driver.reserve(1, nbytes), handle, nbytes, True)
        assert calls.reaching == {(0, 1), (2, 1)}
        write(driver, 2, place.address, b"from GPU 2")
        assert read(driver, 0, place.address, 10) == b"from GPU 2"


def test_gpus_out_of_reach_get_no_access() -> None:
    calls = StandIn("devices=2,export=legacy,peer=none")
    driver = CudaGpuDriver(calls)
    nbytes = driver.granularity
    driver.map(0, driver.reserve(0, nbytes), driver.create(0, nbytes), nbytes, True)
    assert not calls.reaching


@pytest.mark.parametrize("first", ["unmap", "release"])
def test_memory_ends_when_it_is_neither_mapped_nor_held(first: str) -> None:
    driver = opened_cuda("export=legacy")
    nbytes, total = driver.granularity, driver.devices()[0].total
    handle = driver.create(0, nbytes)
    address, readonly = driver.map(0, driver.reserve(0, nbytes), handle, nbytes, False)
    assert not readonly and driver.free(0) == total - nbytes
    if first == "unmap":
        driver.unmap(0, address, nbytes)
        assert driver.free(0) == total - nbytes
        driver.release(0, handle)
    else:
        driver.release(0, handle)
        assert driver.free(0) == total - nbytes
        driver.unmap(0, address, nbytes)
    assert driver.free(0) == total


@pytest.mark.parametrize("call", ["export", "release"])
def test_a_failure_changes_nothing(call: str) -> None:
    # The driver itself has made each call once before, to see whether memory can be exported so.
    driver = opened_cuda(f"export=legacy,fail={call}:2")
    nbytes, total = driver.granularity, driver.devices()[0].total
    handle = driver.create(0, nbytes)
    step = driver.export if call == "export" else driver.release
    with pytest.raises(DeviceError, match=f"^{call} on GPU 0"):
        step(0, handle)
    assert driver.free(0) == total - nbytes
    step(0, handle)
    if call == "export":
        driver.release(0, handle)
    assert driver.free(0) == total


def test_handles_of_other_things() -> None:
    driver = opened_cuda("export=legacy")
    nbytes = driver.granularity
    own = driver.export(0, driver.create(0, nbytes))
    for what in (bytes(HANDLE_NBYTES), b"short", bytes(HANDLE_NBYTES + 1), own, 0):
        with pytest.raises(DeviceError) as caught:
            driver.import_(0, what, nbytes)
        assert _code(caught) == CudaCode.INVALID_VALUE
    with pytest.raises(DeviceError, match="by descriptors only"):
        opened_cuda().import_(0, own, nbytes)


@pytest.mark.slow
def test_memory_of_another_process() -> None:
    driver = opened_cuda("export=legacy")
    nbytes = driver.granularity
    with DevicePeer(partial(opened_cuda, "export=legacy")) as peer:
        theirs = peer.call("create", 0, nbytes)
        there = peer.call("map", 0, peer.call("reserve", 0, nbytes), theirs, nbytes, True).address
        exported = peer.call("export", 0, theirs)
        with pytest.raises(DeviceError) as caught:
            driver.import_(0, exported, 2 * nbytes)
        assert _code(caught) == CudaCode.INVALID_VALUE
        handle = driver.import_(0, exported, nbytes)
        address = driver.map(0, 0, handle, nbytes, False).address
        write(driver, 0, address, b"from here")
        assert peer.call("read", 0, there, 9) == b"from here"
        with pytest.raises(DeviceError, match="another process's memory") as caught:
            driver.export(0, handle)
        assert _code(caught) == CudaCode.NOT_SUPPORTED
        driver.release(0, handle)
        assert read(driver, 0, address, 9) == b"from here"
        driver.unmap(0, address, nbytes)
        again = driver.import_(0, exported, nbytes)
        driver.release(0, again)


def test_it_ends_with_everything_given_back() -> None:
    calls = StandIn("devices=2,export=legacy")
    driver = CudaGpuDriver(calls)
    nbytes = driver.granularity
    handle = driver.create(0, nbytes)
    driver.map(0, 0, handle, nbytes, True)
    driver.release(0, handle)
    driver.create(1, nbytes)
    driver.map(1, 0, driver.create(1, nbytes), nbytes, True)
    driver.close()
    assert not calls._allocated and not calls.retained
