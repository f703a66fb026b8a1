"""Two processes join RDMA, or stay with TCP: both make the same choice, with its reason, after any failure."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.connection import ConnectedPair, Recorder, Side, send, turns
from tests.transport.tcp_arena import tcp_side
from tests.transport.verbs.sides import (
    device_of,
    endpoint_of,
    engine_of,
    fake_sides,
    fell_back,
    joined,
    sealed_sides,
    verbs_side,
    watch,
    works,
)
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.record_layer import SealedSocket
from zcactor.transport.stream.tls import load_tls
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.tls_connection import TlsConnection
from zcactor.transport.verbs.driver.base import Marking
from zcactor.transport.verbs.driver.bindings import Absent
from zcactor.transport.verbs.driver.codes import EventType, LinkLayer
from zcactor.transport.verbs.driver.fake import FakeBinding, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import FakeNic
from zcactor.transport.verbs.peer import ports
from zcactor.transport.verbs.peer.connection import VerbsConnection


async def test_both_can(sides: tuple[Side, Side], fabric: FakeFabric) -> None:
    async with joined(sides) as pair:
        assert isinstance(pair.left, VerbsConnection) and isinstance(pair.right, VerbsConnection)
        assert pair.left.rejected == pair.right.rejected == {}
        await works(pair)
    assert (fabric.statistics().rnr, fabric.statistics().retries) == (0, 0)


async def test_several_peers_share_one_engine(sides: tuple[Side, Side]) -> None:
    async with joined(sides) as pair:
        again = await sides[0].endpoint.connect(sides[1].endpoint.address)
        assert again.kind == "verbs"
        assert engine_of(sides[0]).connections == engine_of(sides[1]).connections == 2
        again.abort()
        (await pair.accepted.get()).abort()


@pytest.mark.parametrize("able", [True, False])
async def test_what_goes_through_the_socket_is_sealed(fabric: FakeFabric, able: bool) -> None:
    fabric.add_nic("fake0")
    fabric.add_nic("fake1")
    name = "fake1" if able else "none"
    with (
        verbs_side(lambda: fabric.binding("fake0"), sealing=True) as left,
        verbs_side(lambda: FakeBinding(fabric, (name,)), sealing=True) as right,
    ):
        async with joined((left, right)) as pair:
            assert pair.left.kind == pair.right.kind == ("verbs" if able else "tcp")
            for connection in (pair.left, pair.right):
                if isinstance(connection, VerbsConnection):
                    assert connection._link is not None and isinstance(connection._link._sock, SealedSocket)
                else:
                    assert isinstance(connection, TcpConnection) and connection.sealed
            await works(pair)
            right.arena[:5] = b"bytes"
            await pair.left.pull(RemoteRegion(1, 0, 5), left.address, left)
            assert bytes(left.arena[:5]) == b"bytes"


async def test_no_text_of_a_frame_is_in_a_slot(fabric: FakeFabric) -> None:
    seen: list[bytes] = []
    with sealed_sides(fabric) as sides:
        async with joined(sides) as pair:
            for connection in (pair.left, pair.right):
                assert isinstance(connection, VerbsConnection) and connection.seals_payloads
                watch(connection, lambda view, nbytes: seen.append(bytes(view[:nbytes])))
            await works(pair)
            for name in (b"there", b"back"):
                assert not any(name in message for message in seen)
    assert len(seen) >= 2


@pytest.mark.parametrize("place", ["length", "text", "tag"])
async def test_a_message_that_was_changed_ends_the_connection_and_is_not_delivered(
    fabric: FakeFabric, place: str
) -> None:
    def change(view: memoryview, nbytes: int) -> None:
        view[{"length": 0, "text": nbytes // 2, "tag": nbytes - 1}[place]] ^= 1

    with sealed_sides(fabric) as sides:
        async with joined(sides) as pair:
            left, right = Recorder(), Recorder()
            pair.left.start(left)
            pair.right.start(right)
            send(pair.left, [b"as it was"])
            assert await right.wait_frames(1) == [b"as it was"]
            assert isinstance(pair.right, VerbsConnection)
            watch(pair.right, change)
            send(pair.left, [b"changed"])
            assert isinstance(await right.wait_lost(), ProtocolError)
            assert right.frames == [b"as it was"]
            assert isinstance(await left.wait_lost(), ConnectionLost)


@pytest.mark.parametrize("first", [True, False])
async def test_one_end_that_wants_sealed_messages_is_enough(fabric: FakeFabric, first: bool) -> None:
    fabric.add_nic("fake0")
    fabric.add_nic("fake1")
    with (
        verbs_side(lambda: fabric.binding("fake0"), sealing=first) as left,
        verbs_side(lambda: fabric.binding("fake1"), sealing=not first) as right,
    ):
        async with joined((left, right)) as pair:
            for connection in (pair.left, pair.right):
                assert isinstance(connection, VerbsConnection) and connection.seals_payloads
            await works(pair)


@pytest.mark.parametrize("unable", [0, 1])
async def test_an_end_that_cannot_seal_is_refused(fabric: FakeFabric, unable: int) -> None:
    fabric.add_nic("fake0")
    fabric.add_nic("fake1")
    with (
        verbs_side(lambda: fabric.binding("fake0"), sealing=unable == 1) as left,
        verbs_side(lambda: fabric.binding("fake1"), sealing=unable == 0) as right,
    ):
        endpoint_of((left, right)[unable])._exchange = lambda: None
        with pytest.raises(AuthenticationError, match="cryptography is not installed"):
            async with joined((left, right)):
                raise AssertionError("it was let in")


async def test_tls_goes_before_rdma(fabric: FakeFabric, tls_folder: Path) -> None:
    fabric.add_nic("fake0")
    tls = load_tls(tls_folder)
    with (
        verbs_side(lambda: fabric.binding("fake0"), tls=tls) as left,
        verbs_side(lambda: fabric.binding("fake0"), tls=tls) as right,
    ):
        async with joined((left, right)) as pair:
            for connection in (pair.left, pair.right):
                assert isinstance(connection, TlsConnection) and connection.kind == "tcp"
                assert "security is TLS" in connection.rejected["verbs"]
            await works(pair)


@contextlib.asynccontextmanager
async def listening(*sides: Side) -> AsyncIterator[list[Connection]]:
    """Endpoints that listen in the block. Yields the connections that they accept, which end with it."""
    accepted: list[Connection] = []
    for side in sides:
        await side.endpoint.start(accepted.append)
    yield accepted
    for connection in accepted:
        connection.abort()
    for side in sides:
        await side.endpoint.aclose()


# ---- things that one end lacks


@contextlib.contextmanager
def mixed(fabric: FakeFabric, binding: Callable[[], Any], **settings: Any) -> Iterator[tuple[Side, Side]]:
    """One side with a device, and one with the given binding."""
    fabric.add_nic("fake0")
    with verbs_side(lambda: fabric.binding("fake0")) as left, verbs_side(binding, **settings) as right:
        yield left, right


@pytest.mark.parametrize("turned", [False, True])
async def test_no_binding(fabric: FakeFabric, turned: bool) -> None:
    from zcactor.transport.verbs.driver.bindings import bindings

    absent = bindings("none")
    assert isinstance(absent, Absent)
    with mixed(fabric, lambda: absent) as (able, other):
        reason = "none"
        if turned:
            await fell_back((other, able), reason, "the peer cannot use RDMA: ")
        else:
            await fell_back((able, other), "the peer cannot use RDMA: ", reason)
        assert endpoint_of(other).problem


@pytest.mark.parametrize("turned", [False, True])
async def test_no_device(fabric: FakeFabric, turned: bool) -> None:
    with mixed(fabric, lambda: FakeBinding(fabric, ("none",))) as sides:
        reasons = "the peer cannot use RDMA: there is no RDMA device", "there is no RDMA device"
        await fell_back(sides[::-1] if turned else sides, *(reasons[::-1] if turned else reasons))


async def test_neither_can(fabric: FakeFabric) -> None:
    def none() -> FakeBinding:
        return FakeBinding(fabric, ("none",))

    with verbs_side(none) as left, verbs_side(none) as right:
        await fell_back((left, right), "no RDMA device", "no RDMA device")


@pytest.mark.parametrize("turned", [False, True])
async def test_other_fabric(fabric: FakeFabric, turned: bool) -> None:
    fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    with mixed(fabric, lambda: fabric.binding("ib0")) as sides:
        await fell_back(sides[::-1] if turned else sides, "different fabrics", "different fabrics")


@pytest.mark.parametrize("refuses", [0, 1])
async def test_refusing_instead_of_falling_back(fabric: FakeFabric, refuses: int) -> None:
    fabric.add_nic("fake0")
    settings = [{"falls_back": number != refuses} for number in range(2)]
    with (
        verbs_side(lambda: fabric.binding("fake0"), **settings[0]) as left,
        verbs_side(lambda: FakeBinding(fabric, ("none",)), **settings[1]) as right,
    ):
        async with listening(left, right) as accepted:
            with pytest.raises(ConnectionLost):
                await left.endpoint.connect(right.endpoint.address)
            await turns(20)
            assert not accepted
            assert engine_of(left).connections == 0


async def test_long_reason(sides: tuple[Side, Side]) -> None:
    endpoint = endpoint_of(sides[1])
    endpoint._opened = True
    endpoint.problem = "no " * 1000
    await fell_back(sides, "the peer cannot use RDMA: no no", "no no")


# ---- marks of packets


async def test_marks_of_packets(fabric: FakeFabric) -> None:
    for name in ("fake0", "fake1"):
        fabric.add_nic(name).partitions = (0xFFFF, 0x8123)
    with fake_sides(fabric, marks=(104, 3, 1)) as sides:
        async with joined(sides) as pair:
            assert pair.left.kind == "verbs"
            await works(pair)
            marks = [qp.path.marking for qp in fabric._queue_pairs.values() if qp.path is not None]
            assert marks == [Marking(104, 3, 1)] * 4


async def test_two_partitions(fabric: FakeFabric) -> None:
    for name in ("fake0", "fake1"):
        fabric.add_nic(name).partitions = (0xFFFF, 0x8123)
    with (
        verbs_side(lambda: fabric.binding("fake0"), marks=(0, 0, 1)) as left,
        verbs_side(lambda: fabric.binding("fake1")) as right,
    ):
        await fell_back((left, right), "which are of two partitions", "which are of two partitions")


# ---- several cards

RAILS = {"a0": "10.0.0.1", "a1": "10.0.1.1", "b1": "10.0.1.2", "b0": "10.0.0.2"}
"""Two cards of each of two hosts, a and b, which prefer cards of two networks."""


TWO_NETWORKS = {name: name[1] for name in RAILS}
THREE_CARDS = {"a0": "", "a1": "", "b0": ""}


@contextlib.contextmanager
def rails(
    fabric: FakeFabric, networks: Mapping[str, str] = TWO_NETWORKS, **settings: Any
) -> Iterator[tuple[Side, Side]]:
    """The hosts a and b. `networks` has the network of each card, which does not reach cards of other networks."""
    for name, network in networks.items():
        fabric.add_nic(name, RAILS[name], network=network)
    ours, theirs = ([name for name in networks if name[0] == host] for host in "ab")
    with (
        verbs_side(lambda: fabric.binding(*ours), **settings) as left,
        verbs_side(lambda: fabric.binding(*theirs), **settings) as right,
    ):
        yield left, right


def goes_down(nic: FakeNic) -> None:
    """Take a card's cable away, of which its users are told."""
    nic.set_active(False)
    nic.tell(EventType.PORT_ERR)


