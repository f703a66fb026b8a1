"""The handshake's way over a socket: partial reads, full sockets, cancelling, time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.transport.stream import handshake_io
from zcactor.transport.stream.handshake import Crowded, Handshake, HandshakeStatus, Introduction, refusal

Ends = tuple[socket.socket, socket.socket]


async def test_receive_exactly(ends: Ends) -> None:
    receiving = asyncio.create_task(handshake_io.receive_exactly(ends[1], 5))
    for part in (b"ab", b"cdefgh"):
        await asyncio.sleep(0)
        ends[0].send(part)
    assert await receiving == b"abcde"
    assert await handshake_io.receive_exactly(ends[1], 3) == b"fgh"
    ends[0].send(b"x")
    ends[0].close()
    with pytest.raises(ConnectionLost):
        await handshake_io.receive_exactly(ends[1], 2)


async def test_send_all_waits_for_room(ends: Ends) -> None:
    data = os.urandom(2 << 20)
    sending = asyncio.create_task(handshake_io.send_all(ends[0], data))
    assert await handshake_io.receive_exactly(ends[1], len(data)) == data
    await sending


async def test_cancelling_leaves_no_watch(ends: Ends) -> None:
    receiving = asyncio.create_task(handshake_io.receive_exactly(ends[1], 5))
    await asyncio.sleep(0)
    receiving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await receiving
    assert not asyncio.get_running_loop().remove_reader(ends[1].fileno())


async def test_what_goes_wrong_is_said_in_our_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionLost, match="process a cannot be reached there: Connection refused"):
        async with handshake_io.answering("a", "there"):
            raise ConnectionRefusedError(111, "in other words")
    with pytest.raises(ConnectionLost, match="^as it is"):
        async with handshake_io.answering("a", "there"):
            raise ConnectionLost("as it is")
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.0)
    with pytest.raises(ConnectionLost, match="process a did not answer"):
        async with handshake_io.answering("a", "there"):
            await asyncio.get_running_loop().create_future()


async def test_progress_puts_the_end_off_up_to_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 1000.0)
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TOTAL", 5000.0)
    begun = loop.time()
    async with handshake_io.answering("a", "there"), handshake_io.patient() as patience:
        timeout = patience._timeout
        first = timeout.when()
        assert first is not None
        assert first >= begun + 1000.0
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for sock in (ours, theirs):
                sock.setblocking(False)
            receiving = asyncio.ensure_future(handshake_io.receive_exactly(ours, 1))
            await asyncio.sleep(0)
            assert timeout.when() == first
            before = patience.messages, patience.missing
            monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 2000.0)
            theirs.send(b"x")
            assert await receiving == b"x"
            assert (before, patience.messages, patience.missing) == ((0, 1), 1, 0)
        later = timeout.when()
        assert later is not None
        assert later >= begun + 2000.0
        monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 10000.0)
        handshake_io.progressed()
        last = timeout.when()
        assert last is not None
        assert begun + 5000.0 <= last <= loop.time() + 5000.0
    patience.progressed()  # as by a task that outlives it
    handshake_io.progressed()


async def test_a_peer_that_is_full_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Crowded("full"), Crowded("full"), "in"]

    async def attempt() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Crowded):
            raise answer
        return str(answer)

    assert await handshake_io.admitted(attempt) == "in"
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.0)
    answers[:] = [Crowded("full"), "in"]
    with pytest.raises(ConnectionLost, match="full"):
        await handshake_io.admitted(attempt)


async def test_introduces_itself_to_one_process_only(ends: Ends) -> None:
    token, ours, theirs = bytes(32), Introduction(b"o" * 16, 1, 0, 10, 1000), Introduction(b"t" * 16, 2, 0, 10, 1000)
    for process, right in [(theirs.process.hex(), True), ("ab" * 16, False)]:
        accepting = asyncio.create_task(handshake_io.shake_hands(ends[1], Handshake(token, theirs, accepting=True)))
        introducing = handshake_io.introduce(ends[0], Handshake(token, ours, accepting=False), process)
        if right:
            assert await introducing == theirs
        else:
            with pytest.raises(AuthenticationError, match="in the place of"):
                await introducing
        await accepting


async def test_peer_that_refuses_has_said_why(ends: Ends) -> None:
    ends[1].send(refusal(HandshakeStatus.FULL))
    ends[1].shutdown(socket.SHUT_RDWR)
    handshake = Handshake(bytes(32), Introduction(b"o" * 16, 1, 0, 10, 1000), accepting=False)
    with pytest.raises(ConnectionLost, match="too many pending"):
        await handshake_io.introduce(ends[0], handshake, "ab" * 16)
