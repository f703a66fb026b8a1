"""Two sides that reach each other by RDMA, for the tests of connections: on a fake fabric, or on real devices."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.connection import (
    ARENA_NBYTES,
    ConnectedPair,
    Recorder,
    Side,
    connect,
    finish,
    send,
    turns,
)
from tests.transport.local_arena import TOKEN, memfd
from zcactor.transport.verbs.device.engine import Engine
from zcactor.transport.verbs.driver.base import Binding, Completion
from zcactor.transport.verbs.driver.bindings import Absent, bindings
from zcactor.transport.verbs.driver.fake import FakeBinding, FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import INLINE_LIMITS
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.peer.connection import VerbsConnection

EAGER_LIMIT = 16384
"""The eager limit of sides, which their engines then do not have to measure: that is a third of the time of a short
test, and a second in a guest."""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; not among mmap's constants."""


class Arena:
    """The memory that a side lets others read: a mapped memfd, all of it resident."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pinned: list[tuple[int, int]] = []

    def pin(self, offset: int, nbytes: int) -> None:
        """Take memory for every page, and touch none: other threads may be writing there."""
        self.pinned.append((offset, nbytes))
        self.memory.madvise(MADV_POPULATE_WRITE, offset, nbytes)


@dataclass
class Whole:
    """The object that spans the arena, under any id."""

    offset: int
    nbytes: int

    __hash__ = object.__hash__


@contextlib.contextmanager
def verbs_side(
    binding: Callable[[], Binding | Absent], nbytes: int = ARENA_NBYTES, **settings: object
) -> Iterator[Side]:
    """An endpoint, not started, with an arena of its own."""
    with memfd(nbytes) as fd:
        arena = Arena(fd, nbytes)
        process = secrets.token_bytes(16)
        whole = Whole(0, nbytes)
        endpoint = VerbsEndpoint(
            "127.0.0.1", process, TOKEN, arena, fd, binding=binding, lookup=lambda _: whole, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        with memoryview(arena.memory) as view:
            yield Side(endpoint, process, view)
        endpoint.dispose()


FIRST_REQUESTS = 3
"""Requests of a card until it has a connection: a READ from itself, and a message and a READ between the ends."""


def drawn_network(seed: int) -> FakeFabric:
    """The cards of two hosts, drawn by a number: ``fake0`` and ``fake1`` reach each other.

    A host may have two more, before or behind that one: a card ``other`` of another network, which reaches at most the
    other host's, and a card ``dying`` that loses its port before it has a connection. Each takes as much inline data,
    and registers dma-bufs or not, as the number says.
    """
    draw, fabric = random.Random(seed), FakeFabric(seed=seed)
    for number in range(2):
        names = [name for name in ("other", "dying") if draw.random() < 0.5]
        names.insert(draw.randint(0, len(names)), "fake")
        for name in names:
            fabric.add_nic(
                f"{name}{number}", max_inline=draw.choice(INLINE_LIMITS), takes_dma_bufs=draw.random() < 0.75,
                network="other" if name == "other" else "",
                requests_left=draw.randrange(FIRST_REQUESTS) if name == "dying" else None,
            )  # fmt: skip
    return fabric


def host_cards(fabric: FakeFabric, number: int) -> FakeBinding:
    """The cards of a host, 0 or 1, by the last letter of their names."""
    return fabric.binding(*(name for name in fabric.nics if name.endswith(str(number))))


def draw_seeds(metafunc: pytest.Metafunc, few: int = 2) -> None:
    """Run a test that takes ``seed`` with `few` seeds, times ``--rounds``. They begin with 3: on the network of 1 each
    connection takes half a second, as an end waits for a message of a card that has lost its port."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(3, 3 + few * metafunc.config.getoption("--rounds")))


