"""The calls to Ray and their order, with a fake of it; tests/engines/test_ray.py has the real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import zcactor as zc
from tests.cluster.fake_ray import FakeRay
from zcactor.cluster.ray import HostAnswer, on_ray, sweep_ray

TOKEN = "ab" * 32


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr("zcactor.cluster.ray.RayCalls", fake)
    monkeypatch.setenv("ZCACTOR_TOKEN", TOKEN)
    monkeypatch.delenv("ZCACTOR_TOKEN_FILE", raising=False)
    monkeypatch.setenv("ZCACTOR_SHUTDOWN_TIMEOUT", "0.5")
    return fake


ENDED = ["kill 0", "kill 1", "remove new", "kill zcactor:x", "disconnect"]


async def test_a_cluster_from_its_beginning_to_its_end(ray: FakeRay) -> None:
    ray.groups_by_id["old"] = "zcactor:x"
    ray.groups_by_id["other"] = "zcactor:y"
    async with on_ray([{"CPU": 4, "GPU": 0}, {"CPU": 1, "fast": 0.5}], name="x", address="auto", join=False) as cluster:
        assert cluster == zc.cluster.EngineCluster("10.0.0.0:7433", 2)
        assert [host.bundle for host in ray.hosts] == [{"CPU": 4}, {"CPU": 1, "fast": 0.5}]
        assert {host.token for host in ray.hosts} == {bytes.fromhex(TOKEN)}
        assert ray.hosts[1].settings["shutdown_timeout"] == 0.5
        assert ray.hosts[1].settings["address"] is None
        ray.log.append("inside")
    begin = ["connect auto", "claim zcactor:x", "remove old", "group zcactor:x SPREAD 2", "inside"]
    assert ray.log == [*begin, "leave 0", "leave 1", "end 0", "end 1", *ENDED]
    assert ray.groups_by_id == {"other": "zcactor:y"}


async def test_a_program_that_is_connected_stays_so(ray: FakeRay) -> None:
    ray.connected = True
    async with on_ray([{"CPU": 1}], join=False):
        pass
    assert "disconnect" not in ray.log


async def test_names_are_new_ones(ray: FakeRay) -> None:
    async with on_ray([{"CPU": 1}], join=False), on_ray([{"CPU": 1}], join=False):
        assert len(ray.taken) == 2
        assert all(name.startswith("zcactor:") for name in ray.taken)
    assert not ray.taken


async def test_no_room(ray: FakeRay) -> None:
    ray.room = False
    with pytest.raises(zc.InsufficientResources, match="no room within 0.01 s for .*4.* by PACK: it has nothing"):
        async with on_ray([{"CPU": 4}], "PACK", timeout=0.01, join=False):
            pass
    assert not ray.groups_by_id
    assert not ray.taken


async def test_a_node_that_does_not_come(ray: FakeRay) -> None:
    ray.missing = frozenset({1})
    with pytest.raises(zc.ConnectionLost, match="no node in bundle 1 within 0.01 s; joined: 1 of 2"):
        async with on_ray([{"CPU": 4}] * 2, name="x", timeout=0.01, join=False):
            pass
    assert ray.log[-7:] == ["leave 0", "end 0", *ENDED]


@pytest.mark.parametrize("kind", [zc.VersionMismatch, zc.AuthenticationError, zc.ConnectionLost, OSError])
async def test_a_node_that_cannot_start(ray: FakeRay, kind: type[Exception]) -> None:
    ray.problem = HostAnswer(kind=kind.__name__, text="the reason")
    expected: Any = zc.ConnectionLost if kind is OSError else kind
    with pytest.raises(expected, match="bundle 1: the reason"):
        async with on_ray([{"CPU": 4}] * 2, name="x", join=False):
            pass
    assert ray.log[-5:] == ENDED


async def test_a_name_that_is_taken(ray: FakeRay) -> None:
    async with on_ray([{"CPU": 1}], name="x", join=False):
        with pytest.raises(zc.NameTaken):
            async with on_ray([{"CPU": 1}], name="x", join=False):
                pass
        assert ray.groups_by_id == {"new": "zcactor:x"}
        assert ray.taken == {"zcactor:x"}


async def test_cancelled_while_it_waits_for_room(ray: FakeRay) -> None:
    ray.room = False

    async def enter() -> None:
        async with on_ray([{"CPU": 1}], join=False):
            pass

    task = asyncio.create_task(enter())
    await asyncio.to_thread(ray.asked.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ray.groups_by_id
    assert not ray.taken


async def test_cancelled_while_nodes_end(ray: FakeRay) -> None:
    ray.endless = True
    entered = asyncio.Event()

    async def enter() -> None:
        async with on_ray([{"CPU": 1}] * 2, name="x", join=False):
            entered.set()

    task = asyncio.create_task(enter())
    await entered.wait()
    while "end 0" not in ray.log:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ray.log[-5:] == ENDED


async def test_the_sweep(ray: FakeRay) -> None:
    ray.groups_by_id = {"1": "zcactor:a", "2": "zcactor:b", "3": "foreign", "4": "zcactor:ab"}
    ray.taken = {"zcactor:b"}
    assert await sweep_ray("zcactor:a") == ["zcactor:a", "zcactor:ab"]
    assert ray.groups_by_id == {"2": "zcactor:b", "3": "foreign"}
    assert ray.log == ["connect None", "remove 1", "remove 4", "disconnect"]
    with pytest.raises(ValueError, match="begins with 'zcactor:'"):
        await sweep_ray("")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundles": []}, "bundles is empty"),
        ({"bundles": [{"CPU": 1}, {}]}, "bundle 1 is empty"),
        ({"bundles": [{"CPU": 0}]}, "bundle 0 is empty"),
        ({"bundles": [{"CPU": 0.5}]}, "bundle 0 has 0.5 CPU: a node offers a whole number"),
        ({"bundles": [{"CPU": 1, "x": -1}]}, "bundle 0 has 'x': -1; amounts are numbers"),
        ({"bundles": [{"CPU": "4"}]}, "bundle 0 has 'CPU': '4'"),
        ({"bundles": [{"CPU": 1}], "strategy": "spread"}, "unknown strategy 'spread'; valid ones: PACK"),
        ({"bundles": [{"CPU": 1}], "name": ""}, "name is empty"),
        ({"bundles": [{"CPU": 1}], "timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_ray(**arguments)
