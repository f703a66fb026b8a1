"""Choosing a port and proving it, on the fake fabric."""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.transport.verbs.parts import engine_on
from zcactor.config import MAX_VERBS_EAGER_LIMIT
from zcactor.transport.verbs.device.sizing import DEPTH, SEND_REQUESTS, pinned_nbytes
from zcactor.transport.verbs.device.versions import SEALS_NBYTES
from zcactor.transport.verbs.device.viability import (
    NotViable,
    Viable,
    choose_gid,
    look_again,
    memlock_limit,
    viability,
    viable_ports,
)
from zcactor.transport.verbs.driver.base import CompletionQueue, Gid, Marking, SharedReceiveQueue
from zcactor.transport.verbs.driver.bindings import Absent, Reason
from zcactor.transport.verbs.driver.codes import CompletionStatus, LinkLayer, PortState
from zcactor.transport.verbs.driver.fake import FakeBinding, FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import INLINE_LIMITS
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

ARENA = 1 << 30


def gid(index: int, text: str, *, v2: bool = True) -> Gid:
    """An entry of a table of addresses."""
    return Gid(index, ipaddress.IPv6Address(text).packed, v2, "eth0")


def unlimited() -> None:
    """The answer of a system without a limit on pinned bytes."""


def check(binding: FakeBinding, **kwargs: object) -> Viable | NotViable:
    """The answer of `viability`; checks that everything it opened is closed."""
    answer = viability(binding, arena_nbytes=ARENA, **{"memlock": unlimited, **kwargs})
    assert all(device.closed and len(device.ledger) == 0 for device in binding.opened)
    return answer


def refused(answer: Viable | NotViable) -> NotViable:
    """Check that the answer is a refusal with a fix."""
    assert isinstance(answer, NotViable)
    assert answer.fix
    return answer


