"""Arrays between actors with GPUs of their own, on one host: where they lie at the receiver, and which way they go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.actors_gpu import Gpus
from tests.marshal.wire import assert_same

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""

HOST = "through host memory"


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's own choice of GPUs away."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def running(options: str) -> Any:
    """A runtime with late fake GPUs."""
    return zc.init(num_cpus=8, config=zc.Config(gpu=f"fake:{options},late=5"))


async def spawned(**options: Any) -> Any:
    """An actor, whose methods are not typed here."""
    return await Gpus.options(**options).spawn()


async def uuids() -> list[str]:
    """The UUIDs of all GPUs of the host."""
    return [gpu.uuid for gpu in zc.gpu.gpus()]


@pytest.mark.parametrize("peer", ["all", "none"])
async def test_from_an_actor_to_one_with_another_gpu(peer: str) -> None:
    async with running(f"devices=2,peer={peer}"):
        first, second = await spawned(num_gpus=1), await spawned(num_gpus=1)
        own, other = [(await actor.facts(await actor.full(1, 0)))[4] for actor in (first, second)]
        assert {own, other} == set(await uuids())
        reference = first.full((300, 200), 7, "i4")
        kind, values = await second.seen(reference)
        assert kind == "DeviceArray"
        assert_same(values, np.full((300, 200), 7, "i4"))
        shape, dtype, _, device, uuid, readonly = await second.facts(reference)
        assert (shape, dtype, device, uuid, readonly) == ((300, 200), np.dtype("i4"), "cuda:0", other, True)
        stats = await second.stats()
        copied = stats.copies.get(HOST, None)
        assert (stats.bytes_device_pulled > 0) == (peer == "all")
        assert (copied is not None) == (peer == "none")


@pytest.mark.parametrize("peer", ["all", "none"])
async def test_on_and_back_to_its_own_gpu(peer: str) -> None:
    async with running(f"devices=3,peer={peer}"):
        actors = [await spawned(num_gpus=1) for _ in range(3)]
        x = await actors[0].full(70_000, 5)
        for actor in (actors[1], actors[2], actors[0]):
            kind, values = await actor.relay(actors[(actors.index(actor) + 1) % 3], x)
            assert kind == "DeviceArray" and (values == 5).all() and len(values) == 70_000
        y = await actors[1].doubled(x)  # made by the second actor, not waited for
        kind, values = await actors[2].seen(y)
        assert kind == "DeviceArray" and (values == 5).all()


@pytest.mark.parametrize("peer", ["all", "none"])
async def test_an_actor_with_two_gpus(peer: str) -> None:
    async with running(f"devices=4,peer={peer}"):
        two, one = await spawned(num_gpus=2), await spawned(num_gpus=1)
        on = [await two.full(1000, index + 1, device=f"cuda:{index}") for index in range(2)]
        facts = [await two.facts(x) for x in on]
        assert [device for *_, device, _, _ in facts] == ["cuda:0", "cuda:1"]
        seen = [uuid for *_, uuid, _ in facts]
        assert len(set(seen)) == 2 and set(seen) <= set(await uuids())
        for index, x in enumerate(on):
            assert x.uuid == seen[index]  # this process sees all GPUs, so it is the same memory
            assert (zc.gpu.to_host(x) == index + 1).all()
            kind, values = await one.seen(x)
            assert kind == "DeviceArray" and (values == index + 1).all()
        with pytest.raises(zc.DeviceUnavailable, match="no GPU cuda:2: this process sees cuda:0, cuda:1"):
            await two.full(1, 1, device="cuda:2")


async def test_gpus_are_known_by_uuid_and_not_by_number() -> None:
    async with running("devices=2"):
        turned = await spawned(env={"CUDA_VISIBLE_DEVICES": "1,0"})
        for index, there in ((0, "cuda:1"), (1, "cuda:0")):
            x = zc.full(1000, 3, "u1", device=f"cuda:{index}")
            *_, device, uuid, _ = await turned.facts(x)
            assert (device, uuid) == (there, x.uuid)
            y = await turned.full(1000, 4, device=there)
            assert (y.device, y.uuid) == (x.device, x.uuid) and (zc.gpu.to_host(y) == 4).all()
        assert (await turned.stats()).bytes_device_pulled == zc.stats().bytes_device_pulled == 0


@pytest.mark.parametrize("peer", ["all", "none"])
async def test_copies_between_gpus_of_one_process(peer: str) -> None:
    async with running(f"devices=2,peer={peer}"):
        x = zc.empty((100, 30), "i4", device="cuda:1")
        y = zc.empty((100, 30), "i4", device="cuda:0")
        with zc.gpu.stream("cuda:1"):
            x.fill(8)
        with zc.gpu.stream("cuda:0"):
            y.copy_from(x)
        x.fill(9)
        assert (zc.gpu.to_host(y) == 8).all() and (zc.gpu.to_host(x) == 9).all()
        y[::2].copy_from(x[1::2])
        assert (zc.gpu.to_host(y)[::2] == 9).all() and (zc.gpu.to_host(y)[1::2] == 8).all()
