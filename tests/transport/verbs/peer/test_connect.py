"""A step of joining fails: both ends stay with TCP, and know why."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance.connection import Side, turns
from tests.transport.verbs.parts import arena
from tests.transport.verbs.sides import device_of, endpoint_of, engine_of, fake_sides, fell_back, joined, works
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer import connect as joining
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs


@pytest.mark.parametrize("number", [0, 1])
async def test_device_without_memory_for_a_connection(sides: tuple[Side, Side], number: int) -> None:
    for side in sides:
        assert endpoint_of(side).open_engine() is not None
    nic = device_of(sides[number]).nic
    nic.pin_limit = nic.pinned
    reasons = ["the peer cannot use RDMA: queue pairs cannot be made"] * 2
    reasons[number] = "queue pairs cannot be made"
    await fell_back(sides, *reasons)


@pytest.mark.parametrize("number", [0, 1])
async def test_cable_is_out(sides: tuple[Side, Side], fabric: FakeFabric, number: int) -> None:
    for side in sides:
        endpoint_of(side).open_engine()
    fabric.nics[f"fake{number}"].set_active(False)
    await fell_back(sides, "RETRY_EXC", "RETRY_EXC")


def at_step(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, act: Callable[[Any], None], *, on: str) -> None:
    """Run `act` before method `name` of `cls` does its work, on the device of that name only."""
    original = getattr(cls, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = self if isinstance(self, QueuePairs) else self.pairs
        if pairs.engine.device.name == on:
            act(pairs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, replaced)


@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_connecting_fails(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    def fail(_: QueuePairs) -> None:
        raise OSError(101, "Network is unreachable")

    at_step(monkeypatch, QueuePairs, "connect", fail, on=on)
    reasons = ["at the peer: the queue pairs cannot be connected"] * 2
    reasons[on == "fake1"] = "the queue pairs cannot be connected"
    await fell_back(sides, *reasons)


@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_proof_delivers_other_bytes(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    def spoil(pairs: QueuePairs) -> None:
        pairs.engine._proof[17] ^= 1

    at_step(monkeypatch, QueuePairs, "connect", spoil, on=on)  # before the peer READs it
    await fell_back(sides, "delivered other bytes", "delivered other bytes")


@pytest.mark.slow
@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_device_dies_at_the_proof(
    sides: tuple[Side, Side], fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    at_step(monkeypatch, VerbsConnection, "prove", lambda pairs: fabric.kill(pairs.engine.device), on=on)
    async with joined(sides) as pair:
        assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
        assert "verbs" in pair.left.rejected and "verbs" in pair.right.rejected
        await works(pair)


@pytest.mark.parametrize("ended", [False, True], ids=["ending", "ended"])
@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_a_connection_that_ends_before_it_has_its_socket(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, on: str, ended: bool
) -> None:
    """The peer's last message may come before its verdict is read."""
    original, socks = VerbsConnection.adopt, []

    def adopt(self: VerbsConnection, sock: socket.socket) -> None:
        if self.pairs.engine.device.name == on:
            socks.append(sock)
            self.abort()
            if ended:
                self.pairs.engine.poll_now()
        original(self, sock)

    monkeypatch.setattr(VerbsConnection, "adopt", adopt)
    async with joined(sides):
        await turns(20)
    assert [sock.fileno() for sock in socks] == [-1]
    assert [engine_of(side).connections for side in sides] == [0, 0]


async def test_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests neither succeed nor fail: the time limit decides."""
    monkeypatch.setattr(joining, "PROOF_SECONDS", 0.05)
    fabric = FakeFabric()
    with fake_sides(fabric) as sides:
        for side in sides:
            endpoint_of(side).open_engine()
        fabric.manual = True
        async with joined(sides) as pair:
            assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
            assert "neither a message nor a READ got through in 0.05 s" in pair.left.rejected["verbs"]
            await works(pair)
        fabric.manual = False
        fabric.posted()
        await turns(20)


@pytest.mark.parametrize("what", [{"max_cqe": 6}, {"max_qp_wr": 2}, {"max_srq_wr": 0}], ids=str)
async def test_a_device_that_cannot_be_used_is_closed(what: dict[str, int]) -> None:
    fabric = FakeFabric()
    nic = fabric.add_nic("fake0")
    nic.attributes = replace(nic.attributes, **what)
    binding = fabric.binding("fake0")
    with arena() as memory:
        found = joining.open_ports(
            binding, memory, device=None, port=None, gid_index=None, local_address="", eager_limit=4096
        )
        if isinstance(found, str):
            assert "fake0" in found
        else:  # such limits are met when a connection is made
            for engine in found.engines:
                engine.close()
    assert binding.opened and all(device.closed for device in binding.opened)