def test_viable(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0")
    answer = check(fabric.binding())
    assert isinstance(answer, Viable)
    assert (answer.binding, answer.device, answer.port) == ("fake", "mlx5_0", nic.port)
    assert answer.gid is not None
    assert answer.gid.address == "10.77.0.1"
    assert answer.is_global
    assert fabric.statistics().bytes_read == 4096
    assert nic.pinned == 0


def test_address_decides_between_devices(fabric: FakeFabric) -> None:
    fabric.add_nic("a", "10.0.0.1")
    fabric.add_nic("b", "192.168.3.4")
    for address, device in (("192.168.3.4", "b"), ("10.0.0.1", "a"), ("10.9.9.9", "a"), ("node7", "a")):
        answer = check(fabric.binding(), local_address=address)
        assert isinstance(answer, Viable)
        assert answer.device == device


def test_the_nearest_card_comes_first(fabric: FakeFabric) -> None:
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")):
        fabric.add_nic(name, address)
    near = {"a": 2, "b": 5, "c": 5}
    found = viable_ports(
        fabric.binding(), arena_nbytes=ARENA, local_address="10.0.0.3", memlock=unlimited, near=near.__getitem__
    )
    assert not isinstance(found, NotViable)
    assert [port.device for port in found] == ["c", "b", "a"]


def test_one_port_where_the_arena_can_be_pinned_once(fabric: FakeFabric) -> None:
    for name in "abc":
        fabric.add_nic(name)
    needed = pinned_nbytes(ARENA)
    for limit, count in ((needed, 1), (2 * needed - 1, 1), (2 * needed, 2), (9 * needed, 3)):
        found = viable_ports(fabric.binding(), arena_nbytes=ARENA, memlock=partial(int, limit))
        assert not isinstance(found, NotViable) and len(found) == count


def test_device_and_gid_can_be_named(fabric: FakeFabric) -> None:
    fabric.add_nic("a")
    fabric.add_nic("b")
    answer = check(fabric.binding(), device="b", port=1, gid_index=0)
    assert isinstance(answer, Viable)
    assert (answer.device, answer.gid and answer.gid.index) == ("b", 0)
    assert "'c'" in refused(check(fabric.binding(), device="c")).reason
    assert "with index 7" in refused(check(fabric.binding(), gid_index=7)).reason
    assert "ports 1 to 1" in refused(check(fabric.binding(), port=2)).reason


def test_infiniband(fabric: FakeFabric) -> None:
    fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    answer = check(fabric.binding())
    assert isinstance(answer, Viable)
    assert answer.gid is None
    assert not answer.is_global


def test_infiniband_without_a_subnet_manager(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    nic.port = replace(nic.port, lid=0)
    assert "opensm" in refused(check(fabric.binding())).fix


def test_iwarp(fabric: FakeFabric) -> None:
    fabric.add_nic("a").iwarp = True
    answer = refused(check(fabric.binding()))
    assert "a port 1 speaks iWARP" in answer.reason and "enable_roce" in answer.fix
    fabric.add_nic("b")
    found = check(fabric.binding())
    assert isinstance(found, Viable) and found.device == "b"


def test_no_library() -> None:
    absent = Absent((Reason("pyverbs", "not installed", "apt"), Reason("ibverbs", "not installed", "pip")))
    answer = refused(viability(absent, arena_nbytes=ARENA))
    assert answer.reason == "pyverbs: not installed; ibverbs: not installed"
    assert answer.fix == "apt"


def test_no_device(fabric: FakeFabric) -> None:
    assert "no RDMA device" in refused(check(fabric.binding())).reason


def test_port_is_down(fabric: FakeFabric) -> None:
    fabric.add_nic("a", state=PortState.DOWN)
    assert "a port 1 is DOWN" in refused(check(fabric.binding())).reason
    fabric.add_nic("b")
    answer = check(fabric.binding())
    assert isinstance(answer, Viable)
    assert answer.device == "b"


def test_no_gid(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("a")
    nic.gids = nic.gids[:1]
    answer = refused(check(fabric.binding()))
    assert "no usable RoCE v2 GID" in answer.reason
    assert "ip addr add" in answer.fix


@pytest.mark.parametrize("link_layer", [LinkLayer.ETHERNET, LinkLayer.INFINIBAND])
def test_partitions(fabric: FakeFabric, link_layer: LinkLayer) -> None:
    nic = fabric.add_nic("a", link_layer=link_layer)
    nic.partitions = (0xFFFF, 0x7FFE, 0x8123)
    found = check(fabric.binding(), marking=Marking(pkey_index=2))
    assert isinstance(found, Viable) and found.partition == 0x8123 and found.marking.pkey_index == 2
    answer = refused(check(fabric.binding(), marking=Marking(pkey_index=1)))
    assert "a port 1 has only limited membership of partition 0x7ffe at index 1" in answer.reason
    answer = refused(check(fabric.binding(), marking=Marking(pkey_index=3)))
    assert "a port 1 has no partition key at index 3" in answer.reason
    assert "set pkey_index in verbs" in answer.fix and "/sys/class/infiniband/a/ports/1/pkeys/*" in answer.fix


def test_roce_without_a_table_of_partitions(fabric: FakeFabric) -> None:
    fabric.add_nic("a").partitions = (0,)
    found = check(fabric.binding())
    assert isinstance(found, Viable) and found.partition == 0xFFFF


def test_memlock(fabric: FakeFabric) -> None:
    fabric.add_nic("a")
    answer = refused(check(fabric.binding(), memlock=lambda: 8 << 20))
    needed = pinned_nbytes(ARENA)
    assert f"8,388,608 bytes and the arena needs {needed:,} with one peer's slots" in answer.reason
    assert needed > ARENA + SEALS_NBYTES + 2 * DEPTH * MAX_VERBS_EAGER_LIMIT
    assert "ulimit -l" in answer.fix
    assert "limits.conf" in answer.fix
    refused(check(fabric.binding(), memlock=lambda: needed - 1))
    found = check(fabric.binding(), memlock=lambda: needed)
    assert isinstance(found, Viable) and found.memlock == needed


def test_memlock_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    limits = (8 << 20, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    first, other = tmp_path / "first", tmp_path / "other"
    first.write_text("         0          0 4294967295\n")
    other.write_text("         0       1000          1\n         1     100000      65536\n")
    assert memlock_limit(status, first) is None
    assert memlock_limit(status, tmp_path / "a kernel without user namespaces") is None
    assert memlock_limit(status, other) == 8 << 20, "the kernel asks for the capability in the first user namespace"
    for text in ("CapEff:\t0000003fffffbfff\n", "", "CapEff:\tnonsense\n"):
        status.write_text(text)
        assert memlock_limit(status, first) == 8 << 20
    assert memlock_limit(tmp_path / "missing") == 8 << 20
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert memlock_limit(tmp_path / "missing") is None


def test_choose_gid() -> None:
    table = [
        gid(0, "fe80::1"),
        gid(1, "::ffff:10.0.0.1", v2=False),
        gid(2, "::ffff:10.0.0.1"),
        gid(3, "2001:db8::1"),
        gid(5, "::ffff:10.0.0.2"),
    ]
    for address, index in (
        ("10.0.0.2", 5),
        ("::ffff:10.0.0.2", 5),
        ("2001:DB8:0::1", 3),
        ("fe80::1%eth0", 0),
        ("10.0.0.9", 2),
        ("", 2),
        ("host.example", 2),
    ):
        chosen = choose_gid(table, address)
        assert chosen is not None
        assert chosen.index == index, address
    assert choose_gid(table[:2]) is None


# ---- a port that was found before


def test_looking_again(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("a")
    found = check(fabric.binding())
    assert isinstance(found, Viable) and found.gid is not None
    device = fabric.binding().open("a")
    assert look_again(device, found) == found
    better = gid(0, "::ffff:10.9.9.9")
    nic.gids = (better, *nic.gids[1:])
    assert look_again(device, found) == found, "it keeps the address that it had"
    nic.gids = (better,)
    now = look_again(device, found)
    assert isinstance(now, Viable) and now.gid == better and now.needed == found.needed
    assert not now.has_address_of(found) and now.address == "GID 0 (10.9.9.9)"
    nic.gids = (replace(found.gid, index=7),)
    now = look_again(device, found)
    assert isinstance(now, Viable) and not now.has_address_of(found), "what is connected names it by its place"
    nic.gids = ()
    assert "no usable RoCE v2 GID" in refused(look_again(device, found)).reason
    nic.set_active(False)
    assert "a port 1 is DOWN" in refused(look_again(device, found)).reason


def test_looking_again_at_what_was_asked_for(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("a", "10.0.0.1")
    found = check(fabric.binding(), gid_index=1, local_address="10.0.0.1")
    assert isinstance(found, Viable)
    device = fabric.binding().open("a")
    nic.gids = (gid(2, "::ffff:10.0.0.1"),)
    assert "with index 1" in refused(look_again(device, found)).reason
    found = replace(found, gid_index=None)
    nic.gids = (gid(2, "::ffff:10.0.0.9"), gid(3, "::ffff:10.0.0.1"))
    now = look_again(device, found)
    assert isinstance(now, Viable) and now.gid == nic.gids[1]


def test_looking_again_by_lid(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    found = check(fabric.binding())
    assert isinstance(found, Viable) and found.address == "LID 1"
    device = fabric.binding().open("ib0")
    now = look_again(device, found)
    assert isinstance(now, Viable) and now.has_address_of(found)
    nic.port = replace(nic.port, lid=9)
    now = look_again(device, found)
    assert isinstance(now, Viable) and not now.has_address_of(found) and now.address == "LID 9"


def test_looking_again_at_a_device_that_does_not_answer(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.add_nic("a")
    found = check(fabric.binding())
    assert isinstance(found, Viable)
    device = fabric.binding().open("a")
    monkeypatch.setattr(device, "port", raising(OSError(5, "gone")))
    assert "cannot be asked for its state: [Errno 5] gone" in refused(look_again(device, found)).reason


# ---- the proof


def test_proof_fails(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.add_nic("a")
    monkeypatch.setattr(fabric, "_attempt", lambda *_: CompletionStatus.RETRY_EXC)
    answer = refused(check(fabric.binding()))
    assert "a port 1 with GID 1 (10.77.0.1): a READ of 4096 bytes from itself failed: RETRY_EXC (12)" in answer.reason


def test_proof_delivers_garbage(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.add_nic("a")
    monkeypatch.setattr(fabric, "_attempt", lambda *_: CompletionStatus.SUCCESS)
    assert "delivered other bytes" in refused(check(fabric.binding())).reason


@pytest.mark.slow
def test_proof_hangs() -> None:
    fabric = FakeFabric(manual=True)
    fabric.add_nic("a")
    seconds = iter([0.0, 1.0, 9.9, 10.1])
    answer = refused(check(fabric.binding(), proof_seconds=10.0, clock=lambda: next(seconds), memlock=unlimited))
    assert "did not complete in 10 s" in answer.reason


@pytest.mark.parametrize("limit", INLINE_LIMITS)
async def test_the_proof_makes_the_queue_pairs_of_connections(fabric: FakeFabric, limit: int) -> None:
    fabric.add_nic("a", max_inline=limit)
    asked: list[tuple[bool, dict[str, int]]] = []
    make = FakeDevice.create_queue_pair

    def create(device: FakeDevice, cq: CompletionQueue, srq: SharedReceiveQueue | None, **sizes: int) -> FakeQueuePair:
        asked.append((srq is not None, sizes))
        return make(device, cq, srq, **sizes)

    with engine_on(fabric, "a") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDevice, "create_queue_pair", create)
        assert isinstance(check(fabric.binding()), Viable)
        proof, asked[:] = list(asked), []
        QueuePairs(engine, 1024).close()
        assert proof == asked


def test_queues_that_are_too_short_for_a_connection(fabric: FakeFabric) -> None:
    nic = fabric.add_nic("a")
    nic.attributes = replace(nic.attributes, max_qp_wr=SEND_REQUESTS - 1)
    assert f"max_send_wr is {SEND_REQUESTS}" in refused(check(fabric.binding())).reason


def test_registration_fails(fabric: FakeFabric) -> None:
    fabric.add_nic("a", pin_limit=4096)
    assert "ulimit -l" in refused(check(fabric.binding())).reason


def test_next_candidate_is_tried(fabric: FakeFabric) -> None:
    fabric.add_nic("a", pin_limit=0)
    fabric.add_nic("b")
    answer = check(fabric.binding())
    assert isinstance(answer, Viable)
    assert answer.device == "b"


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises."""

    def call(*_: object) -> None:
        raise error

    return call


def test_devices_that_cannot_be_listed_or_opened(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.add_nic("a")
    binding = fabric.binding()
    monkeypatch.setattr(binding, "open", raising(PermissionError(13, "Permission denied")))
    assert "a cannot be opened: [Errno 13]" in refused(check(binding)).reason
    monkeypatch.setattr(binding, "devices", raising(OSError(38, "Function not implemented")))
    assert "cannot be listed" in refused(check(binding)).reason