def cards_of(pair: ConnectedPair) -> list[str]:
    """The cards that the two ends use."""
    ends = (pair.left, pair.right)
    return [end.pairs.engine.device.name for end in ends if isinstance(end, VerbsConnection)]


@pytest.mark.parametrize("sealing", [False, True])
async def test_the_next_pair_of_cards_is_tried(fabric: FakeFabric, sealing: bool) -> None:
    with rails(fabric, sealing=sealing) as (left, right):
        async with joined((left, right)) as pair:
            assert cards_of(pair) == ["a0", "b0"]
            await works(pair)
            right.arena[:5] = b"bytes"
            await pair.left.pull(RemoteRegion(1, 0, 5), left.address, left)
            assert bytes(left.arena[:5]) == b"bytes"
        for side in (left, right):
            assert [engine.connections for engine in endpoint_of(side).engines] in ([0], [0, 0])
    assert all(nic.pinned == 0 and not nic.devices for nic in fabric.nics.values())


@pytest.mark.parametrize("turned", [False, True])
async def test_a_card_that_fails_leaves_the_others(fabric: FakeFabric, turned: bool) -> None:
    with rails(fabric) as sides:
        for side in sides:
            endpoint_of(side).open_engine()
        fabric.nics["b0"].set_active(False)
        async with joined(sides[::-1] if turned else sides) as pair:
            assert sorted(cards_of(pair)) == ["a1", "b1"]
            await works(pair)


