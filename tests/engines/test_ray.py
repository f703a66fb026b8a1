"""Clusters on a real Ray cluster of two nodes, which all tests share. `make test-engines` installs Ray."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.driver.programs import ROOT, until
from tests.engines.ray_user import PATIENCE, RayUser, missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def shared() -> Iterator[RayUser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with RayUser() as made:
        made.wait_for_ray()
        yield made
        made.end_ray()


@pytest.fixture
def user(shared: RayUser) -> Iterator[RayUser]:
    """The user, after whose test no node is left."""
    yield shared
    if shared.engine.poll() is None:
        until(lambda: not shared.agents(), "nodes to end", PATIENCE)


def test_a_cluster(user: RayUser) -> None:
    text = user.succeeds("""
async def main():
    async with on_ray([{"CPU": 2}, {"CPU": 1}], name="one") as cluster:
        nodes = await zc.nodes()
        print("nodes", cluster.nodes, sorted(node.resources["CPU"] for node in nodes))
        print("ready", cluster.address, groups())
        actors = [await Sum.options(node=node.node_id).spawn(f"closed-{i}") for i, node in enumerate(nodes)]
        print("sums", [await actor.of(np.ones(100_000)) for actor in actors])
        await until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] - 3)
    print("left", ray.is_initialized())

zc.run(main())
""")
    assert "nodes 2 [1.0, 2.0]" in text
    assert "['zcactor:one']" in text
    assert "sums [100000.0, 100000.0]" in text
    assert "left False" in text
    assert user.closed() == ["closed-0", "closed-1"]


def test_what_is_refused(user: RayUser) -> None:
    text = user.succeeds("""
async def refused(**arguments):
    try:
        async with on_ray(**arguments): print("not refused")
    except (zc.ZcactorError, ValueError) as error:
        print(type(error).__name__, error)

async def main():
    ray.init(address="auto")
    await refused(bundles=[{"CPU": 1}, {"CPU": 100}], timeout=1.0)
    async with on_ray([{"CPU": 1}], name="two", join=False):
        await refused(bundles=[{"CPU": 1}], name="two")
        await refused(bundles=[{"CPU": 1}], timeout=0.0)
        print("groups", groups())
    await until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])
    print("groups", groups(), ray.is_initialized())

zc.run(main())
""")
    assert "InsufficientResources the Ray cluster had no room within 1 s for [{'CPU': 1}, {'CPU': 100}]" in text
    assert re.search(r"it has \d+ CPU", text)
    assert "NameTaken on this Ray cluster a living program has 'zcactor:two'" in text
    assert "ValueError on_ray: timeout is 0.0" in text
    assert "groups ['zcactor:two']" in text
    assert "groups [] True" in text
    assert "not refused" not in text


def test_cancelled(user: RayUser) -> None:
    text = user.succeeds("""
async def hold(inside):
    async with on_ray([{"CPU": 1}], name="three"):
        nodes = await zc.nodes()
        actor = await Sum.spawn("closed-cancelled")
        await actor.of(np.ones(3))
        inside.set()
        await asyncio.Event().wait()

async def wait():
    async with on_ray([{"CPU": 100}]): print("not cancelled")

async def main():
    ray.init(address="auto")
    inside = asyncio.Event()
    task = asyncio.create_task(hold(inside))
    await inside.wait()
    task.cancel()
    await asyncio.wait([task])
    print(task.cancelled(), groups(), os.path.exists("closed-cancelled"))
    task = asyncio.create_task(wait())
    await until(groups)
    task.cancel()
    await asyncio.wait([task])
    print(task.cancelled(), groups())

zc.run(main())
""")
    assert text.endswith("True [] True\nTrue []\n")
    assert "not cancelled" not in text


def test_what_is_left_is_swept(user: RayUser) -> None:
    text = user.succeeds("""
async def main():
    ray.init(address="auto")
    for name in ("zcactor:left", "zcactor:again", "foreign"):
        ray.util.placement_group([{"CPU": 1}], name=name, lifetime="detached")
    async with on_ray([{"CPU": 1}], name="again", join=False):
        print("before", groups())
        print("swept", await sweep_ray())
        print("after", groups())
    print(await sweep_ray(), groups())
    ray.util.remove_placement_group(ray.util.get_placement_group("foreign"))

zc.run(main())
""")
    assert "before ['foreign', 'zcactor:again', 'zcactor:left']" in text
    assert "swept ['zcactor:left']" in text
    assert "after ['foreign', 'zcactor:again']" in text
    assert "[] ['foreign']" in text


def test_a_driver_that_is_killed(user: RayUser) -> None:
    source = """
async def main():
    async with on_ray([{"CPU": 1}] * 2, name="killed"):
        print("up", flush=True)
        await asyncio.Event().wait()

zc.run(main())
"""
    process = user.begin(source)
    user.says("up")
    assert len(user.agents()) >= 2
    process.kill()
    process.wait()
    until(lambda: not user.agents(), "nodes to end", PATIENCE)
    text = user.succeeds("""
async def main():
    ray.init(address="auto")
    while True:  # until Ray has noticed
        try:
            async with on_ray([{"CPU": 1}] * 2, name="killed") as cluster:
                print("again", cluster.nodes, groups())
                return
        except zc.NameTaken:
            await asyncio.sleep(0.1)

zc.run(main())
""")
    assert "again 2 ['zcactor:killed']" in text


LOSS = """
async def main():
    async with on_ray([{"CPU": 1}, {"CPU": 1, "extra": 1}]):
        first = {node.node_id: node for node in await zc.nodes()}
        print("up", *(node.pid for node in first.values() if "extra" in node.resources), flush=True)
        def lost(nodes): return len(set(first) & {node.node_id for node in nodes}) == 1
        def back(nodes): return any("extra" in n.resources and n.node_id not in first and n.alive for n in nodes)
        for what, condition in (("lost", lost), ("back", back)):
            while not condition([node for node in await zc.nodes() if node.alive]): await asyncio.sleep(0.05)
            print(what, flush=True)
        actor = await Sum.options(resources={"extra": 1}).spawn()
        print("sum", await actor.of(np.ones(10)), flush=True)

zc.run(main())
"""


def test_a_node_that_is_lost(user: RayUser) -> None:
    user.tell("add")
    process = user.begin(LOSS)
    user.says("up")
    user.tell("remove")
    user.says("lost")
    user.tell("add")
    user.says("back")
    assert process.wait(PATIENCE) == 0, user.text()
    assert "sum 10.0" in user.text()
    user.tell("remove")


def test_an_agent_that_is_killed(user: RayUser) -> None:
    user.tell("add")
    process = user.begin(LOSS)
    user.says("up")
    found = until(lambda: re.search(r"up (\d+)\n", user.text()), "the pid", PATIENCE)
    os.kill(int(found[1]), signal.SIGKILL)
    assert process.wait(PATIENCE) == 0, user.text()
    assert "sum 10.0" in user.text()
    user.tell("remove")


def test_the_example(user: RayUser) -> None:
    example = str(ROOT / "examples" / "ray_arrays.py")
    status = user.start(sys.executable, example, "--size", "4MiB", "--rounds", "3").wait(PATIENCE)
    text = user.text()
    assert status == 0, text
    assert re.search(r"median of 3:\nby Ray +[\d.]+ ms\nby zcactor +[\d.]+ ms, [\d.]+ times as fast", text)
