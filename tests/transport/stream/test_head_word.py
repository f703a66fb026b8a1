"""A word about a cluster's head, after the handshake of a connection that serves nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from tests.transport.local_arena import TOKEN
from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.stream import head_word
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import introduce, send_all, shake_hands
from zcactor.transport.stream.head_word import HeadWord, hear, say

PATIENCE = 60.0
WORDS = [HeadWord("", 0), HeadWord("", 3), HeadWord("[::1]:7433", (1 << 64) - 1)]


@contextlib.asynccontextmanager
async def both_ends(purpose: Purpose) -> AsyncIterator[tuple[socket.socket, Handshake, socket.socket, Handshake]]:
    """Both ends of a connection of a purpose after their handshake: the connector's first."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
        name = bytes(range(16))
        calls = Handshake(TOKEN, Introduction(bytes(16), 1, 0, 4, 64, purpose), accepting=False)
        answers = Handshake(TOKEN, Introduction(name, 2, 0, 4, 64), accepting=True)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(introduce(ours, calls, name.hex()), shake_hands(theirs, answers))
        yield ours, calls, theirs, answers


@pytest.mark.parametrize("purpose", [Purpose.NAME, Purpose.SUMMONS])
@pytest.mark.parametrize("word", WORDS)
async def test_a_word_is_heard_as_it_was_said(purpose: Purpose, word: HeadWord) -> None:
    async with both_ends(purpose) as (ours, calls, theirs, answers):
        await say(ours, calls, TOKEN, word.encode())
        assert await hear(theirs, answers, TOKEN) == word
        await say(theirs, answers, TOKEN, word.encode())
        assert await hear(ours, calls, TOKEN) == word


@pytest.mark.parametrize("changed", [True, False])
async def test_a_message_that_was_changed(changed: bool) -> None:
    async with both_ends(Purpose.NAME) as (ours, calls, theirs, answers):
        message = HeadWord("a:1", 0).encode()
        proof = head_word._proof(TOKEN, calls.transcript, message)
        await send_all(ours, bytes((len(message),)) + bytes(8) + (b"b:1" if changed else b"a:1") + proof)
        if changed:
            with pytest.raises(AuthenticationError, match="was changed on its way"):
                await hear(theirs, answers, TOKEN)
        else:
            assert await hear(theirs, answers, TOKEN) == ("a:1", 0)


async def test_a_word_of_another_connection() -> None:
    async with (
        both_ends(Purpose.NAME) as (_, others, _, _),
        both_ends(Purpose.NAME) as (ours, _, theirs, answers),
    ):
        await say(ours, others, TOKEN, HeadWord("a:1", 3).encode())
        with pytest.raises(AuthenticationError):
            await hear(theirs, answers, TOKEN)


@pytest.mark.parametrize("message", [b"", bytes(7)])
async def test_a_message_that_is_too_short(message: bytes) -> None:
    async with both_ends(Purpose.NAME) as (ours, calls, theirs, answers):
        await say(ours, calls, TOKEN, message)
        with pytest.raises(ProtocolError, match=f"it has {len(message)} bytes, at least 8 are needed"):
            await hear(theirs, answers, TOKEN)


@pytest.mark.parametrize("nbytes", [0, 1, 11, 43])
async def test_a_message_that_is_cut_short(nbytes: int) -> None:
    async with both_ends(Purpose.NAME) as (ours, calls, theirs, answers):
        message = HeadWord("a:1", 3).encode()
        whole = bytes((len(message),)) + message + head_word._proof(TOKEN, calls.transcript, message)
        assert nbytes < len(whole) == 44
        await send_all(ours, whole[:nbytes])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            await hear(theirs, answers, TOKEN)


def test_a_place_that_is_too_long() -> None:
    assert len(HeadWord("a" * 247, 1).encode()) == 255
    with pytest.raises(ValueError, match="is too long for an address: 256 bytes of 255"):
        HeadWord("a" * 248, 1).encode()