@pytest.mark.parametrize("turned", [False, True])
async def test_a_card_that_cannot_be_opened_leaves_the_others(fabric: FakeFabric, turned: bool) -> None:
    with rails(fabric) as sides:
        for side in sides:
            endpoint_of(side).open_engine()
        fabric.nics["b0"].set_active(False)
        fabric.nics["a1"].pin_limit = 0
        async with joined(sides[::-1] if turned else sides) as pair:
            assert {pair.left.kind, pair.right.kind} == {"tcp"}
            reasons = [end.rejected["verbs"] for end in (pair.left, pair.right)]
            ours, theirs = reasons[::-1] if turned else reasons
            assert "a0 here to the peer's b1: a message failed" in ours
            assert "b1 here to the peer's a0: a message failed" in theirs
            assert "a1 here to the peer's b0: a1 cannot be used" in ours
            assert "b0 here to the peer's a1: b0 cannot be used" in theirs
            assert ours.count(" here to ") == theirs.count(" here to ") == 2, "two cards are of no use to the others"
            await works(pair)


async def test_cards_of_no_use_take_no_attempt(fabric: FakeFabric) -> None:
    """Six pairs of cards, of which one works: four have a card that cannot be used, and one is of two networks."""
    fabric.add_nic("other0", network="other")
    for name, left in (("dead0", 0), ("fake0", None), ("dead1", 1), ("fake1", None)):
        fabric.add_nic(name, requests_left=left)
    with fake_sides(fabric, falls_back=False) as sides:
        async with joined(sides) as pair:
            assert cards_of(pair) == ["fake0", "fake1"]
            await works(pair)


