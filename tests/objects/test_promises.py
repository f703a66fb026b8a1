"""Promises that are passed on, and the failure of one whose value cannot be fetched."""

from __future__ import annotations

import asyncio
import gc
from pickle import UnpicklingError
from typing import Any

import pytest

import zcactor as zc
from tests.assembly.test_process import _settled
from zcactor.api.future import ObjectRef
from zcactor.api.passing import OwnRef, RefHolder
from zcactor.objects.locations import LostPart
from zcactor.peers.requests import Requests
from zcactor.rpc.call import Call


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


@pytest.mark.parametrize("error", [zc.ObjectLost("not here"), UnpicklingError("cut off")])
async def test_a_promise_whose_value_cannot_be_brought_fails(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def ask(*_: object) -> None:
        raise error

    released: list[int] = []
    holder = RefHolder(node.process.process, 7, released.append)
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "ask", ask)
        promise: ObjectRef[Any] = ObjectRef(node.process.promises.call_of(holder, "a value"))
        with pytest.raises(type(error), match=str(error)):
            await promise
    del promise, holder
    await _settled(lambda: gc.collect() * 0 + len(released), 1)


async def test_an_outcome_that_comes_another_way_ends_the_question(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def ask(*_: object) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "ask", ask)
        call = node.process.promises.call_of(RefHolder(node.process.process, 7, lambda _: None), "a value")
        promise: ObjectRef[Any] = ObjectRef(call)
        waiting = asyncio.ensure_future(promise)
        await asyncio.wait_for(asked.wait(), 20)
        call.complete_plain(5)
        assert await waiting == 5
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_failure_to_fetch_does_not_keep_the_promise_until_a_collection(
    node: zc.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: object) -> None:
        raise failure

    failure = zc.ObjectLost("not here")
    released: list[int] = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Requests, "ask", ask)
            holder = RefHolder(node.process.process, 7, released.append)
            call = node.process.promises.call_of(holder, "a value")
            del holder
            done = asyncio.get_running_loop().create_future()
            call.add_callback(lambda _: done.set_result(None))
            await done
        assert call.error is failure
        del call
        await asyncio.sleep(0)  # the fetching task, which has ended, leaves the loop
        assert released == [7], "the traceback of the error, which still lives, does not hold the promise"
    finally:
        if enabled:
            gc.enable()


async def test_a_promise_of_ours_is_exported_once_and_known_again(node: zc.Runtime) -> None:
    process = node.process
    call = Call(process.process, process.loop, process.thread)
    number = process.promises.export(call)
    assert process.promises.export(call) == number
    assert process.promises.exports[number] is call
    assert process.promises.call_of(OwnRef(call), "ours") is call
    other = Call(process.process, process.loop, process.thread)
    assert process.promises.export(other) != number
    del call
    gc.collect()
    assert number not in process.promises.exports, "nobody holds it"


async def test_one_whose_owner_is_gone_is_lost(node: zc.Runtime) -> None:
    lost: ObjectRef[Any] = ObjectRef(node.process.promises.call_of(LostPart("it was freed"), "a value"))
    with pytest.raises(zc.ObjectLost, match="it was freed"):
        await lost
    gone: ObjectRef[Any] = ObjectRef(node.process.promises.call_of(RefHolder(b"x" * 16, 7, lambda _: None), "a value"))
    with pytest.raises(zc.ObjectLost, match="the process that owns a value is gone"):
        await gone
