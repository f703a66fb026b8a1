"""One connection for each peer, opened on first use, and the calls of a connection that ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, Pair, _settled
from zcactor.errors import AuthenticationError
from zcactor.rpc.call import Call
from zcactor.rpc.services import Services


async def test_several_callers_share_one_attempt_and_one_connection() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        found = await asyncio.gather(*(caller.connections.connect(owner.process) for _ in range(5)))
        assert len(set(map(id, found))) == 1
        assert await caller.connections.connect(owner.process) is found[0]
        assert len(list(caller.sessions.all())) == 1


async def test_a_process_connects_to_itself() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, _):
        session = await caller.connections.connect(caller.process)
        assert session.peer_process == caller.process
        assert len(list(caller.sessions.all())) == 2
        assert await caller.requests.ask(session, Services.ping)


async def test_from_another_loop() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        session = await asyncio.to_thread(lambda: asyncio.run(caller.connections.connect(owner.process)))
        assert session is caller.sessions.used[owner.process]


async def test_one_that_was_replaced_before_its_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        stays = await caller.connections.connect(owner.process)
        goes: Any = SimpleNamespace(peer_process=owner.process, closed=None, is_replaced=False)

        def replace() -> None:
            goes.is_replaced = True
            caller.sessions.used[owner.process] = stays

        async def open_(_: bytes) -> Any:
            caller.loop.call_soon(replace)  # before the callers go on
            return goes

        monkeypatch.setattr(caller.connections, "_open", open_)
        del caller.sessions.used[owner.process]
        assert await asyncio.gather(*(caller.connections.connect(owner.process) for _ in range(3))) == [stays] * 3


async def test_nobody_there() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, _):
        with pytest.raises(zc.ConnectionLost, match="process 6e6f626f"):
            await caller.connections.connect(b"nobody has this ")
        assert not caller.connections._connecting


async def test_each_end_is_told_of_and_open_calls_fail() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        opened: list[Any] = []
        left: list[Any] = []
        lost: list[Any] = []
        caller.connections.on_opened.append(opened.append)
        caller.connections.on_left.append(lambda *what: left.append(what))
        caller.connections.on_lost = lost.append
        session = await caller.connections.connect(owner.process)
        assert opened == [session]
        call = Call(caller.process, caller.loop, caller.thread)
        session.send_call(call, 77, 0, 0, 0, b"", ())
        session.connection.abort()
        await _settled(lambda: len(lost), 1)
        assert (left, lost) == ([(session, None)], [session])
        assert isinstance(call.error, zc.ConnectionLost)
        assert session not in caller.sessions.all()


async def test_a_defect_of_the_peer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The peer sees a connection that closes, and nothing here may be waiting for it."""
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        lost: list[Any] = []
        caller.connections.on_lost = lost.append
        session = await caller.connections.connect(owner.process)
        caller.connections.session_lost(session, zc.ProtocolError("the frame has kind 99"), [])
        assert lost == [session]
        [record] = caplog.records
        assert record.getMessage().startswith("dropped the connection to ")
        assert record.getMessage().endswith(": the frame has kind 99")


@pytest.mark.parametrize("failure", [zc.ConnectionLost("nobody listens there"), AuthenticationError("it is another")])
async def test_a_place_where_it_is_not_is_tried_once(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        tried: list[str] = []
        connect = caller.endpoint.connect

        async def reach(process: str) -> Any:
            claimed = caller.places.try_(bytes.fromhex(process))
            tried.append(claimed)
            if claimed:
                raise failure
            return await connect(process)

        monkeypatch.setattr(caller.endpoint, "connect", reach)
        caller.places.claim(owner.process, "10.0.0.9:9")
        session = await caller.connections.connect(owner.process)
        assert session.peer_process == owner.process
        assert tried == [f"{owner.process.hex()}@10.0.0.9:9", ""]
        assert caller.places.of(owner.process) == ""
