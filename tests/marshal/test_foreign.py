"""Other libraries' arrays on GPUs in messages: by reference where their bytes are in the store, else copied once."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.actors_gpu import Box, Gpus
from tests.device.foreigners import Array, Interfaced, Packed, Parameter, Tensor, jax_like, library, outside, torch_like
from tests.device.helpers import array_on, held, opened, seen, settle
from tests.marshal.wire import Wire
from zcactor.device.array import DeviceArray
from zcactor.device.interchange import tensor_of
from zcactor.device.store import DeviceStore
from zcactor.device.streams import GpuStream
from zcactor.errors import DeviceUnavailable
from zcactor.marshal.foreign import array_over_foreign, pack_foreign
from zcactor.marshal.packing import Packing
from zcactor.objectstore.ref import RegionKind
from zcactor.process.context import current

OUTSIDE = "argument outside the device store"
CHANGED = "array on a GPU that may have changed"


@dataclass
class Pair:
    """Two values."""

    one: Any
    other: Any


class Sub(Parameter):
    """A class of a program."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Two marshallers, whose stores have no GPU yet."""
    made = Wire()
    yield made
    made.close()


def on(wire: Wire, devices: DeviceStore) -> DeviceArray:
    """Let both ends see the same GPUs; an array on the first."""
    for side in (wire.left, wire.right):
        side.store.open_devices = lambda: devices
    return array_on(devices.gpu(0), np.arange(600, dtype="i4").reshape(20, 30))


def test_by_reference(wire: Wire) -> None:
    with opened() as devices:
        array = on(wire, devices)
        for part in (array, array[3:, ::2], array.T, array[::-1], array[1, 2], array[:0]):
            got = wire.send(Packed(part))
            assert type(got) is DeviceArray and got.readonly
            assert (seen(got) == seen(part)).all() and got.shape == part.shape
            if part.size:
                assert (got.address, got.strides) == (part.address, part.strides)
                assert got.holder is array.holder
        assert wire.left.bytes_copied == wire.right.bytes_copied == 0
        assert array.readonly


def test_inside_of_other_things(wire: Wire) -> None:
    with opened() as devices:
        array = on(wire, devices)
        packed = Packed(array)
        interfaced = Interfaced(array.address, (20, 30), "<i4", stream=1)
        for value in ([packed, interfaced], (packed, interfaced), {"a": packed, "b": interfaced}):
            got = wire.send(value)
            for each in got.values() if isinstance(got, dict) else got:
                assert type(each) is DeviceArray and each.address == array.address
        pair = wire.send({"pairs": {1: Pair(packed, [interfaced, {2}])}})["pairs"][1]
        assert pair.one.address == pair.other[0].address == array.address
        assert wire.left.bytes_copied == 0


def test_outside_of_the_store(wire: Wire) -> None:
    with opened() as devices:
        on(wire, devices)
        gpu = devices.gpu(0)
        address = outside(gpu)
        gpu.driver.fill(0, address, b"\7\0\0\0", 600, 0)
        value = Interfaced(address, (20, 30), "<i4", stream=1)
        got = wire.send([value, Pair(value, value), value])
        assert {each.address for each in (got[0], got[1].one, got[1].other, got[2])} == {got[0].address}
        assert got[0].address != address and (seen(got[0]) == 7).all()
        counted = wire.left.copies.snapshot()
        assert (counted[OUTSIDE].count, counted[OUTSIDE].nbytes) == (1, 2400)


def test_memory_outside_is_kept_until_it_is_copied(wire: Wire) -> None:
    """Its library may give the memory back to the GPU with the last array, as by ``empty_cache``."""
    with opened() as devices:
        on(wire, devices)
        gpu = devices.gpu(0)
        address = outside(gpu)
        with held(gpu.driver):
            gpu.driver.fill(0, address, b"\7", 600, 0)
            value = Interfaced(address, (600,), "|u1", stream=1)
            kept = weakref.ref(value)
            got = wire.send(value)
            del value
            devices.tending._look()
            assert kept() is not None, "the copy is not done"
        assert (seen(got) == 7).all()
        settle(gpu.driver)
        gc.collect()
        devices.tending._look()
        assert kept() is None


