"""The checks of `tools/gpu_check.py` on a driver of GPUs: memory between processes, order, and what calls cost."""

from __future__ import annotations

import importlib.metadata
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.conformance.device_peer import DevicePeer, finish, mapped, read, write
from tools.gpu_row import Skip, require
from zcactor.device.cuda import CudaGpuDriver
from zcactor.device.fake import FakeGpuDriver, system
from zcactor.errors import DeviceError, DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.gpu_row import Check
    from zcactor.device.driver import GpuDriver

__all__ = ["CHECKS", "without"]

MIB: Final = 1 << 20
NOBODY: Final = 65534
"""The user id of nobody (Debian's base-passwd)."""
PACKAGES: Final = ("cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "numba")
ATTRIBUTES: Final = (
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "DMA_BUF_SUPPORTED",
    "GPU_DIRECT_RDMA_SUPPORTED", "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "MEMPOOL_SUPPORTED_HANDLE_TYPES", "HANDLE_TYPE_FABRIC_SUPPORTED", "IPC_EVENT_SUPPORTED",
)  # fmt: skip
BEHIND: Final = 0.2
"""Seconds of work that a later call is queued behind."""


def opener(kind: str, options: str = "") -> Callable[[], GpuDriver]:
    """The function that makes the driver, here and in a second process."""
    return CudaGpuDriver if kind == "cuda" else partial(FakeGpuDriver, options, None)


def without(kind: str) -> str:
    """The reason why there is no GPU; empty where there is one."""
    try:
        opener(kind)()
    except DeviceUnavailable as error:
        return str(error)
    return ""


def _shared(driver: GpuDriver, peer: DevicePeer, nbytes: int) -> tuple[int, int, bool]:
    """Memory of this process that the second one maps without write access. Returns its addresses here and there, and
    whether the driver refuses writes there."""
    if not driver.exports:
        raise Skip("memory does not leave the process by descriptors")
    address = mapped(driver, 0, nbytes)
    fd = driver.export(0, address, nbytes)
    imported = peer.call("import_", 0, -1, nbytes, driver.devices()[0].uuid, fd=fd)
    os.close(fd)
    there = peer.call("reserve", 0, nbytes)
    return address, there, peer.call("map", 0, there, imported, nbytes, False)


def facts(kind: str) -> tuple[str, dict[str, Any]]:
    """The driver, its GPUs, and what they can do."""
    driver = opener(kind)()
    gpus = driver.devices()
    figures: dict[str, Any] = {f"GPU {each.index}": f"{each.name}, {each.total} B, {each.uuid}" for each in gpus}
    figures |= {"exports": driver.exports, "shared events": driver.shared_events, "granularity": driver.granularity}
    figures["exports to cards"] = driver.exports_to_cards
    if kind == "cuda":
        from zcactor.device.cuda.calls import CudaCalls, bindings

        calls = CudaCalls(bindings())
        figures["CUDA of the driver"] = calls.ask("devices", -1, "cuDriverGetVersion")
        figures |= {name.lower(): calls.attribute(0, name) for name in ATTRIBUTES}
    for name in PACKAGES:
        try:
            figures[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{len(gpus)} of driver {kind}", figures


def fd_pass(kind: str) -> tuple[str, dict[str, Any]]:
    """Memory by a descriptor to another process."""
    return _pass(kind, None)


def fd_pass_user(kind: str) -> tuple[str, dict[str, Any]]:
    """The same to a process of another user."""
    if os.geteuid():
        raise Skip("only root can start a process of another user")
    try:
        subprocess.run([sys.executable, "-c", "import zcactor"], user=NOBODY, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skip("the user nobody cannot start this interpreter, or not read the package") from error
    return _pass(kind, NOBODY)


def _pass(kind: str, user: int | None) -> tuple[str, dict[str, Any]]:
    driver, data = opener(kind)(), random.Random(1).randbytes(MIB)
    with DevicePeer(opener(kind), user=user) as peer:
        address, there, _ = _shared(driver, peer, 64 * MIB)
        write(driver, 0, address + 63 * MIB, data)
        for part in range(0, MIB, 32768):
            got = peer.call("read", 0, there + 63 * MIB + part, 32768)
            require(got == data[part : part + 32768], "other bytes were read")
    return "the other process reads the bytes", {}


def readonly_import(kind: str) -> tuple[str, dict[str, Any]]:
    """A mapping without write access, and how a write to it fails."""
    driver = opener(kind)()
    with DevicePeer(opener(kind)) as peer:
        address, there, readonly = _shared(driver, peer, driver.granularity)
        write(driver, 0, address, b"before")
        if not readonly:
            return "the driver refuses mappings without write access", {"enforced": False}
        try:
            peer.call("write", 0, there, b"after!")
            failed = "the write did nothing"
        except DeviceError as error:
            failed = f"the write fails: {error.reason}, fatal: {error.fatal}"
        require(read(driver, 0, address, 6) == b"before", "a write through a read-only mapping arrived")
    return failed, {"enforced": True}


def costs(kind: str) -> tuple[str, dict[str, Any]]:
    """The cost of the calls for memory, by size, in microseconds."""
    driver, figures = opener(kind)(), dict[str, Any]()
    largest = min(4096 * MIB, driver.free(0) // 4)
    with DevicePeer(opener(kind)) as peer:
        for nbytes in (each for each in (2 * MIB, 64 * MIB, 1024 * MIB, 4096 * MIB) if each <= largest):
            took: dict[str, float] = {}

            def timed(name: str, call: Callable[[], Any], took: dict[str, float] = took) -> Any:
                began = time.perf_counter()
                result = call()
                took[name] = round((time.perf_counter() - began) * 1e6, 1)
                return result

            handle = timed("create", partial(driver.create, 0, nbytes))
            room = timed("reserve", partial(driver.reserve, 0, nbytes))
            timed("map", partial(driver.map, 0, room, handle, nbytes, True))
            timed("first touch", partial(_touch, driver, room, nbytes))
            if driver.exports:
                fd = timed("export", partial(driver.export, 0, room, nbytes))
                there = timed(
                    "import there", partial(peer.call, "import_", 0, -1, nbytes, driver.devices()[0].uuid, fd=fd)
                )
                os.close(fd)
                place = peer.call("reserve", 0, nbytes)
                timed("map there", partial(peer.call, "map", 0, place, there, nbytes, False))
                peer.call("unmap", 0, place, nbytes)
                peer.call("release", 0, there)
            timed("unmap", partial(driver.unmap, 0, room, nbytes))
            timed("release", partial(driver.release, 0, handle))
            driver.unreserve(0, room, nbytes)
            figures[f"{nbytes // MIB} MiB"] = took
        figures["round trip to the other process"] = _median(partial(peer.call, "can_access", 0, 0))
    event, stream = driver.event(0), driver.stream(0)
    calls: dict[str, Callable[[], Any]] = {
        "done": partial(driver.done, 0, event),
        "record": partial(driver.record, 0, event, stream),
        "wait": partial(driver.wait, 0, stream, event),
        "idle": partial(driver.idle, 0, stream),
        "idle, default stream": partial(driver.idle, 0, 0),
        "export_event": partial(driver.export_event, 0, event),
    }
    figures |= {name: _median(call) for name, call in calls.items()}
    return "microseconds", figures


def _median(call: Callable[[], Any]) -> float:
    took = []
    for _ in range(200):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1e6, 2)


def _touch(driver: GpuDriver, address: int, nbytes: int) -> None:
    driver.fill(0, address, b"\1", nbytes, 0)
    finish(driver, 0)


def _work(driver: GpuDriver, stream: int) -> Callable[[], None]:
    """Queue work of about `BEHIND` seconds; a fake GPU is held back instead, until the function that is returned is
    called, so that nothing depends on how fast this process goes on."""
    if isinstance(driver, FakeGpuDriver):
        gate = threading.Event()
        driver.hold(0, stream, gate.is_set)
        return gate.set
    nbytes = 1024 * MIB
    scratch = mapped(driver, 0, 2 * nbytes)
    driver.copy(0, scratch, scratch + nbytes, 1, nbytes, (0, 0), stream)
    finish(driver, 0, stream)
    began = time.perf_counter()
    for _ in range(4):
        driver.copy(0, scratch, scratch + nbytes, 1, nbytes, (0, 0), stream)
    finish(driver, 0, stream)
    for _ in range(int(BEHIND / (time.perf_counter() - began) * 4) + 1):
        driver.copy(0, scratch, scratch + nbytes, 1, nbytes, (0, 0), stream)
    return lambda: None


def event_order(kind: str) -> tuple[str, dict[str, Any]]:
    """An event of another process holds work back; without it, the old bytes are seen."""
    driver = opener(kind)()
    if not driver.shared_events:
        raise Skip("events are not shared between processes")
    with DevicePeer(opener(kind)) as peer:
        address, there, _ = _shared(driver, peer, driver.granularity)
        stream, beside, event = driver.stream(0), peer.call("stream", 0), driver.event(0)
        driver.fill(0, address, b"1", 1000, stream)
        finish(driver, 0, stream)
        peer.share_events(driver)
        end = _work(driver, stream)
        driver.fill(0, address, b"2", 1000, stream)
        driver.record(0, event, stream)
        opened = peer.call("open_event", 0, driver.export_event(0, event))
        began = time.perf_counter()
        peer.call("wait", 0, beside, opened)
        end()
        got = peer.call("read", 0, there, 1000, beside)
        waited = time.perf_counter() - began
        require(got == b"2" * 1000, "the wait did not order the work of two processes")
        end = _work(driver, stream)
        driver.fill(0, address, b"3", 1000, stream)
        stale = peer.call("read", 0, there, 1000, beside)
        pending = not driver.idle(0, stream)
        end()
        finish(driver, 0, stream)
    require(stale == b"2" * 1000 and pending, "without a wait the old bytes were not seen: this check proves nothing")
    return "with the wait the new bytes, without it the old ones", {"waited, ms": round(waited * 1000, 1)}


def event_owner_dies(kind: str) -> tuple[str, dict[str, Any]]:
    """A process is killed before its work is done: its event is known to be lost, and waits for it end."""
    driver = opener(kind)()
    if not driver.shared_events:
        raise Skip("events are not shared between processes")
    with DevicePeer(opener(kind, "late=90000,memory=8GiB")) as peer:
        event, place = peer.call("event", 0), peer.call("mapped", 0, 4096 * MIB)
        peer.share_events(driver)
        for _ in range(1 if kind == "fake" else 800):
            peer.call("copy", 0, place, place + 2048 * MIB, 1, 2048 * MIB, (0, 0), 0)
        peer.call("record", 0, event, 0)
        opened = driver.open_event(0, peer.call("export_event", 0, event))
        before, after = driver.stream(0), driver.stream(0)
        driver.wait(0, before, opened)
        require(not driver.done(0, opened), "the work was done too early: this check proves nothing")
        peer.kill()
        began = time.perf_counter()
        while not driver.event_is_lost(0, opened):
            require(time.perf_counter() - began < 5, "the event of a killed process is not known to be lost")
        known = round((time.perf_counter() - began) * 1e3, 1)
        finish(driver, 0, before)
        passed = round((time.perf_counter() - began) * 1e3, 1)
        driver.wait(0, after, opened)
        finish(driver, 0, after)
    return "waits for it end, before and after", {"known after, ms": known, "streams go on after, ms": passed}


def pinned_memfd(kind: str) -> tuple[str, dict[str, Any]]:
    """Copies between the GPU and pinned shared memory, beside memory that the driver allocates; and what decision 37
    depends on."""
    driver, nbytes = opener(kind)(), 256 * MIB
    host, device = _pages(b"", nbytes), mapped(driver, 0, nbytes)
    figures = {f"memfd, {name}, GB/s": value for name, value in _rates(driver, device, host, nbytes).items()}
    began = time.perf_counter()
    driver.pin(host, nbytes)
    figures["pin, ms"] = round((time.perf_counter() - began) * 1e3, 2)
    figures |= {f"pinned memfd, {name}, GB/s": value for name, value in _rates(driver, device, host, nbytes).items()}
    driver.unpin(host, nbytes)
    if kind == "cuda":
        from zcactor.device.cuda.calls import CudaCalls, bindings

        calls = CudaCalls(bindings())
        with calls.current("costs", 0):
            own = int(calls.ask("costs", 0, "cuMemHostAlloc", nbytes, 0))
        figures |= {
            f"cuMemHostAlloc, {name}, GB/s": value for name, value in _rates(driver, device, own, nbytes).items()
        }
        with calls.current("costs", 0):
            calls.ask("costs", 0, "cuMemFreeHost", own)
    return "GB/s", figures | _rules(driver, device)


def _pages(value: bytes, nbytes: int, at: int | None = None) -> int:
    """Map new shared memory, by default at addresses that are free. Returns the first."""
    fd = os.memfd_create("gpu-check")
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, value * nbytes, 0)
    address = system.reserved(nbytes) if at is None else at
    system.map_at(address, nbytes, fd, writable=True)
    os.close(fd)
    return address


def _rules(driver: GpuDriver, device: int) -> dict[str, str]:
    """The fate of copies across an end of pinned memory, and of pages that others replace while they are pinned."""
    host, step = _pages(b"o", 2 * MIB), MIB

    def tried() -> str:
        try:
            driver.copy(0, device, host, 1, 2 * step, (0, 0), 0)
            finish(driver, 0)
        except DeviceError as error:
            return f"error {error.code}"
        return "works"

    found = {}
    driver.pin(host, step)
    found["a copy across an end of pinned memory"] = tried()
    driver.pin(host + step, step)
    found["a copy across two pinned neighbours"] = tried()
    _pages(b"n", step, host)
    driver.copy(0, device, host, 1, 1, (0, 0), 0)
    seen = {b"o": "the former ones", b"n": "the new ones"}[read(driver, 0, device, 1)]
    found["pinned pages that were replaced: the GPU reads"] = seen
    for low in (host, host + step):
        driver.unpin(low, step)
    return found


def _rates(driver: GpuDriver, device: int, host: int, nbytes: int) -> dict[str, float]:
    found = {}
    for name, into, out in (("to the GPU", device, host), ("from the GPU", host, device)):
        took = []
        for _ in range(4):
            began = time.perf_counter()
            driver.copy(0, into, out, 1, nbytes, (0, 0), 0)
            finish(driver, 0)
            took.append(time.perf_counter() - began)
        found[name] = round(nbytes / min(took) / 1e9, 2)
    return found


def dma_buf(kind: str) -> tuple[str, dict[str, Any]]:
    """A descriptor for network cards, over one extent and over two."""
    driver = opener(kind)()
    if not driver.exports_to_cards:
        raise Skip("the GPU does not export memory to network cards")
    step = 64 * MIB
    base = driver.reserve(0, 2 * step)
    for number in range(2):
        handle = driver.create(0, step)
        driver.map(0, base + number * step, handle, step, True)
        driver.release(0, handle)
    figures: dict[str, Any] = {}
    for name, nbytes in (("one extent", step), ("two extents", 2 * step)):
        try:
            fd = driver.dma_buf(0, base, nbytes)
        except DeviceError as error:
            figures[name] = error.reason
            continue
        figures[name] = f"{os.lseek(fd, 0, os.SEEK_END)} B"
        os.close(fd)
    return "size of the descriptor", figures


CHECKS: Final[dict[str, Check]] = {
    each.__name__: each
    for each in (
        facts, fd_pass, fd_pass_user, readonly_import, costs, event_order, event_owner_dies, pinned_memfd, dma_buf,
    )
}  # fmt: skip
