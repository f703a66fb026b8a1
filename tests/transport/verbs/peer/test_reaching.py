"""Memory that two ends let each other read by RDMA, and the check that it is the owner's.

`test_connection.py` has the other cases.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conformance.connection import ConnectedPair, Recorder, Side
from tests.transport.verbs.sides import joined, verbs_side
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer import reaching
from zcactor.transport.verbs.peer.bootstrap import Exported, Message, Tag, Tagged
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.tagging import ReadTags

ARRAYS = [(Integrity.ARRAYS, Integrity.AUTO), (Integrity.FRAMES, Integrity.ARRAYS)]
FRAMES = [(Integrity.AUTO, Integrity.AUTO), (Integrity.FRAMES, Integrity.AUTO)]


@contextlib.asynccontextmanager
async def authenticating(
    fabric: FakeFabric, wishes: tuple[Integrity, Integrity]
) -> AsyncIterator[tuple[ConnectedPair, Side]]:
    """Two ends with these wishes for integrity, and the side that reads; the other's arena is full."""
    fabric.add_nic("fake0")
    fabric.add_nic("fake1")
    with (
        verbs_side(lambda: fabric.binding("fake0"), NBYTES, sealing=True, integrity=wishes[0]) as left,
        verbs_side(lambda: fabric.binding("fake1"), NBYTES, integrity=wishes[1]) as right,
    ):
        right.arena[:] = SOURCE
        async with joined((left, right)) as pair:
            yield pair, left


NBYTES = 5 << 20
SOURCE = random.Random(3).randbytes(NBYTES)


def spoil(connection: Connection, side: Side, at: int) -> None:
    """Flip one bit of the read bytes at this offset of the reader's arena, as an attacker on the way would."""
    assert isinstance(connection, VerbsConnection)
    pull = connection.puller.pull

    async def spoiled(*args: Any) -> None:
        await pull(*args)
        side.arena[at] ^= 1

    connection.puller.pull = spoiled  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("wishes", ARRAYS + FRAMES)
async def test_what_is_read_is_authenticated_as_agreed_or_demanded(
    fabric: FakeFabric, wishes: tuple[Integrity, Integrity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "REACH_NBYTES", 2 << 20)  # this makes several questions for one pull
    asked: list[int] = []
    begin = ReadTags.begin

    def begun(tags: ReadTags, nbytes: int) -> int:
        asked.append(nbytes)
        return begin(tags, nbytes)

    monkeypatch.setattr(ReadTags, "begin", begun)
    async with authenticating(fabric, wishes) as (pair, left):
        for connection in (pair.left, pair.right):
            assert connection.kind == "verbs" and connection.sealed
            assert connection.integrity == ("arrays" if wishes in ARRAYS else "frames")
        for offset, nbytes, questions in ((0, 1, 1), (4096, 100_000, 1), (64, NBYTES - 64, 3)):
            for authenticate in (True, False):
                asked.clear()
                left.arena[:] = bytes(NBYTES)
                await pair.left.pull(RemoteRegion(1, offset, nbytes, authenticate=authenticate), left.address, left)
                assert bytes(left.arena[:nbytes]) == SOURCE[offset : offset + nbytes]
                assert len(asked) == (questions if authenticate or wishes in ARRAYS else 0)
                assert sum(asked) in (0, nbytes)
            asked.clear()
            await pair.left.pull(RemoteRegion(1, offset, nbytes, sealed=True), left.address, left)
            assert not asked, "its tag is in the frame that refers to it"


@pytest.mark.parametrize("at", [0, 1 << 20, (3 << 20) + 17, NBYTES - 65])
@pytest.mark.parametrize("demanded", [True, False])
async def test_a_bit_that_is_changed_on_its_way_is_found_and_ends_the_connection(
    fabric: FakeFabric, at: int, demanded: bool
) -> None:
    async with authenticating(fabric, FRAMES[0] if demanded else ARRAYS[0]) as (pair, left):
        left_end, right_end = Recorder(), Recorder()
        pair.left.start(left_end)
        pair.right.start(right_end)
        spoil(pair.left, left, at)
        region = RemoteRegion(1, 64, NBYTES - 64, authenticate=demanded)
        with pytest.raises(ProtocolError, match="are not its own: they were changed on their way"):
            await pair.left.pull(region, left.address, left)
        assert isinstance(await left_end.wait_lost(), ProtocolError)
        assert isinstance(await right_end.wait_lost(), ConnectionLost)


async def test_a_bit_of_an_array_is_not_looked_at_where_that_was_not_agreed(fabric: FakeFabric) -> None:
    async with authenticating(fabric, FRAMES[0]) as (pair, left):
        spoil(pair.left, left, 100)
        await pair.left.pull(RemoteRegion(1, 0, NBYTES), left.address, left)
        assert left.arena[100] == SOURCE[100] ^ 1


@pytest.mark.parametrize("error", [OSError, ValueError])
async def test_an_owner_that_cannot_make_tags_says_so(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The reader does not wait, and the connection goes on."""

    def fail(*_: object) -> bytes:
        raise error("no such key")

    async with authenticating(fabric, FRAMES[0]) as (pair, left):
        wanted = RemoteRegion(1, 0, NBYTES, authenticate=True)
        with monkeypatch.context() as patch:
            patch.setattr(ReadTags, "of_ours", fail)
            with pytest.raises(ObjectLost, match="cannot let .* bytes be read: no such key"):
                await pair.left.pull(wanted, left.address, left)
        await pair.left.pull(wanted, left.address, left)


@pytest.mark.parametrize("tags", [b"", bytes(16), None])
async def test_a_peer_that_gives_no_tags_or_others_is_not_believed(fabric: FakeFabric, tags: bytes | None) -> None:
    async with authenticating(fabric, FRAMES[0]) as (pair, left):
        assert isinstance(pair.right, VerbsConnection)
        right, take = pair.right, pair.right._take

        def answer(message: Message) -> None:
            if isinstance(message, Tag):
                right._tell(Exported(message.number) if tags is None else Tagged(message.number, 0, tags))
            else:
                take(message)

        assert right._link is not None
        right._link._take = answer
        with pytest.raises((ProtocolError, ConnectionLost), match="not its own|to another question|was lost"):
            await pair.left.pull(RemoteRegion(1, 0, 100, authenticate=True), left.address, left)
        assert pair.left._lost