def test_memory_outside_that_lies_in_several_extents(wire: Wire) -> None:
    """As PyTorch's ``expandable_segments`` have it: they map extents one behind the other into one reservation."""
    with opened() as devices:
        on(wire, devices)
        gpu = devices.gpu(0)
        step = gpu.driver.granularity
        base = gpu.driver.reserve(0, 2 * step)
        for place in (base, base + step):
            handle = gpu.driver.create(0, step)
            gpu.driver.map(0, place, handle, step, True)
            gpu.driver.release(0, handle)
            gpu.driver.fill(0, place, b"ab"[place > base : (place > base) + 1], step, 0)
        got = wire.send(Interfaced(base + step - 100, (150,), "|u1", stream=1))
        assert bytes(seen(got)) == b"a" * 100 + b"b" * 50
        assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 150


def test_a_device_array_over_memory_outside(wire: Wire) -> None:
    with opened() as devices:
        on(wire, devices)
        over = array_over_foreign(wire.left.store, Interfaced(outside(devices.gpu(0)), (10,), "|u1", stream=1))
        assert over is not None
        over.fill(5)
        assert (seen(wire.send(over)) == 5).all()
        assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 10


def test_tensors(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    with opened() as devices:
        array = on(wire, devices)
        got = wire.send(Pair(Tensor(array.address, (4, 5), (1, 7), "int32", 4, array), 1)).one
        assert type(got) is Tensor
        assert (got.address, got.shape, got.steps, got.dtype) == (array.address, (4, 5), (1, 7), "torch.int32")
        array = on(wire, devices)
        narrow = Tensor(array.address, (6,), (1,), "bfloat16", 2, array).requires_grad_(True)
        got = wire.send([narrow])[0]
        assert (got.address, got.dtype, got.requires_grad) == (array.address, "torch.bfloat16", True)
        assert [part.kind for part in wire.parts] == [RegionKind.DEVICE]
        for grad in (True, False):
            weights = on(wire, devices)
            parameter = Parameter(Tensor(weights.address, (6,), (1,), "bfloat16", 2, weights), requires_grad=grad)
            got = wire.send([parameter])[0]
            assert type(got) is Parameter and got.requires_grad is grad
            assert (got.address, got.dtype) == (weights.address, "torch.bfloat16")
            assert type(wire.send(Sub(parameter))) is Sub, "what else is a tensor goes as its library pickles it"
        monkeypatch.setattr("zcactor.device.interchange.imported", missing)
        got = wire.send(narrow)
        assert type(got) is DeviceArray and got.dtype == np.dtype(library("ml_dtypes").bfloat16)


def sent_again(wire: Wire, value: Any, address: int) -> bool:
    """Whether an array that is passed once more is copied."""
    before = wire.left.copies.snapshot().get(CHANGED)
    got = wire.send([value])[0]
    now = wire.left.copies.snapshot().get(CHANGED)
    copied = (now.count if now else 0) > (before.count if before else 0)
    assert copied == (got.address != address)
    return copied


def test_a_tensor_that_was_written_to_is_another_one(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    with opened() as devices:
        array = on(wire, devices)
        tensor = Tensor(array.address, (600,), (1,), "int32", 4, array)
        part = Tensor(array.address, (60,), (1,), "int32", 4, array)
        part._base = tensor
        assert not sent_again(wire, tensor, array.address)
        assert not sent_again(wire, tensor, array.address) and not sent_again(wire, part, array.address)
        tensor._version = part._version = 1
        devices.driver.fill(0, array.address, b"\7\0\0\0", 600, 0)
        assert sent_again(wire, part, array.address) and sent_again(wire, tensor, array.address)
        other = Tensor(array.address, (600,), (1,), "int32", 4, array)
        assert sent_again(wire, other, array.address), "its count is another one"
        monkeypatch.setattr(Tensor, "is_inference", lambda _: True)
        assert sent_again(wire, tensor, array.address), "its writes are not counted"


def test_an_array_that_may_have_changed_is_another_one(wire: Wire) -> None:
    with opened() as devices:
        array, stream = on(wire, devices), GpuStream(devices.gpu(0))
        value = Interfaced(array.address, (600,), "<i4", stream=stream.ptr)
        first = wire.send([value, value])
        assert first[0].address == first[1].address == array.address
        with held(devices.driver, stream.ptr):
            devices.driver.fill(0, array.address, b"\7\0\0\0", 600, stream.ptr)
            got = wire.send([value, value])
        assert got[0].address == got[1].address != array.address
        assert (seen(got[0]) == 7).all(), "the copy comes after the library's work"
        counted = wire.left.copies.snapshot()[CHANGED]
        assert (counted.count, counted.nbytes) == (1, 2400)
        assert wire.send(array).address == array.address, "an array of ours refuses to be written to"


def test_arrays_of_jax(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as devices:
        array = on(wire, devices)
        stream = GpuStream(devices.gpu(0))
        jax_like(monkeypatch, stream.ptr)
        got = wire.send([Array(array)])[0]
        tensor = tensor_of(got.capsule)
        assert type(got) is Array and tensor.data == array.address and tuple(tensor.shape[:2]) == (20, 30)
        assert [part.kind for part in wire.parts] == [RegionKind.DEVICE]
        assert array.holder.work.is_given, "later work is ordered after that of JAX"
        monkeypatch.setitem(sys.modules, "jax", None)
        assert type(wire.send(Array(array))) is DeviceArray
        assert wire.left.bytes_copied == 0


def missing(name: str) -> None:
    raise ImportError(name)


@pytest.mark.slow
def test_cupy(wire: Wire) -> None:
    cupy = library("cupy")
    with opened() as devices:
        on(wire, devices)
        views: list[Callable[[Any], Any]] = [
            lambda x: x, lambda x: x[3:, ::2], lambda x: x.T, lambda x: x[::-1], lambda x: x[1, 2], lambda x: x[:0],
            lambda x: x[None, 1:2],
        ]  # fmt: skip
        for view in views:
            sent = on(wire, devices).as_cupy()
            part = view(sent)
            for got in wire.send([part, Pair([part], 1), sent])[:2]:
                got = got.one[0] if isinstance(got, Pair) else got
                assert type(got) is cupy.ndarray
                assert (got.shape, got.dtype) == (part.shape, part.dtype)
                if part.size:
                    assert (got.data.ptr, got.strides) == (part.data.ptr, part.strides)
        assert wire.left.bytes_copied == wire.right.bytes_copied == 0
        made = cupy.cuda.UnownedMemory(outside(devices.gpu(0)), 400, None, 0)
        foreign = cupy.ndarray((10, 10), "f4", cupy.cuda.MemoryPointer(made, 0))
        got = wire.send([foreign.T, foreign.T[1:]])
        assert type(got[0]) is cupy.ndarray and got[0].shape == (10, 10)
        assert wire.left.copies.snapshot()[OUTSIDE].nbytes == 400 + 360


@pytest.mark.slow
def test_moved_cupy(wire: Wire) -> None:
    cupy = library("cupy")
    with opened() as devices:
        array = on(wire, devices)
        values, address, sent = seen(array), array.address, array.as_cupy()
        with pytest.raises(ValueError, match="other views"):
            wire.send(zc.move(sent))
        del array
        got = wire.send([zc.move(sent)])[0]
        assert type(got) is cupy.ndarray and got.data.ptr != address
        assert wire.right.copies.snapshot()["moved array on a GPU"].nbytes == 2400
        over = array_over_foreign(wire.right.store, got)
        assert over is not None and not over.readonly and (seen(over) == values).all()
        assert "moved array on a GPU" not in wire.left.copies.snapshot()
        for count, part in enumerate([slice(1, None), None], 1):
            sent = on(wire, devices).as_cupy()
            beside = sent[part]
            wire.send(zc.move(sent))
            assert wire.left.copies.snapshot()["moved array on a GPU"].count == count, "somebody else may write there"
            del beside
    nothing = Interfaced(4096, (3,), "<i4")
    with pytest.raises(TypeError, match="no GPU"):
        wire.send(zc.move(nothing))


def test_not_ours(wire: Wire) -> None:
    value = Interfaced(4096, (3,), "<i4")
    packing = Packing(wire.left.store, wire.left.copies, 100)
    assert pack_foreign(packing, value) is None  # no GPU
    assert array_over_foreign(wire.left.store, np.arange(3)) is None
    assert array_over_foreign(wire.left.store, library("pyarrow").array([1])) is None

    def off() -> None:
        raise DeviceUnavailable("switched off")

    wire.left.store.open_devices = off
    assert pack_foreign(packing, value) is None and array_over_foreign(wire.left.store, value) is None
    assert wire.send(value).described == value.described
    with opened() as devices:
        on(wire, devices)
        assert wire.send(value).described == value.described  # nothing lies there
        assert packing.parts == []


def test_kinds_of_parts(wire: Wire) -> None:
    with opened() as devices:
        wire.send(Packed(on(wire, devices)))
        assert [part.kind for part in wire.parts] == [RegionKind.DEVICE]


# ---- between processes


def running(options: str = "devices=2") -> AbstractAsyncContextManager[Any]:
    return zc.init(config=zc.Config(gpu=f"fake:{options}"))


@pytest.mark.slow
async def test_cupy_between_processes() -> None:
    cupy = library("cupy")
    values = np.arange(6000, dtype="i4").reshape(200, 30)
    async with running():
        actor: Any = await Gpus.spawn()
        views: list[Callable[[Any], Any]] = [lambda x: x, lambda x: x[::-1, ::3], lambda x: x.T]
        for view in views:
            x = zc.gpu.to_device(values, "cuda:1")
            sent = x.as_cupy()
            assert zc.in_store(sent) and zc.gpu.to_device(sent, "cuda:1").address == x.address
            kind, got = await actor.described(view(sent))
            assert kind == "cupy.ndarray" and (got == view(values)).all()
            assert zc.in_store(x) and not zc.in_store(sent), "CuPy may have written to it since"
        x = zc.gpu.to_device(values, "cuda:1")
        sent = x.as_cupy()
        await actor.keep(Box("b", {"a": [sent[5:]]}))
        back = (await actor.kept()).array["a"][0]
        assert type(back) is cupy.ndarray and back.data.ptr == x[5:].address
        made = await actor.cupy(100, 7)
        assert type(made) is cupy.ndarray and made.data.device_id == 0 and zc.in_store(made)
        assert (zc.gpu.to_host(made) == 7).all()
        assert (await actor.described(made[::2]))[1].sum() == 350
        ref = zc.put(sent)
        assert [(await actor.described(ref))[1].sum() for _ in range(2)] == [values.sum()] * 2
        assert [int(zc.gpu.to_host(each)[0]) async for each in actor.cupies(3)] == [0, 1, 2]
        assert OUTSIDE not in zc.stats().copies and OUTSIDE not in (await actor.stats()).copies
        assert zc.stats().copies.keys() == {"zc.gpu.to_host", "zc.gpu.to_device", CHANGED}
        assert zc.stats().copies[CHANGED].count == 1, "put after it was kept"


async def ordered(waits: str) -> int:
    """A byte that a receiver's library reads, on a stream whose turn it is before the sender's library has written."""
    async with running(f"waits={waits}"):
        actor: Any = await Gpus.spawn()
        x = zc.zeros(1000, "u1", device="cuda")
        zc.gpu.to_host(x)
        driver = current().store.devices().driver
        with zc.gpu.stream() as stream:
            sent = x.as_cupy()
            with held(driver, stream.ptr):
                driver.fill(0, sent.data.ptr, b"\7", 1000, stream.ptr)
                copied = await actor.copied_by_cupy(sent)
                await actor.settle()
            return int(zc.gpu.to_host(copied)[0])


@pytest.mark.slow
async def test_work_of_libraries_is_ordered() -> None:
    library("cupy")
    assert await ordered("yes") == 7
    assert await ordered("no") == 0


@pytest.mark.slow
async def test_cupy_to_a_process_without_a_gpu() -> None:
    library("cupy")
    async with running():
        actor: Any = await Gpus.options(env={"CUDA_VISIBLE_DEVICES": ""}).spawn()
        kind, got = await actor.described(zc.full(1000, 3, "i4", device="cuda").as_cupy())
        assert kind == "numpy.ndarray" and got.sum() == 3000
        assert zc.stats().copies["through host memory"].count == 1
