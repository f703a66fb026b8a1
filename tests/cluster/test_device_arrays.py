"""Arrays on GPUs between hosts: the bytes, the copies that are counted, and the ends of either side in between.

The hosts are network namespaces, and each has fake GPUs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.test_namespaces import TOKEN, start_nodes
from tests.driver.programs import until
from tests.hosts.netns import Network, Program, missing
from zcactor.device.staging import PIECE_NBYTES

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

NBYTES = 4 * PIECE_NBYTES + 12_345
"""Bytes of an array: several pieces, the last of which is not whole."""
ACTORS = {"near": 0, "far": 1, "other": 1}
"""The actors, and the number of the host that each is on."""


class Cluster:
    """Two hosts with fake GPUs, and a program on the first with actors on both."""

    def __init__(self, driver: Program) -> None:
        self.ask = driver.ask
        self.nodes: list[str] = driver.ask("nodes")
        for name in ACTORS:
            self.spawn(name)

    def spawn(self, name: str) -> None:
        """Start an actor."""
        self.ask("spawn", name=name, node=self.nodes[ACTORS[name]])

    def until_idle(self, *names: str) -> None:
        """Wait until processes have given back everything; the program where no name is given."""
        for name in names or ("",):
            until(partial(self.ask, "idle", name=name), f"{name or 'the program'} to give everything back")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Network(2, direct=True) as hosts:
        settings = {"ZCACTOR_GPU": "fake"}
        head = start_nodes(hosts, **settings)
        script = str(Path(__file__).with_name("far_gpus.py"))
        with hosts[0].python(script, head, env={**TOKEN, **settings}) as driver:
            yield Cluster(driver)


def copied(cluster: Cluster, *names: str) -> list[list[int]]:
    """The arrays and bytes that each process has copied through host memory."""
    return [cluster.ask("copies", name=name) for name in names]


def test_bytes_come_through_the_memory_of_both_hosts(cluster: Cluster) -> None:
    path, proven, rejected = cluster.ask("path", name="far")
    assert (path, proven) == ("host", True)
    assert rejected == {
        "mapped": "memory of GPUs is mapped between processes of one host only",
        "gpudirect": "frames and arrays go by tcp, and network cards take part in RDMA only",
    }
    before = copied(cluster, "", "far", "near")
    cluster.ask("full", array="x", nbytes=NBYTES, value=3)
    assert cluster.ask("total", reader="far", array="x") == ["DeviceArray", 3 * NBYTES]
    (uuid,) = cluster.ask("uuids")
    assert cluster.ask("made", maker="far", array="y", nbytes=NBYTES, value=5) == ["DeviceArray", uuid, True]
    assert cluster.ask("sum", array="y") == 5 * NBYTES
    assert cluster.ask("total", reader="near", array="y") == ["DeviceArray", 5 * NBYTES]
    after = copied(cluster, "", "far", "near")
    more = [[now - then for now, then in zip(*each, strict=True)] for each in zip(after, before, strict=True)]
    assert more == [[2, 2 * NBYTES], [2, 2 * NBYTES], [0, 0]], "an array is copied once at each end, and mapped after"
    for array in "xy":
        cluster.ask("drop", array=array)
    cluster.until_idle("", "near", "far")


def test_bytes_go_from_actor_to_actor(cluster: Cluster) -> None:
    here, *before = copied(cluster, "", "near", "far", "other")
    assert cluster.ask("passed", maker="near", reader="far", nbytes=NBYTES, value=2) == ["DeviceArray", 2 * NBYTES]
    assert cluster.ask("passed", maker="far", reader="other", nbytes=NBYTES, value=4) == ["DeviceArray", 4 * NBYTES]
    now, *after = copied(cluster, "", "near", "far", "other")
    more = [after[each][1] - before[each][1] for each in range(3)]
    assert more == [NBYTES, NBYTES, 0]
    assert now == here
    cluster.until_idle("near", "far", "other")


@pytest.mark.parametrize("dies", ["near", "far"])
def test_an_end_in_the_middle_of_a_piece(cluster: Cluster, dies: str) -> None:
    """The reader's copies onto its GPU wait, so that pieces are on their way when one of the two dies."""
    lives = "far" if dies == "near" else "near"
    cluster.ask("hold", name="far")
    cluster.ask("begin", maker="near", reader="far", nbytes=NBYTES, value=6)
    until(lambda: cluster.ask("under_way", name="far"), "pieces to be under way")
    cluster.ask("kill", name=dies)
    if lives == "far":
        cluster.ask("let_go", name="far")
    assert cluster.ask("ended", reader="far") in ("ActorDied", "ObjectLost")
    cluster.until_idle(lives)
    cluster.spawn(dies)
    assert cluster.ask("passed", maker="near", reader="far", nbytes=NBYTES, value=1) == ["DeviceArray", NBYTES]
    cluster.until_idle("near", "far")


def test_nothing_is_left(cluster: Cluster) -> None:
    cluster.until_idle("", *ACTORS)
