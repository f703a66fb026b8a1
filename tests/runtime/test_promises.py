"""Promises that are passed on: what becomes of one whose value cannot be had."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pickle import UnpicklingError
from typing import Any

import pytest

import zcactor as zc
from tests.runtime.test_process import PATIENCE, _settled
from zcactor.future import ObjectRef, OwnRef, RefHolder
from zcactor.rpc.call import Call
from zcactor.runtime.locations import LostPart
from zcactor.runtime.requests import Requests


@pytest.fixture
async def node() -> AsyncIterator[zc.Node]:
    async with asyncio.timeout(PATIENCE), zc.init() as made:
        yield made


@pytest.mark.parametrize("error", [zc.ObjectLost("not here"), UnpicklingError("cut off")])
async def test_a_promise_whose_value_cannot_be_brought_fails(
    node: zc.Node, monkeypatch: pytest.MonkeyPatch, error: Exception
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


async def test_a_promise_of_ours_is_exported_once_and_known_again(node: zc.Node) -> None:
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


async def test_one_whose_owner_is_gone_is_lost(node: zc.Node) -> None:
    lost: ObjectRef[Any] = ObjectRef(node.process.promises.call_of(LostPart("it was freed"), "a value"))
    with pytest.raises(zc.ObjectLost, match="it was freed"):
        await lost
    gone: ObjectRef[Any] = ObjectRef(node.process.promises.call_of(RefHolder(b"x" * 16, 7, lambda _: None), "a value"))
    with pytest.raises(zc.ObjectLost, match="the process that owns a value is gone"):
        await gone
