"""The owner's answers to readers that ask for the place of an object's bytes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tests.control.agents import turns
from zcactor.objects import broadcast_directory
from zcactor.objects.broadcast import OWNER, Copy
from zcactor.objects.broadcast_directory import BroadcastDirectory
from zcactor.objectstore.store import Block, Store

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture
def store() -> Any:
    store = Store(16 << 20, os.urandom(16))
    yield store
    store.close()


def asked(
    origins: BroadcastDirectory, block: Block, number: int, machine: str = "", failed: bytes = b""
) -> asyncio.Task[Copy]:
    return asyncio.get_running_loop().create_task(
        origins.source(name(number), block, block.offset, block.nbytes, machine, failed)
    )


async def test_questions_wait_for_their_answer(store: Store) -> None:
    origins, block = BroadcastDirectory(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 6)]
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False, False]
    copy = Copy(name(1), 7, 64, "")
    origins.ended(name(1), block, block.offset, block.nbytes, copy)
    assert await tasks[2] == copy and await tasks[3] == copy
    assert not tasks[4].done()
    origins.left(name(3))
    assert await tasks[4] == copy
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4), name(5)}
    assert origins.spread(block, block.offset, 50) is None
    origins.ended(name(1), block, block.offset, 50, copy)  # no reader has asked for these bytes


async def test_a_question_that_is_cancelled_holds_nobody_up(store: Store) -> None:
    origins, block = BroadcastDirectory(), store.allocate(100)
    tasks = [asked(origins, block, number) for number in range(1, 5)]
    await turns()
    tasks[2].cancel()
    origins.ended(name(1), block, block.offset, block.nbytes, None)  # before the question could notice its end
    assert await tasks[3] == OWNER
    await asyncio.wait(tasks)
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(2), name(4)} and not spread.waiting
    again = asked(origins, block, 5)
    await turns()
    again.cancel()
    await asyncio.wait([again])
    assert not spread.waiting
    first, second = asked(origins, block, 6), asked(origins, block, 6)
    assert await first == OWNER, "who asks again has given up what it asked before"
    origins.left(name(2))
    assert await second == OWNER and set(spread.running) == {name(4), name(6)}


async def test_whoever_waits_too_long_is_served_by_the_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_directory, "PATIENCE", 0)
    origins, block = BroadcastDirectory(lambda: 0.0), store.allocate(100)
    assert [await asked(origins, block, number) for number in range(1, 5)] == [OWNER] * 4
    monkeypatch.setattr(broadcast_directory, "PATIENCE", PATIENCE)
    monkeypatch.setattr(broadcast_directory, "MAX_WAITING", 1)
    assert await asked(origins, block, 5) == OWNER
    waits, served = asked(origins, block, 6), asked(origins, block, 7)
    assert await served == OWNER
    assert not waits.done()
    origins.left(name(5))
    assert await waits == OWNER


@pytest.mark.parametrize("machine", ["", "a"])
async def test_readers_that_never_say_that_they_are_done_hold_nobody_up_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    clock = 1000.0
    origins, block = BroadcastDirectory(lambda: clock), store.allocate(100)
    assert [await asked(origins, block, number, machine * number) for number in (1, 2)] == [OWNER] * 2
    clock += 1
    waits = asked(origins, block, 3, machine)
    await turns()
    assert not waits.done()
    clock += broadcast_directory.PATIENCE
    assert await asked(origins, block, 4, machine * 4) == OWNER and await waits == OWNER
    spread = origins.spread(block, block.offset, block.nbytes)
    assert spread is not None and set(spread.running) == {name(3), name(4)}
    late = Copy(name(1), 7, 64, "")
    origins.ended(name(1), block, block.offset, block.nbytes, late)
    assert await asked(origins, block, 5) == late, "what is slow and ends in the end is a place all the same"


async def test_of_those_who_wait_for_somebody_who_hangs_one_alone_waits_to_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins, block = BroadcastDirectory(lambda: 0.0), store.allocate(100)
    assert [await asked(origins, block, number) for number in (1, 2)] == [OWNER] * 2
    others = [asked(origins, block, number) for number in (3, 4)]
    await turns()
    monkeypatch.setattr(broadcast_directory, "PATIENCE", 0)
    assert await asked(origins, block, 5) == OWNER
    assert [await other for other in others] == [OWNER] * 2


async def test_what_is_known_goes_with_the_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_directory, "MAX_VIEWS", 2)
    origins, block = BroadcastDirectory(), store.allocate(100)
    for nbytes in (10, 20, 30):
        assert await origins.source(name(1), block, block.offset, nbytes, "") == OWNER
    assert [origins.spread(block, block.offset, nbytes) is None for nbytes in (10, 20, 30)] == [False, False, True]
    del block
    assert not origins._asked
    origins.left(name(1))
