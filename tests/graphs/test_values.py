"""Values on their way: the native path, the packed one, this process itself, and connections that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.passing import Unresolved
from zcactor.errors import ConnectionLost
from zcactor.graphs.values import PLAIN, Courier, Outcome, argument
from zcactor.marshal.packed import Packed
from zcactor.rpc.messages import Status

OWN, PEER, OTHER = b"o" * 16, b"p" * 16, b"q" * 16


class Peer:
    """A session that notes what is pushed."""

    def __init__(self, *, native: bool, ends: bool = False) -> None:
        self.closed: Exception | None = None
        self.connection = SimpleNamespace(eager_limit=100)
        self.wire = SimpleNamespace(push=self._native if native else lambda *_: False, flush=self._flush)
        self.ends = ends
        self.pushed: list[Any] = []
        self.flushed = 0
        """The number of pushed values that were sent."""

    def _flush(self) -> None:
        self.flushed = len(self.pushed)

    def _native(self, key: int, word: int, value: Any, more: bool | None) -> bool:
        if self.ends:
            raise ConnectionLost("it has ended")
        if isinstance(value, list):
            return False
        self.pushed.append((key, word, value))
        if more is False:
            self._flush()
        return True

    def push(self, key: int, word: int, status: int, payload: Any, parts: Sequence[Any], flags: int) -> None:
        if self.ends:
            raise ConnectionLost("it has ended")
        self.pushed.append((key, word, status, payload, flags))


class Bench:
    """A courier among sessions."""

    def __init__(self, **sessions: Peer) -> None:
        self.came: list[Any] = []
        self.packed = 0

        def pack(value: Any) -> tuple[bytes, tuple[Any, ...], int]:
            self.packed += 1
            if value == ["bad"]:
                raise TypeError("not packed")
            return repr(value).encode(), (), 0

        def fit(packed: Any, eager_limit: int) -> Any:
            return packed if len(packed[0]) <= eager_limit else (b"short", (), packed[2])

        marshaller = SimpleNamespace(pack=pack, fit=fit)
        used = {PEER: sessions.get("peer"), OTHER: sessions.get("other")}
        self.process: Any = SimpleNamespace(
            process=OWN, loop=asyncio.get_running_loop(), thread=0, marshaller=marshaller,
            sessions=SimpleNamespace(used={name: each for name, each in used.items() if each is not None}),
        )  # fmt: skip
        self.courier = Courier(self.process, 7, lambda *value: self.came.append(value))

    def send(self, value: Any, *targets: bytes) -> list[bytes]:
        """Send a value. Returns the targets that are served."""
        served: list[bytes] = []
        self.courier.send(5, value, targets, served)
        return served


async def test_a_value_is_packed_once_for_all_that_need_it_packed() -> None:
    native, generic = Peer(native=True), Peer(native=False)
    bench = Bench(peer=native, other=generic)
    assert bench.send(3, PEER, OTHER, OWN) == [PEER, OTHER, OWN]
    assert native.pushed == [(5, 7, 3)] and native.flushed == 1 and generic.pushed == [(5, 7, Status.OK, b"3", 0)]
    await asyncio.sleep(0)
    assert bench.came == [(5, b"3", (), 0)] and bench.packed == 1
    assert bench.send(4, OWN) == [OWN]
    await asyncio.sleep(0)
    assert bench.came[-1] == (5, 4, (), PLAIN) and bench.packed == 1
    assert bench.send(6, PEER) == [PEER] and native.flushed == 2
    assert bench.send([1], PEER) == [PEER] and native.pushed[-1] == (5, 7, Status.OK, b"[1]", 0)
    assert bench.send(Packed(b"x" * 200, (), 2), PEER) == [PEER]
    assert native.pushed[-1] == (5, 7, Status.OK, b"short", 2) and bench.packed == 2


@pytest.mark.parametrize("native", [True, False])
async def test_a_connection_that_has_ended_gets_nothing(native: bool) -> None:
    bench = Bench(peer=Peer(native=native, ends=True), other=Peer(native=native))
    bench.process.sessions.used[OTHER].closed = ConnectionLost("it is closed")
    assert bench.send(3, PEER, OTHER, b"unknown") == [PEER, OTHER, b"unknown"]
    assert not bench.process.sessions.used[PEER].pushed and not bench.process.sessions.used[OTHER].pushed


async def test_frames_are_written_for_all_before_the_first_is_sent() -> None:
    first, second = Peer(native=True), Peer(native=True)
    flushed: list[int] = []
    first.wire.flush = lambda: flushed.append(len(second.pushed))
    assert Bench(peer=first, other=second).send(3, PEER, OTHER) == [PEER, OTHER]
    assert flushed == [1] and second.flushed == 1
    bad = Peer(native=True)
    first.wire.push = lambda *_: True
    with pytest.raises(TypeError, match="not packed"):
        Bench(peer=first, other=bad).send(["bad"], PEER, OTHER)
    assert flushed == [1, 1], "one that has its frame gets it"


async def test_a_value_that_cannot_be_packed_leaves_the_served_ones_out() -> None:
    bench = Bench(peer=Peer(native=False))
    served: list[bytes] = []
    with pytest.raises(TypeError, match="not packed"):
        bench.courier.send(5, ["bad"], [OWN, PEER], served)
    assert served == []


async def test_arguments_are_plain_or_unpacked_later() -> None:
    bench = Bench()
    assert argument(bench.process, "x", Outcome(Status.OK, 8)) == 8
    packed = argument(bench.process, "x", Outcome(Status.OK, b"\x07", (), 0))
    assert type(packed) is Unresolved and packed.call.done and not packed.call.decoded
    assert Outcome(Status.ERROR, b"").failed and not Outcome(Status.OK, None).failed
