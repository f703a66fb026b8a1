"""Values that a process hands over at its end; `tests/promises/test_owners_end.py` has the ends of actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from tests.callers import asked_by
from zcactor.errors import ConnectionLost, RemoteError
from zcactor.objects.promises import Promises
from zcactor.objects.succession import Succession
from zcactor.peers.requests import Requests
from zcactor.rpc.call import Call


class Peer:
    """An actor that keeps references."""

    def keep(self, refs: list[Any]) -> None:
        self.kept = refs


class Owner:
    """An actor whose values are referred to."""

    def give(self) -> list[Any]:
        return [zc.put(1)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that were named to the peers of this process."""
    found: list[list[int]] = []
    ask = Requests.ask

    def noted(self: Requests, session: Any, method: Any, *args: Any) -> Any:
        if method is Succession.take_over:
            found.append(sorted(args[0]))
        return ask(self, session, method, *args)

    monkeypatch.setattr(Requests, "ask", noted)
    return found


@pytest.mark.slow
async def test_each_lease_is_named_once_and_none_is_granted_afterwards(
    zc_runtime: zc.Runtime, told: list[list[int]]
) -> None:
    spawn: Any = zc.spawn
    process: Any = zc_runtime.process
    peer, refs = await spawn(Peer), [zc.put(1), zc.put(2)]
    await peer.keep(refs)
    await process.succession.hand_over(1.0)
    assert [number for ids in told for number in ids if number] == sorted(ref._call.export_id for ref in refs)
    assert process.leases.over
    assert not process.promises.exports


@pytest.mark.slow
async def test_a_promise_without_an_outcome_fails_in_the_end(zc_runtime: zc.Runtime) -> None:
    spawn: Any = zc.spawn
    process: Any = zc_runtime.process
    call = Call(process.process, process.loop, process.thread)
    call.label = "some.call"
    peer = await spawn(Peer)
    await peer.keep([zc.ObjectRef(call)])
    await process.succession.hand_over(0.5)
    assert isinstance(call.error, zc.ObjectLost)
    assert "some.call had no outcome when its owner" in str(call.error)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "lines"), [(ConnectionLost("gone"), 0), (RemoteError("odd"), 1)])
async def test_a_peer_that_takes_nothing_over_ends_nothing(
    zc_runtime: zc.Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    lines: int,
) -> None:
    process: Any = zc_runtime.process
    session = next(iter(process.sessions.all()))

    async def ask(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "ask", ask)
        await Succession._tell(process.succession, session, [5])
    assert (
        len([each for each in caplog.records if "did not take over" in each.getMessage() and each.levelno > 30])
        == lines
    )


@pytest.mark.slow
async def test_a_peer_that_takes_too_long_does_not_keep_a_process_from_its_end(
    zc_runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawn: Any = zc.spawn
    process: Any = zc_runtime.process
    peer, ref = await spawn(Peer), zc.put(1)
    await peer.keep([ref])
    ask = Requests.ask

    async def never(self: Requests, session: Any, method: Any, *args: Any) -> Any:
        if method is Succession.take_over:
            await asyncio.Event().wait()
        return await ask(self, session, method, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "ask", never)
        async with asyncio.timeout(30.0):
            await process.succession.hand_over(0.1)
    assert process.leases.over
    assert "has not taken over in time what it had leased here" in caplog.text
    assert "this end has 0.1 s (shutdown_timeout)" in caplog.text


@pytest.mark.slow
async def test_a_value_that_was_not_taken_over_in_time_says_so(
    zc_runtime: zc.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn: Any = zc.spawn
    process: Any = zc_runtime.process
    owner = await spawn(Owner)
    [ref] = await owner.give()
    asked = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Promises, "ask", lambda *_: asked.set())
        place = owner._remote.session.peer_process
        owned: Any = SimpleNamespace(peer_process=place)
        work = asked_by(owned, process.succession.take_over([ref._call.holder.id]))
        taking = asyncio.ensure_future(work)
        await asked.wait()
        taking.cancel()  # as the end of the connection does
        await asyncio.wait([taking])
    with pytest.raises(zc.ObjectLost, match="has ended in order, and it could not be taken over: it had not come"):
        await ref
