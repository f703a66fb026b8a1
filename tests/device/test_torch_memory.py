"""PyTorch's memory in the store: the C functions without the interpreter lock, tensors as objects of the store.

A stand-in takes the place of PyTorch, as its own build for GPUs has gigabytes. It calls the C functions as PyTorch
does: for large pieces, of which it makes tensors itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.device.helpers import opened, seen
from tests.device.torch_stand_in import StandIn
from zcactor.device import _torch
from zcactor.device.arena import EXTENT_NBYTES
from zcactor.device.foreign import Outside, known_array
from zcactor.device.memory import DeviceBlock
from zcactor.device.store import DeviceStore, open_store
from zcactor.device.torch_memory import ALLOCATE, FREE, TorchBlock, TorchMemory, allocates_for_torch
from zcactor.errors import OutOfMemory
from zcactor.testing import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    """The functions of torch_threads.c, during whose calls the interpreter lock is held."""
    built = tmp_path_factory.mktemp("torch") / "threads.so"
    source = Path(__file__).with_name("torch_threads.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", built, source], check=True)
    library = ctypes.PyDLL(str(built))
    library.run.restype, library.run.argtypes = ctypes.c_long, [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_long]
    return library


def functions() -> tuple[Any, Any]:
    """PyTorch's functions, called as PyTorch does: without the interpreter lock."""
    library = ctypes.CDLL(_torch.__file__)
    allocate, free = getattr(library, ALLOCATE), getattr(library, FREE)
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return allocate, free


def addresses() -> list[int | None]:
    return [ctypes.cast(each, ctypes.c_void_p).value for each in functions()]


@contextmanager
def memory(options: str = "", keep: int = 0, capacity: int | None = None) -> Iterator[tuple[DeviceStore, TorchMemory]]:
    """PyTorch's memory on the first fake GPU."""
    with opened(options, capacity, keep) as devices:
        made = devices.torch_memory()
        made.use(devices.gpus[0])
        try:
            yield devices, made
        finally:
            devices.close()


def test_four_threads_while_the_interpreter_is_locked(threads: ctypes.PyDLL) -> None:
    with memory("memory=256MiB") as (devices, made):
        made.grow(devices.gpus[0])
        # The calling thread has the lock to the end: were it taken inside, this would hang.
        assert threads.run(*addresses(), 0, 2000) == 0
        assert _torch.figures(made.number) == (2 * EXTENT_NBYTES, 0)


