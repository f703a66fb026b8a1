"""The checks of `tools/gpu_check.py` on what only a real GPU can show: handles of streams that come again, captures of
graphs, memory of other libraries, and memory that goes back."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from tools.gpu_array_rows import KEPT, checked, library, settled_memory
from tools.gpu_row import require
from zcactor.errors import DeviceError
from zcactor.process.context import current

if TYPE_CHECKING:
    from tools.gpu_row import Check
    from zcactor.device.store import DeviceStore

__all__ = ["CHECKS"]

MIB: Final = 1 << 20
ROOM: Final = 6144 * MIB
"""Bytes of the GPU that are left to others."""
CAPTURES: Final = 150
STANDSTILL: Final = 0.05
"""Seconds for which a loop may stand still."""


@zc.actor
class Reader:
    """An actor that reads and keeps arrays."""

    def __init__(self) -> None:
        self._kept: Any = None

    def first(self, x: Any) -> float:
        """The first element."""
        return float(zc.gpu.to_host(x).ravel()[0])

    def keep(self, x: Any) -> None:
        """Keep an array."""
        self._kept = x

    def kept(self) -> float:
        """The first element of the array that is kept."""
        return self.first(self._kept)

    def nbytes(self, x: Any) -> int:
        """The bytes of an array."""
        return int(x.nbytes)

    def mapped(self) -> int:
        """Number of extents of other processes that are mapped."""
        gc.collect()
        return len(_store().imports)


def _store() -> DeviceStore:
    found: DeviceStore = current().store.devices()
    return found


def _large(kind: str, nbytes: int) -> int:
    """The bytes of an array; few on the fake GPU, which computes nothing."""
    return nbytes >> 8 if kind == "fake" else nbytes


async def stream_handles(kind: str) -> tuple[str, dict[str, Any]]:
    """Streams end while their work goes on, and the driver hands their handles out again."""
    driver, wrong, again, busy = _store().driver, 0, 0, 0
    big = zc.empty(_large(kind, 1024 * MIB), "u1", device="cuda")
    for _ in range(50):
        ended = driver.stream(0)
        for value in range(20):
            driver.fill(0, big.address, bytes([value]), big.nbytes, ended)
        is_busy = not driver.idle(0, ended)
        driver.end_stream(0, ended)
        following = driver.stream(0)
        again += ended == following
        busy += ended == following and is_busy
        driver.end_stream(0, following)
    source, target = (zc.empty(_large(kind, 256 * MIB), "u1", device="cuda") for _ in range(2))
    for number in range(100):
        with zc.gpu.stream():
            for _ in range(30):
                source.fill(255)
            source.fill(number)
        with zc.gpu.stream():
            target.copy_from(source)
        wrong += int(zc.gpu.to_host(target[-4:])[0]) != number
    require(not wrong, f"{wrong} of 100 copies have wrong bytes")
    return "all bytes are right", {"the same handle again, of 50": again, "while it worked": busy}


async def capture(kind: str) -> tuple[str, dict[str, Any]]:
    """A thread captures graphs by PyTorch, in its default mode, while arrays come and go."""
    torch = library("torch", kind)
    torch.zeros(1, device="cuda")
    broken: list[str] = []

    def captures() -> None:
        tensor = torch.zeros(MIB, device="cuda")
        for _ in range(CAPTURES):
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    for _ in range(50):
                        tensor += 1
            except RuntimeError as error:
                broken.append(str(error))
                torch.cuda.synchronize()

    thread = threading.Thread(target=captures)
    thread.start()
    rounds = wrong = 0
    while thread.is_alive():
        dropped = zc.empty(64 * MIB, "u1", device="cuda")
        with zc.gpu.stream():
            for _ in range(20):
                dropped.fill(1)
        del dropped
        array = zc.full(64 * MIB, 7, "u1", device="cuda")
        await asyncio.sleep(0.002)
        wrong += bool((zc.gpu.to_host(array[::MIB]) != 7).any()) if not rounds % 5 else 0
        rounds += 1
    thread.join()
    require(not broken, f"{len(broken)} of {CAPTURES} captures failed: {broken[:1]}")
    require(not wrong, f"{wrong} arrays have wrong bytes")
    return f"{CAPTURES} captures", {"arrays beside them": rounds}


async def ended_stream(kind: str) -> tuple[str, dict[str, Any]]:
    """CuPy takes an array on a stream of its own, which ends."""
    cupy = library("cupy", kind)
    array = zc.full(MIB, 5, "f4", device="cuda")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        taken = cupy.from_dlpack(array)
        taken.sum()
    stream.synchronize()
    del stream, taken
    gc.collect()
    require(zc.gpu.to_host(array)[0] == 5, "the values are wrong")
    del array
    await settled_memory()
    return "the array is used, and its memory goes back", {}


async def weights(kind: str) -> tuple[str, dict[str, Any]]:
    """A tensor is updated in place, and passed again."""
    torch = library("torch", kind)
    reader: Any = await Reader.spawn()
    with zc.gpu.allocator("torch"):
        tensor = torch.full((64 * MIB,), 1.0, device="cuda")
    got = [await reader.first(tensor)]
    for value in (2, 3, 4):
        await reader.keep(zc.put(tensor))
        for _ in range(40):
            tensor.add_(0)
        tensor.fill_(value)
        got.append(await reader.first(tensor))
        if value > 2:  # the tensor's own memory was put first
            require(await reader.kept() == value - 1, "the array of the last step has changed")
    require(got == [1, 2, 3, 4], f"the reader got {got}")
    return "each step has its own values", {}


async def thread_streams(kind: str) -> tuple[str, dict[str, Any]]:
    """CuPy works on the default stream of each thread."""
    os.environ["CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"] = "1"
    cupy = library("cupy", kind)
    array = zc.zeros(128 * MIB, "u1", device="cuda")
    wrong = 0

    def work(value: int) -> None:
        taken = array.as_cupy()
        for _ in range(20):
            taken.fill(0)
        taken.fill(value)

    for value in range(1, 30):
        thread = threading.Thread(target=work, args=(value,))
        thread.start()
        thread.join()
        wrong += int(zc.gpu.to_host(array[-4:])[0]) != value
    require(not wrong, f"{wrong} of 29 arrays have wrong bytes")
    return "all bytes are right", {"stream": cupy.cuda.get_current_stream().ptr}


async def torch_sizes(kind: str) -> tuple[str, dict[str, Any]]:
    """PyTorch allocates in the store, frees, and allocates more, in sizes that grow."""
    torch = library("torch", kind)
    free = torch.cuda.mem_get_info()[0]
    parts = (0.15, 0.18, 0.21, 0.24, 0.27, 0.30)
    for part in parts:
        with zc.gpu.allocator("torch"):
            tensor = torch.empty(int(free * part), dtype=torch.uint8, device="cuda")
        del tensor
        torch.cuda.empty_cache()
    return f"{len(parts)} sizes", {"MiB free before": free // MIB, "behind": torch.cuda.mem_get_info()[0] // MIB}


async def given_back(kind: str) -> tuple[str, dict[str, Any]]:
    """The memory that the owner gives back is free, although a peer has had it."""
    reader: Any = await Reader.spawn()
    await reader.first(zc.zeros(16, "f4", device="cuda"))
    driver, nbytes = _store().driver, 64 * MIB if kind == "fake" else 2048 * MIB
    before = driver.free(0)
    for value in range(4):
        array = zc.full(nbytes, value, "u1", device="cuda")
        await reader.first(array[:16])
        del array
        gc.collect()
    end = time.monotonic() + 15
    while (missing := before - driver.free(0)) > 600 * MIB or await reader.mapped() > 1:
        require(
            time.monotonic() < end, f"{missing // MIB} MiB are missing, and the reader maps {await reader.mapped()}"
        )
        await asyncio.sleep(0.1)
    return "the memory is free", {"MiB missing": missing // MIB}


async def standstill(kind: str) -> tuple[str, dict[str, Any]]:
    """The loop of an owner while a process without a GPU reads a large array."""
    reader: Any = await Reader.options(env={"CUDA_VISIBLE_DEVICES": ""}).spawn()
    array = zc.full(_large(kind, 768 * MIB), 1, "u1", device="cuda")
    gaps: list[float] = []

    async def beats() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    beating = asyncio.create_task(beats())
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    require(await reader.nbytes(array) == array.nbytes, "the array has another size")
    took = time.perf_counter() - began
    beating.cancel()
    if kind == "cuda":
        require(max(gaps) < STANDSTILL, f"the loop stood still for {max(gaps):.3f} s")
    return "the loop goes on", {"longest, ms": round(max(gaps) * 1e3, 1), "GB/s": round(array.nbytes / took / 1e9, 1)}


async def pieces(kind: str) -> tuple[str, dict[str, Any]]:
    """Pieces through pinned host memory, where the driver exports no memory."""
    driver = type(_store().driver)

    def refuse(self: Any, device: int, address: int, nbytes: int) -> int:
        raise DeviceError("export", 801, device, False, "this check refuses")

    driver.export = refuse  # type: ignore[method-assign]
    reader: Any = await Reader.spawn()
    array = zc.full(_large(kind, 2048 * MIB), 3, "u1", device="cuda")
    zc.gpu.to_host(array[:4])
    began = time.perf_counter()
    got = await reader.first(array)
    took = time.perf_counter() - began
    require(got == 3, f"the reader got {got}")
    path = (await zc.explain(reader)).device
    return "the bytes arrive", {"GB/s": round(array.nbytes / took / 1e9, 1), "path": path.path if path else ""}


async def many_extents(kind: str) -> tuple[str, dict[str, Any]]:
    """Most of the GPU in arrays of one extent each: the first pass, descriptors, and what the reader maps."""
    free = _store().driver.free(0)
    count = 8 if kind == "fake" else min(1000, (free - ROOM) // (64 * MIB))
    arrays = [zc.empty(64 * MIB, "u1", device="cuda") for _ in range(count)]
    arrays[-1].fill(9)
    reader: Any = await Reader.spawn()
    began = time.perf_counter()
    require(await reader.first(arrays[-1]) == 9, "the values are wrong")
    took = time.perf_counter() - began
    descriptors = len(os.listdir("/proc/self/fd"))
    return f"{count} extents", {
        "first pass, s": round(took, 2),
        "descriptors": descriptors,
        "mapped": await reader.mapped(),
    }


async def one_queue(kind: str) -> tuple[str, dict[str, Any]]:
    """Two processes and many streams that wait for each other, where the GPU has one queue for all."""
    queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    os.environ.update(queue)
    readers: list[Any] = [await Reader.options(env=queue).spawn() for _ in range(2)]
    rounds = 5 if kind == "fake" else 60
    for _ in range(rounds):
        arrays = []
        for value in range(24):
            with zc.gpu.stream():
                array = zc.empty(4 * MIB if kind == "cuda" else 4096, "u1", device="cuda")
                for _ in range(5):
                    array.fill(value)
                arrays.append(array)
        calls = [readers[number % 2].first(array) for number, array in enumerate(arrays)]
        require(await zc.get(calls, timeout=20) == list(range(24)), "the values are wrong")
    return f"{rounds} rounds", {}


async def contexts(kind: str) -> tuple[str, dict[str, Any]]:
    """Memory of the GPU that each process takes which uses it."""
    driver = _store().driver
    array = zc.zeros(16, "f4", device="cuda")
    before = driver.free(0)
    readers: list[Any] = [await Reader.spawn() for _ in range(4)]
    for reader in readers:
        await reader.first(array)
    return "4 processes", {"MiB each": (before - driver.free(0)) // MIB // len(readers)}


CHECKS: Final[dict[str, Check]] = {
    each.__name__: checked(each, 0 if each is given_back else KEPT)
    for each in (
        stream_handles, capture, ended_stream, weights, thread_streams, torch_sizes, given_back, standstill, pieces,
        many_extents, one_queue, contexts,
    )
}  # fmt: skip
