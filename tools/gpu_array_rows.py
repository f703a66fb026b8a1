"""The checks of `tools/gpu_check.py` on arrays between actors: libraries, views, kills, and what a pass costs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from tools.gpu_row import Skip, require
from zcactor.errors import ActorDied, ObjectLost

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tools.gpu_row import Check

__all__ = ["CHECKS", "KEPT", "checked", "library", "settled_memory"]

MIB: Final = 1 << 20
OUTSIDE: Final = "argument outside the device store"
THROUGH_HOST: Final = "through host memory"
PASSES: Final = 10_000
FOREIGN: Final = 4096 * MIB
"""Bytes of an array outside the store."""
KEPT: Final = 2 * FOREIGN
"""Bytes that are kept ready on the GPU."""
PATIENCE: Final = 15.0
"""Seconds in which leases go back, and processes end."""


@zc.actor
class Worker:
    """An actor that takes, makes and keeps arrays on a GPU."""

    def __init__(self) -> None:
        self._kept: Any = None

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def kind(self, x: Any) -> str:
        """The library of an array's type."""
        return type(x).__module__.split(".")[0]

    def values(self, x: Any) -> Any:
        """The values of an array, in host memory."""
        return np.array(zc.gpu.to_host(x))

    def same(self, x: Any) -> Any:
        """The argument."""
        return x

    def doubled(self, x: Any) -> Any:
        """Twice an array, computed by its library."""
        return x * 2

    def made(self, nbytes: int, value: int) -> Any:
        """A new array."""
        return zc.full(nbytes, value, "u1", device="cuda")

    def keep(self, x: Any) -> None:
        """Keep an array."""
        self._kept = x

    async def nothing(self, x: Any) -> int:
        """Take an array and do nothing."""
        return 1


def checked(main: Callable[[str], Coroutine[Any, Any, tuple[str, dict[str, Any]]]], keep_nbytes: int = KEPT) -> Check:
    """A check that runs in a runtime, which keeps so much of the GPU's memory."""

    def check(kind: str) -> tuple[str, dict[str, Any]]:
        async def inside() -> tuple[str, dict[str, Any]]:
            config = zc.Config(
                gpu="fake" if kind == "fake" else "cuda", store_capacity=1 << 30, device_keep_nbytes=keep_nbytes
            )
            async with zc.init(config=config):
                return await main(kind)

        return zc.run(inside())

    check.__name__, check.__doc__ = main.__name__, main.__doc__
    return check


def library(name: str, kind: str) -> Any:
    """Import a library that computes on the GPU.

    Raises:
        Skip: it is not installed, or the GPU is the fake one.
    """
    if kind == "fake":
        raise Skip(f"{name} computes nothing on fake GPUs")
    if importlib.util.find_spec(name) is None:
        raise Skip(f"{name} is not installed")
    return importlib.import_module(name)


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        require(time.monotonic() < end, otherwise)
        await asyncio.sleep(0.01)


async def _settled() -> None:
    """Wait until no process has a lease on an array of this one, and none of its own."""
    await _until(lambda: not zc.stats().device_leases, "leases are left")


async def settled_memory() -> None:
    """Wait until this process has no object on a GPU."""
    await _until(lambda: not zc.stats().device_used, "memory is left")


def _ramp(kind: str) -> Any:
    """An array of the program with known values: CuPy's where it can compute, else one of zcactor."""
    return zc.gpu.to_device(np.arange(6000, dtype="i4").reshape(60, 100))


async def cupy_chain(kind: str) -> tuple[str, dict[str, Any]]:
    """Arrays of CuPy through two actors that compute, without a copy."""
    return await _chain(library("cupy", kind), "cupy", lambda cupy: cupy.arange(1 << 20, dtype="i8"))


async def torch_chain(kind: str) -> tuple[str, dict[str, Any]]:
    """Tensors through two actors that compute."""
    torch = library("torch", kind)
    return await _chain(torch, "torch", lambda torch: torch.arange(1 << 20, device="cuda", dtype=torch.int64))