def test_four_threads_of_the_interpreter() -> None:
    allocate, free = functions()
    with memory() as (_, made):
        found: list[int] = []

        def work() -> None:
            for number in range(200):
                address = allocate(1000 + number, 0, None)
                found.append(address)
                if number % 2:
                    free(address, 0, 0, None)

        started = [threading.Thread(target=work) for _ in range(4)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        assert None not in found and not any(address % 512 for address in found)
        kept = [-(-(1000 + number) // 512) * 512 for number in range(0, 200, 2)]
        assert _torch.figures(made.number)[1] == 4 * sum(kept)


def test_pieces_that_are_refused() -> None:
    allocate, free = functions()
    with memory("memory=64MiB") as (_, made):
        for device, nbytes in ((0, EXTENT_NBYTES + 1), (0, -1), (-1, 1), (64, 1), (63, 1)):
            assert allocate(nbytes, device, None) is None
        empty = allocate(0, 0, None)
        assert empty is not None
        for pointer in (None, 12345, empty, empty):  # unknown, and freed twice
            free(pointer, 1, 0, None)
        assert _torch.figures(made.number) == (EXTENT_NBYTES, 0)
        assert allocate(EXTENT_NBYTES, 0, None) is not None
        with pytest.raises(OutOfMemory):
            made.grow(made._gpus[0])


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="GPUs 0 to 63"):
        _torch.use(64, 1, -1, 1)
    with pytest.raises(ValueError, match="GPUs 0 to 63"):
        _torch.add(1, -1, 0, 1)
    for functions_, properties in (((0,) * 7, b""), ((0,) * 8, bytes(65))):
        with pytest.raises(ValueError, match="functions of CUDA"):
            _torch.make_by(0, functions_, properties, b"", 0, 1, 1, 0)
    assert _torch.find(1) is None


async def test_memory_is_made_ahead_of_need() -> None:
    allocate, _ = functions()
    with opened("memory=512MiB") as devices:
        made = TorchMemory(devices.gpus, None, 0, asyncio.get_running_loop())
        made.use(devices.gpus[0])
        await asyncio.sleep(0)
        for number in range(6):  # more than there was at first
            assert allocate(40 * MIB, 0, None) is not None, number
            while _torch.figures(made.number)[0] < (number + 2) * EXTENT_NBYTES:
                await asyncio.sleep(0)
        made.close()


def test_free_extents_go_back() -> None:
    allocate, free = functions()
    with memory(keep=EXTENT_NBYTES) as (devices, made):
        made.grow(devices.gpus[0])
        made.grow(devices.gpus[0])
        assert devices.used == 3 * EXTENT_NBYTES
        kept = allocate(5, 0, None)
        made.use(devices.gpus[0])
        assert devices.used == 2 * EXTENT_NBYTES
        free(kept, 5, 0, None)
        made.use(devices.gpus[0])
        assert devices.used == EXTENT_NBYTES and _torch.figures(made.number) == (EXTENT_NBYTES, 0)


NAMES = ["reserve", "unreserve", "create", "map", "unmap", "allow", "release", "synchronize", "exchange"]
CALLS = ctypes.c_long * len(NAMES)


@pytest.mark.parametrize("fails", ["", "reserve", "create", "map", "allow"])
def test_extents_that_are_made_by_functions_of_cuda(fails: str, threads: ctypes.PyDLL) -> None:
    allocate, free = functions()
    table = (ctypes.c_void_p * len(NAMES)).in_dll(threads, "functions")
    calls, failing = CALLS.in_dll(threads, "calls"), ctypes.c_int.in_dll(threads, "fails")
    calls[:] = [0] * len(NAMES)
    with memory() as (_, made):
        properties, access = (1).to_bytes(32, "little"), bytes(20) + (3).to_bytes(4, "little")
        _torch.make_by(0, tuple(each or 0 for each in table), properties, access, 2, 2 * MIB, 200 * MIB, 0)
        assert allocate(60 * MIB, 0, None) is not None and not calls[0]
        failing.value = NAMES.index(fails) if fails else -1
        large = allocate(100 * MIB, 0, None)
        failing.value = -1
        done = dict(zip(NAMES, calls, strict=True))
        assert (large is None) == bool(fails)
        assert done["create"] == done["release"] + (fails == "create") or fails == "reserve"
        assert done["unreserve"] == (fails not in {"", "reserve"})
        assert done["unmap"] == (fails == "allow")
        large = large or allocate(100 * MIB, 0, None)
        assert large is not None and allocate(120 * MIB, 0, None) is None  # above the limit
        found = _torch.find(large)
        assert found == (made.number, 0, large, 100 * MIB)
        block = made.block_at(large + 10, large + 20, "kept")
        assert block is not None and block.address == large + 10
        free(large, 0, 0, None)
        assert calls[NAMES.index("synchronize")] == 1
        assert allocate(100 * MIB, 0, None) == large


def test_the_capacity_is_for_arrays_and_tensors_together(threads: ctypes.PyDLL) -> None:
    allocate, free = functions()
    table = (ctypes.c_void_p * len(NAMES)).in_dll(threads, "functions")
    with memory("memory=1GiB", capacity=512 * MIB) as (devices, _):
        gpu = devices.gpus[0]
        gpu.arena.beside = partial(_torch.beside, 0)
        properties, access = (1).to_bytes(32, "little"), bytes(20) + (3).to_bytes(4, "little")
        _torch.make_by(0, tuple(each or 0 for each in table), properties, access, 2, 2 * MIB, 512 * MIB, 1000 * MIB)
        gpu.arena.tidy()
        tensor = allocate(200 * MIB, 0, None)
        assert tensor is not None
        arrays = [DeviceBlock(gpu, 100 * MIB), DeviceBlock(gpu, 100 * MIB)]
        assert allocate(60 * MIB, 0, None) is not None, "in the extent that was made ahead"
        assert allocate(100 * MIB, 0, None) is None
        with pytest.raises(OutOfMemory, match="device_capacity is 536,870,912 bytes"):
            DeviceBlock(gpu, 100 * MIB)
        free(tensor, 200 * MIB, 0, None)  # it is kept for later, and given back when something else needs the room
        arrays.append(DeviceBlock(gpu, 100 * MIB))
        arrays.append(DeviceBlock(gpu, 100 * MIB))
        assert allocate(100 * MIB, 0, None) is None
        del arrays[:2]
        assert allocate(100 * MIB, 0, None) is None, "the runtime has not given its extents back yet"
        gpu.arena.tidy()
        assert allocate(100 * MIB, 0, None) is not None


def test_memory_that_was_passed_goes_back_to_the_gpu(threads: ctypes.PyDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, free = functions()
    table = (ctypes.c_void_p * len(NAMES)).in_dll(threads, "functions")
    with memory("memory=2GiB") as (devices, made):
        gpu, driver = devices.gpus[0], devices.driver
        gpu.arena.beside, gpu.arena.take_back = partial(_torch.beside, 0), made._take_back
        calls, gone = list[tuple[str, int]](), list[Any]()
        for call in ("unmap", "unreserve"):
            monkeypatch.setattr(driver, call, lambda _, address, nbytes, call=call: calls.append((call, address)))
        monkeypatch.setattr(driver, "export", lambda *_: os.dup(0))
        gpu.arena.on_gone = lambda *each: gone.append(each)
        properties, access = (1).to_bytes(32, "little"), bytes(20) + (3).to_bytes(4, "little")
        _torch.make_by(0, tuple(each or 0 for each in table), properties, access, 2, 2 * MIB, 1 << 30, 0)
        own = gpu.arena.taken
        places = [allocate(100 * MIB, 0, None) or 0 for _ in range(3)]
        first, *_ = [made.block_at(place, place + 100, "kept") for place in places]
        assert first is not None and gpu.arena.taken == own + 300 * MIB
        for each in gpu.arena.exports([first.offset - gpu.base], b"reader"):
            os.close(each.fd)
        gpu.arena.tidy()
        assert not calls, "tensors lie there"
        for place in places[:2]:
            free(place, 100 * MIB, 0, None)
        assert allocate(100 * MIB, 0, None) in places, "it serves other tensors"
        free(places[0], 100 * MIB, 0, None)
        free(places[1], 100 * MIB, 0, None)
        gpu.arena.tidy()
        assert sorted(calls) == sorted((call, place) for call in ("unmap", "unreserve") for place in places[:2])
        assert gpu.arena.taken == own + 100 * MIB and gone == [(first.offset - gpu.base, {b"reader"})]
        assert made.block_at(places[0], places[0] + 1, "other") is None
        del first
        free(places[2], 100 * MIB, 0, None)
        gpu.arena.tidy()
        assert gpu.arena.taken == own
        gpu.arena.beside, gpu.arena.take_back = lambda *_: 0, lambda *_: False


@pytest.mark.parametrize("keep", [0, 64, 1000])
def test_what_pytorch_has_freed_is_given_back_to_the_gpu(keep: int, threads: ctypes.PyDLL) -> None:
    """Above what is kept, and all of it where there is no room otherwise."""
    allocate, free = functions()
    table = (ctypes.c_void_p * len(NAMES)).in_dll(threads, "functions")
    with memory() as (devices, made):
        properties, access = (1).to_bytes(32, "little"), bytes(20) + (3).to_bytes(4, "little")
        arguments = properties, access, 2, 2 * MIB, 800 * MIB, keep * MIB
        _torch.make_by(0, tuple(each or 0 for each in table), *arguments)
        own = _torch.figures(made.number)[0]
        for mib in (100, 120, 140, 160, 180, 200, 220):
            place = allocate(mib * MIB, 0, None)
            assert place is not None, mib
            free(place, mib * MIB, 0, None)
            taken, used = _torch.figures(made.number)
            assert not used and taken - own <= 800 * MIB
            assert taken - own == 0 or keep, "nothing is kept"
        places = [allocate(70 * MIB, 0, None) for _ in range(10)]
        assert None not in places
        assert _torch.find(places[0]) is not None, "a tensor there is passed, and peers may import the memory"
        for place in places:
            free(place, 70 * MIB, 0, None)
        assert allocate(500 * MIB, 0, None) is not None
        kept = _torch.find(places[0])
        assert kept is not None, "it has not been given back"
        assert _torch.figures(made.number)[0] - own == kept[3] + 500 * MIB
        assert devices.used == own


# ---- tensors


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in in the place of PyTorch."""
    made = StandIn()
    monkeypatch.setitem(sys.modules, "torch", made)
    yield made


def test_tensors_are_objects_of_the_store(torch: StandIn) -> None:
    with memory() as (devices, made):
        with allocates_for_torch(made, devices.gpus):
            tensor = torch.empty(1000)
        outside = torch.empty(1000)
        known = known_array(devices, tensor)
        assert known is not None and known.library == "torch"
        block: Any = known.array.holder
        assert type(block) is TorchBlock and (block.address, block.nbytes) == (tensor.data_ptr(), 1000)
        block.lend(reader := object())
        lent = known.array.readonly
        block.take_back(reader)
        assert (lent, known.array.readonly) == (True, False)
        known.array.fill(7)
        assert (seen(known.array) == 7).all()
        part = known_array(devices, tensor.part(100, 50))
        assert part is not None and part.array.holder is block and part.array.address == block.address + 100
        other = known_array(devices, outside)
        assert other is None or isinstance(other.array.holder, Outside)
        with allocates_for_torch(made, devices.gpus):
            second = known_array(devices, torch.empty(10))
        assert second is not None and second.array.holder is not block


async def test_bytes_are_pytorchs_again_when_nobody_has_them(torch: StandIn) -> None:
    devices = open_store("fake", None, None, 0, asyncio.get_running_loop())
    made = devices.torch_memory()
    with allocates_for_torch(made, devices.gpus):
        tensor = torch.empty(1000)
        place, known = tensor.data_ptr(), known_array(devices, tensor)
        del tensor
        assert torch.empty(1000).data_ptr() != place
        assert known is not None
        del known
        await until(lambda: torch.empty(1000).data_ptr() == place, "no work is left on the bytes")
    devices.close()


def test_blocks_inside_of_each_other_have_pools_of_their_own(torch: StandIn) -> None:
    with memory() as (devices, made):
        with allocates_for_torch(made, devices.gpus), allocates_for_torch(made, devices.gpus):
            assert len(set(torch.in_use)) == 2
        with allocates_for_torch(made, devices.gpus):
            pass
        assert torch.made == 2 and not torch.in_use
