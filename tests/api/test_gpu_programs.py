"""Programs of users of CuPy and PyTorch, on fake GPUs that are late, refuse to answer, and share little memory: weights
that are written in place every step, and stages that work on streams of their own."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import uvloop

import zcactor as zc
from tests.actors_gpu import Gpus, Shelf, Stage
from tests.device.foreigners import Tensor, library, torch_like
from zcactor.device.streams import current_stream
from zcactor.process.context import current

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""

SIZE, STEPS = 100_000, 6
SEEDS = range(3)


def running(seed: int) -> AbstractAsyncContextManager[Any]:
    options = f"late=5,refuse=0.2,seed={seed},context=16MiB,memory=512MiB,host=programs-{os.getpid()}-{seed}"
    return zc.init(config=zc.Config(gpu=f"fake:{options}"))


def driver() -> Any:
    """The driver of this process's fake GPUs."""
    return current().store.devices().driver


class CupyWeights:
    """Weights that CuPy writes to: by a kernel on its current stream, of which nobody else hears."""

    def __init__(self) -> None:
        self.array = zc.zeros(SIZE, "u1", device="cuda").as_cupy()

    def write(self, value: int) -> None:
        """Queue a kernel."""
        driver().fill(0, self.array.data.ptr, bytes([value]), SIZE, current_stream(0))


class TorchWeights:
    """The same of PyTorch, which counts writes."""

    def __init__(self) -> None:
        own = zc.zeros(SIZE, "u1", device="cuda")
        self.array = Tensor(own.address, (SIZE,), (1,), "uint8", 1, own)

    def write(self, value: int) -> None:
        """Queue a kernel."""
        driver().fill(0, self.array.address, bytes([value]), SIZE, current_stream(0))
        self.array._version += 1


@pytest.fixture(params=[CupyWeights, TorchWeights])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of weights."""
    if request.param is CupyWeights:
        library("cupy")
    else:
        torch_like(monkeypatch)
    return request.param


@pytest.mark.parametrize("seed", SEEDS)
async def test_weights_every_step(weights: Any, seed: int) -> None:
    async with running(seed):
        receivers: list[Any] = [await Shelf.spawn() for _ in range(2)]
        made = weights()
        for step in range(STEPS):
            made.write(step + 1)
            now = zc.put(made.array)
            await zc.get([each.keep_as(step, now) for each in receivers])
            for each in receivers:
                assert (await each.look(step) == step + 1).all()
        for each in receivers:  # only the first ones are the memory that was written to
            for step in range(1, STEPS):
                assert (await each.look(step) == step + 1).all()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stream_for_each_stage_with_cupy(seed: int) -> None:
    library("cupy")
    async with running(seed):
        source: Any = await Gpus.spawn()
        stages: list[Any] = [await Stage.spawn() for _ in range(3)]
        for value in range(STEPS):
            x: Any = source.full(SIZE, value)
            for stage in stages:
                x = stage.copied(x)
            assert (zc.gpu.to_host(await x) == value).all()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stream_for_each_stage_with_pytorch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    async with running(seed):
        source: Any = await Gpus.spawn()
        sink: Any = await Shelf.spawn()
        with zc.gpu.stream() as stream:
            for value in range(STEPS):
                read = (await source.full(SIZE, value)).as_torch()
                own = zc.empty(SIZE, "u1", device="cuda")
                made = own.as_torch()
                driver().copy(0, made.data_ptr(), read.data_ptr(), 1, SIZE, (SIZE, SIZE), stream.ptr)
                await sink.keep_as(value, made)
                del read, made, own
        for value in range(STEPS):
            assert (await sink.look(value) == value).all()
