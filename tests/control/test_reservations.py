"""GPUs of actors at real nodes: each gets its own, or a share of one, and they are free when its process has ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import uvloop

import zcactor as zc
from tests.control.seers import Breaker, Seer, Sights
from zcactor.device.fake import host_uuids

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""
PATIENCE = 60.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's own choice of GPUs away."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def fake(devices: int, **settings: Any) -> zc.Config:
    return zc.Config(gpu=f"fake:devices={devices}", **settings)


async def spawned(*args: Any, **options: Any) -> Any:
    return await Seer.options(**options).spawn(*args)


def sights(*uuids: str) -> Sights:
    """The sights of an actor that has these GPUs."""
    return ",".join(uuids), ",".join(uuids), list(uuids)


async def free_gpus() -> float:
    return (await zc.available_resources())["GPU"]


async def test_actors_have_gpus_of_their_own() -> None:
    uuids = host_uuids("devices=4")
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(4)):
        assert (await zc.cluster_resources())["GPU"] == 4
        one, two = await spawned(num_gpus=1), await spawned(num_gpus=2)
        assert await one.seen() == sights(uuids[0])
        assert await two.seen() == sights(uuids[1], uuids[2])
        assert (await (await spawned()).seen())[1:] == (os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        halves = [await spawned(num_gpus=0.5) for _ in range(2)]
        assert [await half.seen() for half in halves] == [sights(uuids[3])] * 2
        assert await free_gpus() == 0
        with pytest.raises(zc.InsufficientResources, match="5 GPU were asked for, but this node has 4"):
            await spawned(num_gpus=5)
        waiting = asyncio.ensure_future(spawned(num_gpus=2))
        await zc.kill(two)
        assert await (await waiting).seen() == sights(uuids[1], uuids[2])
        await zc.stop(one)
        assert await free_gpus() == 1


async def test_another_life_has_the_same_gpu() -> None:
    uuids = host_uuids("devices=2")
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(2)):
        first, second = await spawned(num_gpus=1, max_restarts=1), await spawned(num_gpus=0.4)
        with pytest.raises((zc.ActorDied, zc.ActorUnavailable)):
            await first.die()
        third = await spawned(num_gpus=0.4)
        assert await first.seen() == sights(uuids[0])
        assert await second.seen() == await third.seen() == sights(uuids[1])
        for actor in (first, second, third):
            with pytest.raises((zc.ActorDied, zc.ActorUnavailable)):
                await actor.die()
        assert await (await spawned(num_gpus=2)).seen() == sights(*uuids)


async def test_gpus_of_failed_starts_are_free() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(1)):
        for _ in range(3):
            with pytest.raises(ValueError, match="not today"):
                await spawned(True, num_gpus=1)
        with pytest.raises(ValueError, match="environment of an actor has"):
            await spawned(num_gpus=1, env={"LARGE": "x" * (4 << 20)})
        giving_up = asyncio.ensure_future(spawned(num_gpus=1))
        await asyncio.sleep(0)
        giving_up.cancel()
        await asyncio.wait([giving_up])
        assert (await (await spawned(num_gpus=1)).seen())[2] == host_uuids("")


async def test_the_environment_of_an_actor_prevails() -> None:
    uuids = host_uuids("devices=2")
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(2)):
        hidden = await spawned(num_gpus=1, env={"CUDA_VISIBLE_DEVICES": ""})
        assert await hidden.seen() == ("", "", [])
        other = await spawned(env={"CUDA_VISIBLE_DEVICES": "1"})
        assert await other.seen() == ("1", "1", uuids[1:])


async def test_a_node_offers_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = host_uuids("devices=3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{uuids[0]}")
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(3)):
        assert (await zc.cluster_resources())["GPU"] == 2
        assert await (await spawned(num_gpus=1)).seen() == sights(uuids[2])
        assert await (await spawned(num_gpus=1)).seen() == sights(uuids[0])
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(3, num_gpus=1)):
        assert (await zc.cluster_resources())["GPU"] == 1
        assert await (await spawned(num_gpus=0.5)).seen() == sights(uuids[2])
    with pytest.raises(ValueError, match=f"num_gpus=3, and this node sees 2 of them .{uuids[2]}, {uuids[0]}"):
        await zc.init(config=fake(3), num_gpus=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(3), num_gpus=3):
        assert await (await spawned(num_gpus=2)).seen() == ("", "", []), "GPUs that nobody knows are counted"


async def test_agent_and_zygote_open_no_gpu() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(1)):
        actor = await spawned(num_gpus=1)
        assert "zcactor-gpu" in await actor.maps()
        (node,) = await zc.nodes()
        zygotes = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        assert zygotes, "the zygote is a child of the agent"
        for pid in (node.pid, *zygotes):
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "zcactor-gpu" not in mapped and "libcuda" not in mapped


async def state_of(actor_id: str) -> zc.ActorInfo:
    return next(each for each in await zc.actors() if each.actor_id == actor_id)


async def test_a_broken_gpu_ends_the_actors_process() -> None:
    config = zc.Config(gpu="fake:fail=fatal:3")
    async with asyncio.timeout(PATIENCE), zc.init(config=config):
        actor: Any = await Breaker.options(num_gpus=1, max_restarts=1).spawn()
        (told,) = await zc.actors()
        assert await actor.works() == 30
        for life in (1, 2):
            with pytest.raises(zc.DeviceError, match="fail=fatal broke the context") as caught:
                await actor.works()
            assert caught.value.fatal
            if life == 1:
                while (info := await state_of(told.actor_id)).state != "alive" or not info.restarts:
                    await asyncio.sleep(0.01)
                assert info.pid != told.pid
                assert await actor.works() == 30, "another process has a context that works"
        while (await state_of(told.actor_id)).state != "dead":
            await asyncio.sleep(0.01)
        with pytest.raises(zc.ActorDied, match="ended itself: its GPU cannot be used: .* broke the context"):
            await actor.works()
        assert await free_gpus() == 1


async def test_a_broken_gpu_is_noticed_where_the_actor_goes_on() -> None:
    config = zc.Config(gpu="fake:fail=fatal")
    async with asyncio.timeout(PATIENCE), zc.init(config=config):
        actor: Any = await Breaker.spawn()
        assert await actor.works_on() == "fatal: True"
        (told,) = await zc.actors()
        while (await state_of(told.actor_id)).state != "dead":
            await asyncio.sleep(0.01)
        with pytest.raises(zc.ActorDied, match="ended itself: its GPU cannot be used"):
            await actor.works()


async def test_a_forked_child_of_an_actor_has_no_gpu() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=fake(1)):
        actor: Any = await Breaker.options(num_gpus=1).spawn()
        assert await actor.forks() == ["ForkedProcess"] * 5 + ["30"]