async def jax_chain(kind: str) -> tuple[str, dict[str, Any]]:
    """Arrays of JAX through two actors that compute."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else the first process takes most of the GPU
    library("jax", kind)
    jnp = importlib.import_module("jax.numpy")
    return await _chain(jnp, "jaxlib", lambda jnp: jnp.arange(1 << 20, dtype="i4"))


async def _chain(module: Any, name: str, make: Callable[[Any], Any]) -> tuple[str, dict[str, Any]]:
    one: Any = await Worker.spawn()
    two: Any = await Worker.spawn()
    array = make(module)
    require(await one.kind(array) == name, f"the actor got no array of {name}")
    result = await two.doubled(one.doubled(array))
    require(type(result).__module__.split(".")[0] == name, f"the result is a {type(result)}")
    require(bool((result == 4 * array).all()), "the values are wrong")
    copied = {reason: (each.count, each.nbytes) for reason, each in zc.stats().copies.items()}
    return "two actors doubled it", {"copied here": copied}


async def foreign(kind: str) -> tuple[str, dict[str, Any]]:
    """An array outside the store is copied once, on the GPU; the time of that beside a copy by its library."""
    cupy = library("cupy", kind)
    worker: Any = await Worker.spawn()
    array, target = cupy.ones(FOREIGN, "u1"), cupy.empty(FOREIGN, "u1")
    await worker.nothing(array)
    took: dict[str, list[float]] = {"copy": [], "call": []}
    for _ in range(7):
        await _settled()
        cupy.cuda.Device().synchronize()
        began = time.perf_counter()
        target[...] = array
        cupy.cuda.Device().synchronize()
        took["copy"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await worker.nothing(array)
        cupy.cuda.Device().synchronize()
        took["call"].append(time.perf_counter() - began)
    counted = zc.stats().copies[OUTSIDE]
    require(counted.nbytes == 8 * FOREIGN, f"{counted} was counted")
    medians = {name: statistics.median(each) * 1e3 for name, each in took.items()}
    figures = {"copy by CuPy, 4 GiB, ms": medians["copy"], "call that copies, ms": medians["call"]}
    return f"{medians['call'] / medians['copy']:.2f}x of the copy", figures


async def move(kind: str) -> tuple[str, dict[str, Any]]:
    """An array is handed over: the receiver may write, the sender has it no more."""
    worker: Any = await Worker.spawn()
    array = zc.full(1000, 7, "u1", device="cuda")
    require((await worker.values(zc.move(array)) == 7).all(), "the values are wrong")
    try:
        array.fill(1)
    except ValueError as error:
        return f"a use of it after that: {error}", {}
    raise AssertionError("an array that was handed over can be written to")


async def views(kind: str) -> tuple[str, dict[str, Any]]:
    """Views of all layouts, of CuPy too."""
    worker: Any = await Worker.spawn()
    array = _ramp(kind)
    values = np.arange(6000, dtype="i4").reshape(60, 100)
    layouts: dict[str, Any] = {
        "slice": np.s_[3:50, 10:90], "steps": np.s_[::7, ::3], "backwards": np.s_[::-1, ::-2], "row": np.s_[5],
        "0-d": np.s_[5, 6], "no elements": np.s_[:0], "new axis": np.s_[:, None, 4:],
    }  # fmt: skip
    for name, key in layouts.items():
        got = await worker.values(array[key])
        require(got.shape == values[key].shape and (got == values[key]).all(), f"{name}: the values are wrong")
    require((await worker.values(array.T) == values.T).all(), "transposed: the values are wrong")
    require(not zc.stats().bytes_copied - values.nbytes, "something was copied")
    if kind == "fake":
        return "all arrive", {}
    cupy = library("cupy", kind)
    with zc.gpu.allocator("cupy"):
        other = cupy.asfortranarray(cupy.arange(6000, dtype="i4").reshape(60, 100))
    for name, one in {"F order": other, "broadcast": cupy.broadcast_to(other[:1], (4, 100)), "T": other.T}.items():
        require((await worker.values(one) == cupy.asnumpy(one)).all(), f"{name} of CuPy: the values are wrong")
    return "all arrive, of CuPy too", {}


async def small_types(kind: str) -> tuple[str, dict[str, Any]]:
    """Elements of bfloat16 and float8."""
    worker: Any = await Worker.spawn()
    seen = []
    if importlib.util.find_spec("ml_dtypes") is not None:
        import ml_dtypes

        for each in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
            values = np.arange(16).astype(each)
            got = await worker.same(zc.gpu.to_device(values))
            right = got.dtype == values.dtype and (zc.gpu.to_host(got) == values).all()
            require(right, f"{each}: the values are wrong")
            seen.append(np.dtype(each).name)
    if kind == "cuda" and importlib.util.find_spec("torch") is not None:
        import torch

        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = torch.arange(16, device="cuda").to(dtype)
            result = await worker.same(tensor)
            right = result.dtype == dtype and bool((result.float() == tensor.float()).all())
            require(right, f"{dtype}: the values are wrong")
            seen.append(str(dtype))
    if not seen:
        raise Skip("neither ml_dtypes nor torch is installed")
    return ", ".join(seen), {}


async def hidden_gpu(kind: str) -> tuple[str, dict[str, Any]]:
    """An actor to which the GPU is hidden gets a NumPy array, through host memory."""
    worker: Any = await Worker.options(env={"CUDA_VISIBLE_DEVICES": ""}).spawn()
    array = zc.full(64 * MIB, 9, "u1", device="cuda")
    library = await worker.kind(array)
    require(library == "numpy", f"it got an array of {library}")
    took = []
    for _ in range(5):
        fresh = zc.full(256 * MIB, 9, "u1", device="cuda")
        zc.gpu.to_host(fresh[:1])
        began = time.perf_counter()
        await worker.nothing(fresh)
        took.append(time.perf_counter() - began)
    counted = zc.stats().copies[THROUGH_HOST]
    figures = {"copied through host memory": (counted.count, counted.nbytes)}
    return "a NumPy array", figures | {"256 MiB, GB/s": round(256 * MIB / min(took) / 1e9, 2)}


async def host_copies(kind: str) -> tuple[str, dict[str, Any]]:
    """The rates of `zc.gpu.to_host` and `zc.gpu.to_device`, to be compared with those of `pinned_memfd`."""
    array = zc.full(256 * MIB, 9, "u1", device="cuda")
    values, took = zc.gpu.to_host(array), list[tuple[float, float]]()
    for _ in range(5):
        began = time.perf_counter()
        there = zc.gpu.to_device(values)
        zc.gpu.to_host(there[-1:])  # it is computed
        between = time.perf_counter()
        values = zc.gpu.to_host(there)
        took.append((between - began, time.perf_counter() - between))
    require(bool((values == 9).all()), "the values are wrong")
    names = "zc.gpu.to_device", "zc.gpu.to_host"
    return "GB/s", {
        f"{name} of 256 MiB, GB/s": round(256 * MIB / min(each) / 1e9, 2)
        for name, each in zip(names, zip(*took, strict=True), strict=True)
    }


async def _dies(kind: str, how: str) -> tuple[str, dict[str, Any]]:
    owner: Any = await Worker.spawn()
    array = await owner.made(4 * MIB, 5)
    zc.gpu.to_host(array[:1])  # it is computed
    pid = await owner.pid()
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
        try:
            await owner.pid()
        except ActorDied:
            pass
        else:
            raise AssertionError("a killed actor answered")
    else:
        await zc.stop(owner)
    require((zc.gpu.to_host(array) == 5).all(), "the values are wrong")
    reader: Any = await Worker.spawn()
    require((await reader.values(array) == 5).all(), "the values at a third process are wrong")
    return "its array is read here, and passed on", {}


async def owner_exits(kind: str) -> tuple[str, dict[str, Any]]:
    """The owner of an array ends in order."""
    return await _dies(kind, "stopped")


async def kill_owner(kind: str) -> tuple[str, dict[str, Any]]:
    """The owner of an array is killed."""
    return await _dies(kind, "killed")


async def kill_reader(kind: str) -> tuple[str, dict[str, Any]]:
    """The reader of an array is killed: its leases end, and the memory is free."""
    reader: Any = await Worker.spawn()
    before = zc.stats().device_used
    array = zc.full(64 * MIB, 5, "u1", device="cuda")
    await reader.keep(array)
    require(zc.stats().device_leases == 1, "the reader has no lease")
    os.kill(await reader.pid(), signal.SIGKILL)
    await _settled()
    require((zc.gpu.to_host(array) == 5).all(), "the values are wrong")
    del array
    # The lease ends with the connection, and the memory is free once the process is gone, which may read it until then.
    await _until(lambda: zc.stats().device_used == before, "the memory is not free")
    return "its lease has ended", {}


async def kill_both(kind: str) -> tuple[str, dict[str, Any]]:
    """Owner and reader are killed: the GPU's memory is free again."""
    before = zc.gpu.gpus()[0].free
    owner: Any = await Worker.spawn()
    reader: Any = await Worker.spawn()
    await reader.keep(owner.made(512 * MIB, 5))
    pids = [await owner.pid(), await reader.pid()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await _until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids), "a killed process is still there")
    left = before - zc.gpu.gpus()[0].free
    require(left < 64 * MIB, f"{left} bytes of the GPU's memory are gone")
    return "the memory is free again", {"bytes less free": left}