@contextlib.contextmanager
def fake_sides(
    fabric: FakeFabric | None = None, *, sealing: bool = False, **settings: Any
) -> Iterator[tuple[Side, Side]]:
    """Two hosts with an adapter each, or with those of the fabric whose names end with 0 and 1."""
    settings.setdefault("verbs_eager_limit", EAGER_LIMIT)
    fabric = fabric or FakeFabric()
    for name in ("fake0", "fake1"):
        if name not in fabric.nics:
            fabric.add_nic(name)
    with (
        verbs_side(lambda: host_cards(fabric, 0), sealing=sealing, **settings) as left,
        verbs_side(lambda: host_cards(fabric, 1), sealing=sealing, **settings) as right,
    ):
        yield left, right


def drawn_sides(seed: int, **settings: Any) -> contextlib.AbstractContextManager[tuple[Side, Side]]:
    """Two hosts on a network that is drawn, with sealed messages for every other seed. They never use TCP."""
    return fake_sides(drawn_network(seed), sealing=seed % 2 == 1, falls_back=False, **settings)


def sealed_sides(fabric: FakeFabric | None = None) -> contextlib.AbstractContextManager[tuple[Side, Side]]:
    """Two hosts with an adapter each, whose messages are sealed."""
    return fake_sides(fabric, sealing=True)


def endpoint_of(side: Side) -> VerbsEndpoint:
    """The endpoint of a side."""
    assert isinstance(side.endpoint, VerbsEndpoint)
    return side.endpoint


def engine_of(side: Side) -> Engine:
    """The engine of a side that has joined RDMA."""
    engine = endpoint_of(side).engine
    assert engine is not None
    return engine


def device_of(side: Side) -> FakeDevice:
    """The device of a side on a fake fabric that has joined RDMA."""
    device = engine_of(side).device
    assert isinstance(device, FakeDevice)
    return device


@contextlib.asynccontextmanager
async def joined(sides: tuple[Side, Side]) -> AsyncIterator[ConnectedPair]:
    """A connection between two sides."""
    try:
        pair = await connect(*sides)
        yield pair
        await finish(pair)
    finally:
        for side in sides:
            await side.endpoint.aclose()


async def works(pair: ConnectedPair) -> None:
    """Check that frames go both ways."""
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    send(pair.left, [b"there"])
    send(pair.right, [b"back"])
    assert await right.wait_frames(1) == [b"there"]
    assert await left.wait_frames(1) == [b"back"]


def watch(connection: VerbsConnection, look: Callable[[memoryview, int], object]) -> None:
    """Look at the slots of messages before the connection does."""
    received = connection.received

    def watched(view: memoryview, completion: Completion, slot: int) -> bool:
        look(view, completion.byte_len)
        return received(view, completion, slot)

    connection.received = watched


async def fell_back(sides: tuple[Side, Side], left: str, right: str) -> None:
    """Check that two sides connect over TCP, each knowing its reason, and that nothing of RDMA stays in use."""
    async with joined(sides) as pair:
        assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
        assert left in pair.left.rejected["verbs"]
        assert right in pair.right.rejected["verbs"]
        await works(pair)
        await turns(20)
        for side in sides:
            engine = endpoint_of(side).engine
            assert engine is None or engine.connections == 0


@contextlib.contextmanager
def device_sides(name: str, *, sealing: bool = False) -> Iterator[tuple[Side, Side]]:
    """Two sides on the first real device, through the binding of that name."""
    binding = bindings(name)
    if isinstance(binding, Absent):
        pytest.skip(str(binding))
    settings = {"verbs_eager_limit": EAGER_LIMIT, "sealing": sealing}
    with verbs_side(lambda: binding, **settings) as left, verbs_side(lambda: binding, **settings) as right:
        yield left, right


SIDES: dict[str, Callable[[], contextlib.AbstractContextManager[tuple[Side, Side]]]] = {
    "fake": fake_sides,
    "sealed": sealed_sides,
    "pyverbs": lambda: device_sides("pyverbs"),
    "ibverbs": lambda: device_sides("ibverbs"),
}
"""Functions that make sides, by name of a kind; the last two skip where there is no device."""