async def test_a_card_that_is_down_is_not_offered(fabric: FakeFabric) -> None:
    with rails(fabric, THREE_CARDS) as (left, right):
        endpoint_of(left).open_engine()
        goes_down(fabric.nics["a0"])
        await turns(20)
        async with joined((left, right)) as pair:
            assert cards_of(pair) == ["a1", "b0"] and not pair.left.rejected
            await works(pair)


async def test_a_card_that_could_not_be_opened_is_tried_again_later(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rails(fabric, THREE_CARDS) as (left, right):
        endpoint_of(left).open_engine()
        goes_down(fabric.nics["a0"])
        fabric.nics["a1"].pin_limit = 0
        await turns(20)
        for pause, offered in ((60.0, []), (0.0, [1])):
            monkeypatch.setattr(ports, "REFUSED_SECONDS", pause)
            own = endpoint_of(left)._ports
            assert own is not None
            own._refused.clear()
            assert own.offered_to(b"", even_broken=False)[0] == [1]
            assert "a1 cannot be used" in str(own.engine(1))
            numbers, why = own.offered_to(b"", even_broken=False)
            assert numbers == offered and bool(why) is not bool(numbers)
        fabric.nics["a1"].pin_limit = None
        async with joined((left, right)) as pair:
            assert cards_of(pair) == ["a1", "b0"]


async def test_no_pair_of_cards_works(fabric: FakeFabric) -> None:
    with rails(fabric, {name: name for name in RAILS}) as sides:
        await fell_back(sides, "a0 here to the peer's b0: ", "b0 here to the peer's a0: ")
        for side in sides:
            assert all(engine.connections == 0 for engine in endpoint_of(side).engines)


async def test_cards_of_pairs_that_do_not_work_are_used_in_others_at_once(fabric: FakeFabric) -> None:
    with rails(fabric, {"a0": "0", "a1": "1", "b0": "1", "b1": "0"}) as (left, right):
        async with listening(left, right) as accepted:
            made = [await left.endpoint.connect(right.endpoint.address) for _ in range(3)]
            assert [(each.kind, each.rejected) for each in made] == [("verbs", {})] * 3
            while len(accepted) < 3:
                await turns(1)
            for connection in made:
                connection.abort()


async def test_a_path_that_breaks_is_replaced_by_other_cards(fabric: FakeFabric) -> None:
    with rails(fabric, dict.fromkeys(RAILS, "")) as (left, right):
        async with listening(left, right):
            first = await left.endpoint.connect(right.endpoint.address)
            assert isinstance(first, VerbsConnection) and first.pairs.engine.device.name == "a0"
            first.start(Recorder())
            fabric.nics["a0"].set_active(False)
            send(first, [b"lost"])
            await turns(20)
            again = await left.endpoint.connect(right.endpoint.address)
            assert isinstance(again, VerbsConnection) and again.pairs.engine.device.name == "a1"
            first.abort()
            again.abort()
        await turns(20)


# ---- the end


async def test_dispose(sides: tuple[Side, Side], fabric: FakeFabric) -> None:
    async with joined(sides):
        pass
    devices = [device_of(side) for side in sides]
    for side in sides:
        side.endpoint.dispose()
        side.endpoint.dispose()
    assert all(device.closed and len(device.ledger) == 0 for device in devices)
    assert all(nic.pinned == 0 for nic in fabric.nics.values())


# ---- a peer that may not use RDMA


@pytest.mark.parametrize("sealing", [False, True])
@pytest.mark.parametrize("turned", [False, True])
async def test_peer_whose_transports_have_no_rdma(fabric: FakeFabric, sealing: bool, turned: bool) -> None:
    fabric.add_nic("fake0")
    with verbs_side(lambda: fabric.binding("fake0"), sealing=sealing) as able, tcp_side(sealing=sealing) as other:
        async with joined((other, able) if turned else (able, other)) as pair:
            assert pair.left.kind == pair.right.kind == "tcp"
            ours = pair.right if turned else pair.left
            assert ours.rejected == {"verbs": "the peer's transports do not allow it"}
            await works(pair)
        assert engine_of(able).connections == 0


@pytest.mark.parametrize("turned", [False, True])
async def test_peer_whose_transports_have_no_rdma_where_it_is_required(fabric: FakeFabric, turned: bool) -> None:
    fabric.add_nic("fake0")
    with verbs_side(lambda: fabric.binding("fake0"), falls_back=False) as able, tcp_side() as other:
        async with listening(able, other):
            if turned:
                with pytest.raises(ConnectionLost):
                    await other.endpoint.connect(able.endpoint.address)
            else:
                with pytest.raises(ConnectionLost, match="the peer's transports do not allow it"):
                    await able.endpoint.connect(other.endpoint.address)
            await turns()