async def unfinished_owner(kind: str) -> tuple[str, dict[str, Any]]:
    """A producer is killed before its work is done: a program that waits for the array on the host is told, and work
    of CuPy that is queued behind it ends."""
    cupy = library("cupy", kind)
    owner: Any = await Late.spawn()
    cupy.zeros(1000, "u1").sum()  # compiles it
    await owner.late(1)
    array = await owner.late(1500)
    total = array.sum()  # queued behind the producer's work
    os.kill(await owner.pid(), signal.SIGKILL)
    began = time.perf_counter()
    try:
        values = await asyncio.to_thread(zc.gpu.to_host, array)
    except ObjectLost:
        took = {"ObjectLost after, ms": round((time.perf_counter() - began) * 1e3, 1)}
    else:
        require((values == 1).all(), "the values are wrong")
        took = {"the work was done meanwhile": True}
    await asyncio.to_thread(cupy.cuda.get_current_stream().synchronize)
    took["CuPy goes on after, ms"] = round((time.perf_counter() - began) * 1e3, 1)
    require(time.perf_counter() - began < 2, f"it took longer than 2 s: {took}")
    del total
    return "nobody waits for ever", took


@zc.actor
class Late:
    """An actor whose arrays are computed late."""

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    async def late(self, copies: int) -> Any:
        """An array behind that many copies of 4 GiB, of two milliseconds each on an H200."""
        import cupy

        with zc.gpu.allocator("cupy"):
            result = cupy.zeros(1000, "u1")
        scratch = cupy.zeros(8192 * MIB, "u1")
        for _ in range(copies):
            scratch[: 4096 * MIB] = scratch[4096 * MIB :]
        result += 1
        return result


