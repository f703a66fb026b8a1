"""`zc.put`, `zc.get` and `zc.wait` keep the type of the value that a reference refers to."""

from __future__ import annotations

import asyncio
from typing import assert_type

import zcactor as zc


async def right() -> None:
    number = zc.put(3)
    assert_type(number, zc.ObjectRef[int])
    assert_type(await number, int)
    assert_type(await zc.get([number, number]), list[int])
    done, pending = await zc.wait([number], num_returns=1, timeout=0.5)
    assert_type(done, list[zc.ObjectRef[int]])
    assert_type(pending, list[zc.ObjectRef[int]])
    async with asyncio.timeout(1):
        assert_type(await number, int)
    wide: zc.ObjectRef[float] = number
    print(wide)


async def wrong() -> None:
    text: zc.ObjectRef[str] = zc.put(3)  # expect: mypy[arg-type] pyright[reportAssignmentType]
    values: list[str] = await zc.get([zc.put(3)])  # expect: mypy[arg-type] pyright[reportAssignmentType]
    await zc.get([zc.put(3)], timeot=1)  # expect: mypy[call-arg] pyright[reportCallIssue]
    print(text, values)
