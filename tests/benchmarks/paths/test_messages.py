"""Messages over each carrier: the same arrays come out, also where they fill more than all slots."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from benchmarks.paths.carriers import SLOT_NBYTES, SLOTS, Carrier, MappedSlots, SentSlots, Stream
from benchmarks.paths.messages import WAYS, Array, Messages, Private

LENGTHS = (1, 1000, SLOT_NBYTES // 4, SLOT_NBYTES // 4 + 1, (SLOTS + 2) * SLOT_NBYTES // 4 + 3)


@contextmanager
def ends(kind: str) -> Iterator[tuple[Carrier, Carrier]]:
    """Two ends of a carrier."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        if kind == "stream":
            yield Stream(one), Stream(other)
        elif kind == "sent":
            yield SentSlots(one), SentSlots(other)
        else:
            fd = os.memfd_create("slots")
            try:
                os.posix_fallocate(fd, 0, MappedSlots.NBYTES)
                yield MappedSlots(one, fd, 0), MappedSlots(other, fd, 1)
            finally:
                os.close(fd)


async def echo(messages: Messages, times: int) -> None:
    """Send each message back."""
    for _ in range(times):
        await messages.send(await messages.receive())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["stream", "sent", "mapped"])
def test_what_is_sent_comes_back(way: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    sent: list[list[Array]] = [[rng.random(length, np.float32)] for length in LENGTHS]
    sent.append([array for (array,) in sent])
    for message in sent:
        for array in message:
            array.flags.writeable = False

    async def exchange(messages: Messages) -> list[list[Array]]:
        found = []
        for message in sent:
            await messages.send(message)
            found.append(await messages.receive())
        return found

    with ends(kind) as (one, other):
        thread = threading.Thread(target=asyncio.run, args=(echo(WAYS[way](other), len(sent)),), daemon=True)
        thread.start()
        found = asyncio.run(exchange(WAYS[way](one)))
        thread.join(30)
    assert not thread.is_alive()
    for message, back in zip(sent, found, strict=True):
        assert len(message) == len(back)
        for array, again in zip(message, back, strict=True):
            np.testing.assert_array_equal(array, again)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["stream", "sent", "mapped"])
def test_the_other_end_is_gone(way: str, kind: str) -> None:
    with ends(kind) as (one, other):
        assert isinstance(other, Stream | SentSlots | MappedSlots)
        other._sock.close()
        with pytest.raises(ConnectionResetError, match="the other end has closed its socket"):
            asyncio.run(WAYS[way](one).receive())


def test_too_many_arrays() -> None:
    with ends("stream") as (one, _), pytest.raises(ValueError, match="511 arrays, and at most 510"):
        asyncio.run(Private(one).send([np.ones(1, np.float32)] * 511))