async def passes(kind: str) -> tuple[str, dict[str, Any]]:
    """Ten thousand passes: the GPU's memory stays flat, and what a pass costs beside a call with an int."""
    worker: Any = await Worker.spawn()
    nbytes = 64 * MIB if kind == "fake" else 1024 * MIB
    array = zc.full(nbytes, 1, "u1", device="cuda")
    subjects: dict[str, Any] = {"int": 5, "NumPy": zc.zeros(64 * MIB, "u1"), "DeviceArray": array}
    if kind == "cuda" and importlib.util.find_spec("cupy") is not None:
        import cupy

        with zc.gpu.allocator("cupy"):
            subjects["CuPy"] = cupy.ones(nbytes, "u1")
        cupy.cuda.Device().synchronize()
    for each in subjects.values():
        for _ in range(50):
            await worker.nothing(each)
    await _settled()
    before, free = zc.stats(), zc.gpu.gpus()[0].free
    took: dict[str, list[float]] = {name: [] for name in subjects}
    rounds = PASSES // 100 // len(subjects)
    for _ in range(rounds):
        for name, each in subjects.items():
            for _ in range(100):
                began = time.perf_counter()
                await worker.nothing(each)
                took[name].append(time.perf_counter() - began)
    await _settled()
    after = zc.stats()
    require(after.device_used == before.device_used, "objects are left")
    require(after.bytes_copied == before.bytes_copied, "something was copied")
    require(abs(free - zc.gpu.gpus()[0].free) < 8 * MIB, "the GPU's free memory has changed")
    medians = {name: statistics.median(each) * 1e6 for name, each in took.items()}
    figures = {f"{name}, us": round(value, 1) for name, value in medians.items()}
    figures |= {f"{name}, of int": round(value / medians["int"], 2) for name, value in medians.items() if name != "int"}
    if kind == "cuda":
        figures["behind queued work, us"] = await _behind_work(worker)
    return f"{sum(map(len, took.values()))} passes", figures


