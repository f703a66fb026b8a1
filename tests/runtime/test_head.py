"""What the head is asked: who answers, and what is known when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import zcactor as zc
from tests.runtime.test_process import PATIENCE
from zcactor.runtime import head
from zcactor.runtime.head import HeadLink
from zcactor.runtime.sessions import Sessions


@pytest.fixture
async def node() -> AsyncIterator[zc.Node]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


async def test_the_head_knows_who_lives(node: zc.Node) -> None:
    process = node.process
    assert process.head.process == process.agent != process.process
    state, _, cause = await process.head.locate(b"nobody is called")
    assert state == "dead" and cause


class Link(HeadLink):
    """To a head that answers with `answer`."""

    def __init__(self, answer: Any) -> None:
        super().__init__(Sessions(b"u" * 16), None, None, lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
        self._answer = answer

    async def ask_agent(self, method: str, *args: Any) -> Any:
        return await self._answer()

    ask_members = ask_agent


async def test_a_head_that_is_gone_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone() -> Any:
        raise zc.ConnectionLost("it is gone")

    assert await Link(gone).locate(b"a" * 16) == ("dead", (b"", 0), "its node agent is gone")
    with pytest.raises(zc.ConnectionLost, match="it is gone"):
        await Link(gone).silence_of(b"p" * 16)

    async def silent() -> Any:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(head, "_ANSWER", 0.01)
    with pytest.raises(zc.ConnectionLost, match="the cluster's head does not answer"):
        await Link(silent).silence_of(b"p" * 16)

    async def heard() -> Any:
        return 0.5, "there"

    assert await Link(heard).silence_of(b"p" * 16) == (0.5, "there")
