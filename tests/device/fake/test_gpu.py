"""The driver of fake GPUs: it embarrasses code that touches device memory, orders nothing, or ignores failures."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conformance.device_peer import DevicePeer, finish, map_anew, mapped, read, write
from tests.device.cuda.stand_in import opened_cuda
from tests.device.helpers import NEVER, held, settle
from zcactor.device.driver import PAGE_NBYTES, CudaCode, GpuDriver
from zcactor.device.fake import FakeGpuDriver, host_uuids, system
from zcactor.device.fake.gpu import CALLS
from zcactor.errors import DeviceError, DeviceUnavailable

NBYTES = FakeGpuDriver.granularity
BUFFER = ctypes.create_string_buffer(64)
"""Memory of the host that outlives all copies."""


@pytest.mark.parametrize("touch", ["ctypes.string_at(address, 1)", "ctypes.memset(address, 0, 1)"])
@pytest.mark.slow
def test_host_code_that_touches_a_device_pointer_crashes(touch: str) -> None:
    program = (
        "import ctypes\n"
        "from zcactor.device.fake import FakeGpuDriver\n"
        "from tests.conformance.device_peer import map_anew, mapped, read, write\n"
        "driver = FakeGpuDriver()\n"
        f"address = mapped(driver, 0, {NBYTES})\n"
        "write(driver, 0, address, b'x')\n"
        "assert read(driver, 0, address, 1) == b'x'\n"
        f"{touch}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def between_streams(options: str) -> tuple[bytes, bytes]:
    """Write on one stream, let another wait for it. Returns what that has read before the first goes on, and after."""
    driver = FakeGpuDriver(options)
    address, producer, consumer, event = mapped(driver, 0, NBYTES), driver.stream(0), driver.stream(0), driver.event(0)
    write(driver, 0, address, b"old...")
    with held(driver, producer):
        for _ in range(3):
            driver.fill(0, address, b"n", 3, producer)
        driver.record(0, event, producer)
        driver.wait(0, consumer, event)
        driver.copy(0, address + 3, address, 1, 3, (0, 0), consumer)
        settle(driver)
        before = read(driver, 0, address + 3, 3)
    finish(driver, 0, producer)
    finish(driver, 0, consumer)
    return before, read(driver, 0, address + 3, 3)


@pytest.mark.parametrize("seed", range(5))
def test_waits_order_late_streams(seed: int) -> None:
    assert between_streams(f"late=20,seed={seed}") == (b"...", b"nnn")


def test_without_waits_bytes_are_stale() -> None:
    assert between_streams("waits=no") == (b"old", b"old")


def test_a_stream_that_is_held() -> None:
    driver = FakeGpuDriver("devices=2,late=1")
    address, stream, gate = mapped(driver, 0, NBYTES), driver.stream(0), threading.Event()
    driver.hold(0, stream, gate.is_set)
    assert driver.idle(0, stream) and driver.rests(0) and driver.rests(1)
    driver.fill(0, address, b"a", 1, stream)
    finish(driver, 0)  # other streams go on
    settle(driver)
    assert not driver.idle(0, stream)
    gate.set()
    finish(driver, 0, stream)
    settle(driver)
    assert driver.idle(0, stream)
    gate.clear()
    write(driver, 0, address, b"b", stream)  # it was held until then
    for device, wrong in ((0, 99), (1, stream)):
        with pytest.raises(DeviceError, match="hold"):
            driver.hold(device, wrong, gate.is_set)


@pytest.mark.slow
def test_a_peer_reads_stale_bytes_without_waits() -> None:
    driver = FakeGpuDriver("waits=no")
    address = mapped(driver, 0, NBYTES)
    with DevicePeer(partial(FakeGpuDriver, "waits=no")) as peer:
        exported = driver.export(0, address, NBYTES)
        imported = peer.call("import_", 0, -1, NBYTES, driver.devices()[0].uuid, fd=exported)
        os.close(exported)
        there = peer.call("map_anew", 0, imported, NBYTES, False)
        event, gate = driver.event(0), driver.stream(0)
        driver.hold(0, gate, NEVER)
        driver.fill(0, address, b"n", 3, gate)
        driver.record(0, event, gate)
        peer.share_events(driver)
        peer.call("wait", 0, 0, peer.call("open_event", 0, driver.export_event(0, event)))
        assert peer.call("read", 0, there, 3) == bytes(3)  # it would not return while the wait holds
        assert not driver.done(0, event)
    driver.close()


def one(driver: FakeGpuDriver, call: str) -> None:
    """Make a call with arguments that would do."""
    address = ctypes.addressof(BUFFER)
    arguments: dict[str, tuple[object, ...]] = {
        "devices": (), "can_access": (0, 0), "create": (0, NBYTES), "reserve": (0, NBYTES),
        "copy": (0, address, address, 1, 1, (1, 1), 0), "fill": (0, address, b"a", 1, 0), "pin": (address, 64),
        "unpin": (address, 64), "owner_of": (address,), "map": (0, address, 1, NBYTES, True),
        "import_": (0, -1, NBYTES, ""), "dma_buf": (0, NBYTES, NBYTES), "wait": (0, 0, 1), "record": (0, 1, 0),
        "open_event": (0, b""), "event_page": (), "add_event_page": (-1, -1),
    }  # fmt: skip
    counts = {
        "unreserve": 3, "unmap": 3, "export": 3, "keep_promise": 3, "free": 1, "flush": 1, "stream": 1, "event": 1,
        "promise_event": 1, "lose_events": 0,
    }  # fmt: skip
    getattr(driver, call)(*arguments.get(call, (0, 1, 1)[: counts.get(call, 2)]))


def again(driver: FakeGpuDriver, call: str) -> int:
    """Make a call once more. Returns the code of its error, as there may be no such handle; 0 for success."""
    try:
        one(driver, call)
    except DeviceError as error:
        return error.code
    return 0


@pytest.mark.parametrize("call", sorted(CALLS))
def test_each_call_fails_once(call: str) -> None:
    driver = FakeGpuDriver(f"fail={call}")
    with pytest.raises(DeviceError, match="made it fail") as caught:
        one(driver, call)
    assert (caught.value.call, caught.value.code, caught.value.fatal) == (call, CudaCode.UNKNOWN, False)
    assert again(driver, call) != CudaCode.UNKNOWN


def test_the_third_call_fails() -> None:
    driver = FakeGpuDriver("fail=create:3")
    driver.create(0, NBYTES)
    driver.create(0, NBYTES)
    with pytest.raises(DeviceError):
        driver.create(0, NBYTES)
    driver.create(0, NBYTES)


def broken(driver: FakeGpuDriver, work: Callable[[], object]) -> DeviceError:
    """The error of a driver whose context breaks by some work."""
    event = driver.event(0)
    with held(driver):  # a broken context takes no record
        work()
        driver.record(0, event, 0)
    with pytest.raises(DeviceError) as caught:
        while not driver.done(0, event):
            pass
    assert caught.value.fatal and caught.value.code == CudaCode.ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="start it again"):
        driver.create(0, NBYTES)
    return caught.value


def test_a_context_that_breaks_at_some_operation() -> None:
    driver = FakeGpuDriver("fail=fatal:4")
    address = mapped(driver, 0, NBYTES)
    write(driver, 0, address, b"1")
    write(driver, 0, address, b"2")
    assert read(driver, 0, address, 1) == b"2"
    assert "fatal" in broken(driver, lambda: driver.fill(0, address, b"3", 1, 0)).reason


def test_illegal_addresses_break_the_context() -> None:
    driver = FakeGpuDriver()
    address = mapped(driver, 0, NBYTES)
    assert "nothing is mapped" in broken(driver, lambda: driver.fill(0, address + NBYTES - 1, b"a", 2, 0)).reason


def test_a_write_without_write_access_breaks_the_context() -> None:
    driver = FakeGpuDriver()
    address = driver.reserve(0, NBYTES)
    assert driver.map(0, address, driver.create(0, NBYTES), NBYTES, False)  # no writes
    assert "write access" in broken(driver, lambda: driver.fill(0, address, b"a", 1, 0)).reason


@pytest.mark.slow
def test_an_event_ends_with_its_owner() -> None:
    driver = FakeGpuDriver()
    with DevicePeer(FakeGpuDriver) as peer:
        peer.call("hold", 0, 0, NEVER)
        there = peer.call("mapped", 0, NBYTES)
        event = peer.call("event", 0)
        peer.call("fill", 0, there, b"a", 1, 0)
        peer.call("record", 0, event, 0)
        peer.share_events(driver)
        exported = peer.call("export_event", 0, event)
        opened, done = driver.open_event(0, exported), driver.event(0)
        driver.wait(0, 0, opened)
        driver.record(0, done, 0)
        assert not driver.done(0, opened) and not driver.event_is_lost(0, opened)
        peer.kill()
    finish(driver, 0)
    assert driver.event_is_lost(0, opened) and not driver.done(0, opened)
    driver.end_event(0, opened)


def test_visible_gpus() -> None:
    uuids = [each.uuid for each in FakeGpuDriver("devices=3").devices()]
    assert [uuid[-2:] for uuid in uuids] == ["00", "01", "02"]
    assert host_uuids("devices=3") == uuids
    driver = FakeGpuDriver("devices=3", uuids[2])
    assert [(each.index, each.uuid) for each in driver.devices()] == [(0, uuids[2])]
    mapped(driver, 0, NBYTES)
    with pytest.raises(DeviceUnavailable, match="sees 1"):
        driver.create(1, NBYTES)
    assert FakeGpuDriver("devices=3", "").devices() == []


def test_memory_of_a_hidden_gpu_is_mapped_by_a_visible_one() -> None:
    driver, other = FakeGpuDriver("devices=2"), FakeGpuDriver("devices=2", "1")
    address = mapped(driver, 0, NBYTES)
    write(driver, 0, address, b"far")
    fd = driver.export(0, address, NBYTES)
    there = map_anew(other, 0, other.import_(0, fd, NBYTES, driver.devices()[0].uuid), NBYTES, False)
    os.close(fd)
    assert read(other, 0, there, 3) == b"far"
    assert other.owner_of(there) == (-1, there, NBYTES)


def test_unequal_options() -> None:
    driver = FakeGpuDriver("memory=4MiB,export=none,events=none")
    assert (driver.exports, driver.shared_events, driver.devices()[0].total) == (False, False, 4 << 20)
    with pytest.raises(DeviceError):
        driver.open_event(0, bytes(64))
    with pytest.raises(ValueError, match="its options are"):
        FakeGpuDriver("fail=close")


PAGES = 4 * PAGE_NBYTES


def shared_pages(value: bytes) -> tuple[int, int]:
    """Pages of shared memory that have one value in all bytes. Returns their descriptor, and their address."""
    fd, address = os.memfd_create("pages"), system.reserved(PAGES)
    os.pwrite(fd, value * PAGES, 0)
    system.map_at(address, PAGES, fd, writable=True)
    return fd, address


@pytest.mark.parametrize("opener", [FakeGpuDriver, opened_cuda])
def test_a_copy_across_an_end_of_pinned_memory_is_refused(opener: Callable[[], GpuDriver]) -> None:
    driver = opener()
    address, (fd, host) = mapped(driver, 0, NBYTES), shared_pages(b"p")
    os.close(fd)
    driver.pin(host + PAGE_NBYTES, PAGE_NBYTES)
    for low, rows, stride in ((0, 1, PAGE_NBYTES), (PAGE_NBYTES, 1, PAGE_NBYTES), (0, 2, 2 * PAGE_NBYTES)):
        for into, out in ((address, host + low), (host + low, address)):
            with pytest.raises(DeviceError) as caught:
                driver.copy(0, into, out, rows, PAGE_NBYTES + (rows == 1), (stride, stride), 0)
            assert (caught.value.code, caught.value.fatal) == (CudaCode.INVALID_VALUE, False)
    for low in range(0, PAGES, PAGE_NBYTES):  # each page is pinned as a whole, or not at all
        driver.copy(0, address + low, host + low, 1, PAGE_NBYTES, (0, 0), 0)
    assert read(driver, 0, address, PAGES) == b"p" * PAGES
    driver.unpin(host + PAGE_NBYTES, PAGE_NBYTES)
    driver.copy(0, address, host, 1, PAGES, (0, 0), 0)
    finish(driver, 0)


def test_the_gpu_uses_the_pages_that_were_pinned() -> None:
    driver = FakeGpuDriver()
    address, (fd, host) = mapped(driver, 0, NBYTES), shared_pages(b"o")
    driver.pin(host, PAGES)
    other, _ = shared_pages(b"n")
    system.map_at(host, PAGES, other, writable=True)  # a fork gives the parent's memory other pages, too
    driver.copy(0, address, host, 1, PAGES, (0, 0), 0)
    assert read(driver, 0, address, PAGES) == b"o" * PAGES
    driver.fill(0, address, b"g", PAGES, 0)
    driver.copy(0, host, address, 1, PAGES, (0, 0), 0)
    finish(driver, 0)
    assert (ctypes.string_at(host, 1), os.pread(fd, 1, 0)) == (b"n", b"g")
    driver.unpin(host, PAGES)
    driver.copy(0, address, host, 1, PAGES, (0, 0), 0)
    assert read(driver, 0, address, PAGES) == b"n" * PAGES
    os.close(fd)
    os.close(other)


def test_memory_that_is_unpinned_before_its_copy_breaks_the_context() -> None:
    driver = FakeGpuDriver()
    address, (fd, host) = mapped(driver, 0, NBYTES), shared_pages(b"p")
    os.close(fd)
    driver.pin(host, PAGES)
    with held(driver):
        driver.copy(0, address, host, 1, PAGES, (0, 0), 0)
        driver.unpin(host, PAGES)
    with pytest.raises(DeviceError) as caught:
        finish(driver, 0)
    assert (caught.value.code, caught.value.fatal) == (CudaCode.ILLEGAL_ADDRESS, True)


def test_bytes_of_the_host_are_counted_as_pinned_or_not() -> None:
    driver = FakeGpuDriver()
    address, (fd, host) = mapped(driver, 0, NBYTES), shared_pages(b"p")
    os.close(fd)
    driver.copy(0, address, host, 1, 100, (0, 0), 0)
    driver.copy(0, address + PAGES, address, 1, 100, (0, 0), 0)
    finish(driver, 0)
    driver.pin(host, PAGES)
    driver.copy(0, host, address, 1, 30, (0, 0), 0)
    finish(driver, 0)
    assert driver.copied == {"pageable": 100, "pinned": 30}


def test_arguments_that_are_refused() -> None:
    driver = FakeGpuDriver()
    calls: tuple[Callable[[], object], ...] = (
        lambda: driver.end_stream(0, 0),
        lambda: driver.end_stream(0, 5),
        lambda: driver.pin(0, 5),
        lambda: driver.unpin(4096, 0),
        lambda: driver.fill(0, 4097, b"ab", 1, 0),
        lambda: driver.record(0, 999, 0),
    )
    for call in calls:
        with pytest.raises(DeviceError):
            call()


def test_processes_of_a_host_have_its_memory_together() -> None:
    total, context, nbytes = 64 << 20, 4 << 20, 2 * NBYTES
    opener = partial(FakeGpuDriver, f"memory=64MiB,context=4MiB,host=test-{os.getpid()}")
    driver, other = opener(), FakeGpuDriver("memory=64MiB")
    with DevicePeer(opener) as peer:
        assert driver.free(0) == peer.call("free", 0) == total
        address = mapped(driver, 0, nbytes)
        assert driver.free(0) == peer.call("free", 0) == total - context - nbytes
        exported = driver.export(0, address, nbytes)
        imported = peer.call("import_", 0, -1, nbytes, driver.devices()[0].uuid, fd=exported)
        os.close(exported)
        peer.call("map_anew", 0, imported, nbytes, False)
        peer.call("release", 0, imported)
        left = total - 2 * context - nbytes
        assert driver.free(0) == left
        driver.unmap(0, address, nbytes)
        assert driver.free(0) == left, "the last mapping has the memory"
        with pytest.raises(DeviceError) as caught:
            driver.create(0, left + NBYTES)
        assert caught.value.code == CudaCode.OUT_OF_MEMORY
        peer.kill()
        assert driver.free(0) == total - context
    assert other.free(0) == total


@pytest.mark.parametrize(("call", "others"), [("event", False), ("owner_of", True)])
def test_a_call_that_breaks_the_context(call: str, others: bool) -> None:
    driver = FakeGpuDriver(f"devices=2,fail={call}!:2")
    address, arguments = mapped(driver, 1, NBYTES), (1,) if call == "event" else (4096,)
    driver.hold(1, 0, NEVER)
    driver.fill(1, address, b"a", 1, 0)
    getattr(driver, call)(*arguments)
    with pytest.raises(DeviceError) as caught:
        getattr(driver, call)(*arguments)
    assert caught.value.fatal
    with pytest.raises(DeviceError):
        driver.stream(1)
    if others:
        with pytest.raises(DeviceError):
            driver.stream(0)
    else:
        driver.stream(0)


@pytest.mark.usefixtures("no_leftovers")
def test_it_ends_with_the_last_reference() -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    driver = FakeGpuDriver("devices=10")
    driver.hold(9, 0, NEVER)
    address = mapped(driver, 9, NBYTES)
    driver.event(9)
    driver.fill(9, address, b"a", 1, 0)
    ended = weakref.ref(driver)
    assert "memfd:zcactor-gpu9" in Path("/proc/self/maps").read_text()
    del driver
    assert ended() is None
    assert len(os.listdir("/proc/self/fd")) <= fds and threading.active_count() <= threads
    assert "memfd:zcactor-gpu9" not in Path("/proc/self/maps").read_text()


def test_work_on_a_captured_stream_is_refused() -> None:
    driver = FakeGpuDriver()
    address, stream, event = mapped(driver, 0, NBYTES), driver.stream(0), driver.event(0)
    driver.captured.add(stream)
    for call in (
        lambda: driver.fill(0, address, b"a", 8, stream),
        lambda: driver.copy(0, address, address + 100, 1, 8, (8, 8), stream),
        lambda: driver.record(0, event, stream),
        lambda: driver.wait(0, stream, event),
        lambda: driver.idle(0, stream),
    ):
        with pytest.raises(DeviceError, match="captured into a graph") as caught:
            call()
        assert (caught.value.code, caught.value.fatal) == (CudaCode.CAPTURE_UNSUPPORTED, False)
    write(driver, 0, address, b"on another stream")
    valid = [driver.captures_are_valid]
    with pytest.raises(DeviceError, match="another thread captures a stream"):
        driver.record_all(0, event)
    valid.append(driver.captures_are_valid)
    driver.captured.clear()
    driver.record_all(0, event)
    assert valid == [True, False], "a call for all work of a GPU alone invalidates them"


def test_captures_come_and_go_by_the_seed() -> None:
    def met(options: str, call: str, *, relaxed: bool) -> list[bool]:
        driver = FakeGpuDriver(options)
        return [driver.prohibits(call, relaxed=relaxed) for _ in range(200)]

    drawn = met("captures=0.3,seed=5", "create", relaxed=False)
    assert 30 < sum(drawn) < 90 and drawn == met("captures=0.3,seed=5", "record_all", relaxed=True)
    assert drawn != met("captures=0.3,seed=6", "create", relaxed=False)
    assert not any(met("captures=0.3", "create", relaxed=True) + met("captures=0.3", "copy", relaxed=False))
    assert not any(met("", "create", relaxed=False))