async def _behind_work(worker: Any) -> float:
    """Microseconds of a call with an array that is not computed yet."""
    took = []
    with zc.gpu.stream() as stream:
        big = zc.empty(8192 * MIB, "u1", device="cuda")
        for _ in range(300):
            big[: 4096 * MIB].copy_from(big[4096 * MIB :])
        arrays = [zc.zeros(1000, "u1", device="cuda") for _ in range(200)]
        for array in arrays:
            began = time.perf_counter()
            await worker.nothing(array)
            took.append(time.perf_counter() - began)
        require(not stream.done(), "the queued work was done too early: this check proves nothing")
        stream.synchronize()
    return round(statistics.median(took) * 1e6, 1)


async def allocator_cupy(kind: str) -> tuple[str, dict[str, Any]]:
    """Arrays that CuPy allocates inside `allocator` lie in the store, and are passed without a copy."""
    cupy = library("cupy", kind)
    worker: Any = await Worker.spawn()
    with zc.gpu.allocator("cupy"):
        array = cupy.arange(1000) * 3
    require(zc.in_store(array), "it lies outside of the store")
    require((await worker.values(array) == np.arange(1000) * 3).all(), "the values are wrong")
    require(OUTSIDE not in zc.stats().copies, "it was copied")
    return "0 bytes copied", {}


async def allocator_torch(kind: str) -> tuple[str, dict[str, Any]]:
    """The same for PyTorch."""
    torch = library("torch", kind)
    worker: Any = await Worker.spawn()
    with zc.gpu.allocator("torch"):
        tensor = torch.arange(1000, device="cuda") * 3
    require(zc.in_store(tensor), "it lies outside of the store")
    require((await worker.values(tensor) == np.arange(1000) * 3).all(), "the values are wrong")
    require(OUTSIDE not in zc.stats().copies, "it was copied")
    return "0 bytes copied", {}


def memcheck(kind: str) -> tuple[str, dict[str, Any]]:
    """Compute-sanitizer on one pass, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if kind == "fake" or tool is None:
        raise Skip("compute-sanitizer is not installed" if kind == "cuda" else "it needs a real GPU")
    command = [
        tool,
        "--target-processes",
        "all",
        "--error-exitcode",
        "9",
        sys.executable,
        str(Path(sys.argv[0])),
        "--child",
    ]
    done = subprocess.run([*command, "views"], capture_output=True, text=True, check=False)
    require(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return summary[-1].strip("= ") if summary else "no summary", {}


CHECKS: Final[dict[str, Check]] = {
    **{
        each.__name__: checked(each)
        for each in (
            cupy_chain, torch_chain, jax_chain, foreign, move, views, small_types, hidden_gpu, host_copies, owner_exits,
            kill_owner, kill_reader, kill_both, unfinished_owner, passes, allocator_cupy, allocator_torch,
        )
    },
    "memcheck": memcheck,
}  # fmt: skip
