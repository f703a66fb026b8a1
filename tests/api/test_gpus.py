"""GPUs for programs: arrays on them, ways between host and GPU, streams, and clear errors without one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.device.foreigners import library
from tests.device.helpers import held
from tests.marshal.wire import assert_same
from zcactor.objectstore.copies import CopyCount
from zcactor.objectstore.store import Store
from zcactor.process.context import current

FAKE = zc.Config(gpu="fake:devices=2,late=2")
OFF = zc.Config(gpu="off")

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""


async def test_gpus() -> None:
    async with zc.init(config=FAKE):
        first, second = zc.gpu.gpus()
        assert (first.index, second.index, first.driver, first.name) == (0, 1, "fake", "Fake GPU")
        assert first.uuid != second.uuid and first.free == first.total == 1 << 30
        array = zc.empty(10, device="cuda:1")
        assert [each.free < each.total for each in zc.gpu.gpus()] == [False, True]
        del array


async def test_arrays() -> None:
    async with zc.init(config=FAKE):
        assert_same(zc.gpu.to_host(zc.zeros((2, 3), "c16", device="cuda")), np.zeros((2, 3), "c16"))
        assert_same(zc.gpu.to_host(zc.ones(4, "i2", device="cuda:1")), np.ones(4, "i2"))
        assert_same(zc.gpu.to_host(zc.full((2,), 2.5, device="cuda")), np.full(2, 2.5))
        assert_same(zc.gpu.to_host(zc.full((2, 2), 7, "u1", device="cuda")), np.full((2, 2), 7, "u1"))
        array = zc.empty([3, 4], "f4", device="cuda:1")
        assert type(array) is zc.gpu.DeviceArray
        assert (array.shape, array.device) == ((3, 4), "cuda:1")
        assert zc.empty((), device="cuda").shape == ()


async def test_a_mask_stays_on_the_host() -> None:
    async with zc.init(config=FAKE):
        masked: Any = np.ma.masked_equal(np.arange(4.0), 1)
        with pytest.raises(TypeError, match=r"zc.gpu.to_device: .* not have the mask .*; pass x.filled\(value\)"):
            zc.gpu.to_device(masked)
        assert_same(zc.gpu.to_host(zc.gpu.to_device(masked.data)), np.arange(4.0))


async def test_between_host_and_gpu() -> None:
    async with zc.init(config=FAKE):
        values = np.arange(1000).reshape(10, 100)[::2, ::-3]
        array = zc.gpu.to_device(values)
        assert zc.stats().copies["zc.gpu.to_device"] == CopyCount(1, values.nbytes)
        back = zc.gpu.to_host(array)
        assert_same(back, values)
        assert back.flags.writeable and zc.in_store(back) and zc.gpu.to_host(back) is back
        assert zc.stats().copies["zc.gpu.to_host"] == CopyCount(1, values.nbytes)
        same = zc.gpu.to_device(array)
        array.fill(3)
        assert (zc.gpu.to_host(same) == 3).all() and same is not array
        other = zc.gpu.to_device(array, "cuda:1")
        assert other.device == "cuda:1" and (zc.gpu.to_host(other) == 3).all()
        assert_same(zc.gpu.to_host(zc.gpu.to_device([1.5, 2.5])), np.array([1.5, 2.5]))
        assert zc.in_store(array)


async def test_streams_belong_to_tasks() -> None:
    async with zc.init(config=zc.Config(gpu="fake")):
        inside = asyncio.Event()

        async def other() -> bool:
            with zc.gpu.stream() as stream:
                inside.set()
                await asyncio.sleep(0)
                return stream.done()

        with zc.gpu.stream() as stream:
            task = asyncio.create_task(other())
            await inside.wait()
            with held(current().store.devices().driver, stream.ptr):
                array = zc.zeros(10, device="cuda")
                assert not stream.done()
                assert await task  # nothing was queued there
            stream.synchronize()
        assert (zc.gpu.to_host(array) == 0).all()


async def test_allocator() -> None:
    cupy: Any = library("cupy")
    async with zc.init(config=FAKE):
        with zc.gpu.allocator("cupy"):
            array = cupy.empty((10, 10), "f4")
        assert zc.in_store(array) and zc.stats().device_used == 512
        with pytest.raises(ValueError, match="takes 'cupy' or 'torch'"):
            zc.gpu.allocator("numba")  # type: ignore[arg-type] # that is the test
        del array
    async with zc.init(config=zc.Config(gpu="off")):
        with pytest.raises(zc.DeviceUnavailable):
            zc.gpu.allocator()
    with pytest.raises(zc.NotInitialized):
        zc.gpu.allocator()


@pytest.mark.parametrize("config", [FAKE, OFF], ids=["fake", "off"])
async def test_malformed_devices(config: zc.Config) -> None:
    wrong: list[Any] = ["gpu", "cuda:-1", "cuda:x", "cuda:", "CUDA", "cuda:1 ", "", 0, None]
    async with zc.init(config=config):
        for device in wrong:
            for call in (zc.gpu.stream, partial(zc.empty, 3, device=device), partial(zc.gpu.to_device, np.zeros(3))):
                with pytest.raises(ValueError, match="it must be 'cpu', 'cuda' or"):
                    call(device=device)


async def test_gpus_that_are_not_there() -> None:
    async with zc.init(config=FAKE):
        with pytest.raises(zc.DeviceUnavailable, match=r"cuda:9.*zc\.gpu\.gpus\(\)"):
            zc.empty(3, device="cuda:9")
    async with zc.init(config=OFF):
        assert zc.gpu.gpus() == []
        with pytest.raises(zc.DeviceUnavailable, match="ZCACTOR_GPU=fake"):
            zc.empty(3, device="cuda")
    with pytest.raises(zc.NotInitialized):
        zc.gpu.gpus()
    with pytest.raises(zc.DeviceUnavailable, match="without a runtime"):
        Store(1 << 20, bytes(16)).devices()


async def test_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise zc.DeviceUnavailable("there is no driver")

    monkeypatch.setattr("zcactor.device.cuda.gpu.bindings", missing)
    async with zc.init():
        assert zc.gpu.gpus() == []
        with pytest.raises(zc.DeviceUnavailable, match="no driver"):
            zc.empty(3, device="cuda")
    async with zc.init(config=zc.Config(gpu="cuda")):
        with pytest.raises(zc.DeviceUnavailable, match="no driver"):
            zc.gpu.gpus()


async def test_arrays_by_the_driver_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    from tests.device.cuda.stand_in import StandIn

    monkeypatch.setattr("zcactor.device.cuda.gpu.bindings", partial(StandIn, "devices=2,late=2"))
    async with zc.init():
        assert [each.driver for each in zc.gpu.gpus()] == ["cuda", "cuda"]
        values = np.arange(10_000, dtype="f8").reshape(100, 100)
        x = zc.gpu.to_device(values, "cuda:1")
        with zc.gpu.stream("cuda:1") as stream:
            y = x[::2, 5:].copy()
            y[:3].copy_from(x[:3, :95])
            stream.synchronize()
        expected = values[::2, 5:].copy()
        expected[:3] = values[:3, :95]
        assert_same(zc.gpu.to_host(y), expected)
        assert_same(zc.gpu.to_host(zc.gpu.to_device(y, "cuda:0")), expected)
        del x, y
        assert zc.stats().device_used == 0


async def test_other_bad_input() -> None:
    async with zc.init(config=FAKE):
        for dtype in (object, np.dtypes.StringDType()):
            with pytest.raises(TypeError, match="plain bytes"):
                zc.empty(3, dtype, device="cuda")
        with pytest.raises(TypeError, match="plain bytes"):
            zc.gpu.to_device(np.array([{}]))
        with pytest.raises(ValueError, match="negative"):
            zc.empty((2, -1), device="cuda")
        with pytest.raises(zc.OutOfMemory, match="GPU 0"):
            zc.empty(1 << 40, "u1", device="cuda")
        with pytest.raises(TypeError, match="not list"):
            zc.gpu.to_host([1])
    malformed = zc.Config(gpu="fake:colour=red")
    with pytest.raises(ValueError, match="its options are"):
        await zc.init(config=malformed)
    async with zc.init(config=malformed, num_gpus=0):  # a node that offers no GPU lists none
        with pytest.raises(ValueError, match="its options are"):
            zc.gpu.gpus()


async def test_arrays_outlive_the_runtime() -> None:
    async with zc.init(config=FAKE):
        array = zc.gpu.to_device(np.arange(10))
    target = np.empty(10, int)
    array.copy_to_host(target)
    assert_same(target, np.arange(10))
    async with zc.init(config=OFF):
        assert zc.gpu.gpus() == []  # the next runtime may have another driver


def test_programs_without_a_gpu_load_nothing_for_it() -> None:
    program = (
        "import sys, zcactor as zc, numpy as np\n"
        "from tests.actors import Plain\n"
        "async def main():\n"
        "    async with zc.init():\n"
        "        actor = await zc.spawn(Plain)\n"
        "        await actor.echo(5)\n"
        "        await actor.echo(zc.zeros(1 << 20, 'u1'))\n"
        "        zc.stats()\n"
        "        print([name for name in sys.modules if name.startswith('zcactor.device')])\n"
        "zc.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "now"), [("to_host", "to_host"), ("gpu_stream", "stream"), ("DeviceArray", "DeviceArray")]
)
def test_a_name_that_has_moved_says_where(name: str, now: str) -> None:
    with pytest.raises(AttributeError, match=f"^zcactor.{name} is zcactor.gpu.{now}$"):
        getattr(zc, name)
    assert hasattr(zc.gpu, now) and not hasattr(zc, name)
