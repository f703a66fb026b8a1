"""The absence of a head: requests that wait, and the search."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.control.agents import turns
from zcactor.errors import AuthenticationError, ConnectionLost, HeadUnavailable, ObjectLost
from zcactor.process import head_outage as module
from zcactor.process.head_outage import HeadOutage

PATIENCE = 20.0


class Head:
    """A head that refuses connections until it is back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float = PATIENCE) -> None:
        monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
        self.outage = HeadOutage(asyncio.get_running_loop(), timeout)
        self.outage.joined(6.0, "/state/log.db")
        self.answer: bool | Exception = ConnectionLost("refused")
        self.tries = 0
        self.tried = asyncio.Event()

    async def rejoin(self) -> bool:
        self.tries += 1
        self.tried.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def away(outage: HeadOutage) -> bool:
    """Whether the outage goes on, which mypy takes for settled once it was asked."""
    return outage.going_on


@pytest.mark.parametrize(
    "refusal",
    [ConnectionLost("refused"), HeadUnavailable("/state/log.db", 0.0, "log"), ObjectLost("half an answer")],
    ids=["no head", "silent log", "lost answer"],
)
async def test_requests_wait_until_the_head_is_back(monkeypatch: pytest.MonkeyPatch, refusal: Exception) -> None:
    head = Head(monkeypatch)
    head.answer = refusal
    outage = head.outage
    assert (outage.patience, outage.log, outage.going_on) == (6.0, "/state/log.db", False)
    await outage.end()  # it is there
    outage.begin()
    outage.begin()
    assert away(outage)
    async with asyncio.timeout(PATIENCE):
        waiting = asyncio.create_task(outage.end())
        seeking = asyncio.create_task(outage.seek(head.rejoin))
        await head.tried.wait()
        assert not waiting.done()
        head.answer = True
        assert await seeking
        await waiting
    assert head.tries >= 2
    assert away(outage) is False
    await outage.end()


async def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Head(monkeypatch, timeout=0.0).outage
    outage.begin()
    with pytest.raises(HeadUnavailable, match="head has not answered") as caught:
        await outage.end()
    assert (caught.value.log, caught.value.silent) == ("/state/log.db", "head")
    assert caught.value.since >= 0.0


async def test_a_call_waits_for_a_head_from_its_last_sign_of_life_on(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Head(monkeypatch, timeout=100.0).outage
    now = asyncio.get_running_loop().time()
    outage.begin(silence=5.0)
    assert outage.deadline() >= now + 100.0
    assert now + 1.0 <= outage.deadline(for_call=True) < now + 2.0
    with pytest.raises(HeadUnavailable) as caught:
        await outage.end(now)
    assert caught.value.since >= 5.0
    in_haste = Head(monkeypatch, timeout=0.0).outage
    in_haste.begin()
    assert in_haste.deadline(for_call=True) <= in_haste.deadline()


@pytest.mark.parametrize("answer", [False, AuthenticationError("another token")])
async def test_a_head_that_refuses(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    head = Head(monkeypatch)
    head.answer = answer
    async with asyncio.timeout(PATIENCE):
        assert not await head.outage.seek(head.rejoin)
    assert head.tries == 1
    assert head.outage.going_on


async def test_patience_ends_also_where_an_attempt_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(monkeypatch)
    asked = asyncio.Event()

    async def silent() -> bool:
        asked.set()
        await asyncio.get_running_loop().create_future()
        return True

    async with asyncio.timeout(PATIENCE):
        assert not await head.outage.seek(silent, 0.01)
    assert asked.is_set()
    assert head.outage.going_on


async def test_a_search_that_is_cancelled_leaves_the_absence_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(monkeypatch)
    seeking = asyncio.create_task(head.outage.seek(head.rejoin))
    await head.tried.wait()
    seeking.cancel()
    await turns()
    assert seeking.cancelled()
    assert head.outage.going_on
