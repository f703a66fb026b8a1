"""Waiting for many references: `zc.get` and `zc.wait`."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import tests.api.test_future as awaiting
import zcactor as zc
from tests.actors import Probe

pytestmark = pytest.mark.asyncio(loop_scope="module")

node, actors = awaiting.node, awaiting.actors


async def test_get(actors: Any) -> None:
    plain, _, _ = actors
    ref = plain.echo(1)
    assert await zc.get([ref, plain.echo(2), ref]) == [1, 2, 1]
    assert await zc.get([]) == []
    assert await zc.get((plain.echo(3),), timeout=20) == [3]
    assert await zc.get([zc.put(5)], timeout=0) == [5]
    with pytest.raises(TypeError, match="sequence"):
        await zc.get(ref)
    with pytest.raises(TypeError, match="expected ObjectRef, got int"):
        await zc.get([ref, 3])  # type: ignore[list-item]
    probe: Any = await Probe.spawn()
    held = probe.ahold("k")
    with pytest.raises(TimeoutError, match="1 of 2"):
        await zc.get([held, ref], timeout=0.01)
    with pytest.raises(TimeoutError, match="1 of 1"):
        await zc.get([held], timeout=0)
    async with asyncio.timeout(20):
        with pytest.raises(ValueError, match="early"):
            await zc.get([held, plain.fail("early")])  # does not wait for the held call
        with pytest.raises(ValueError, match="first"):
            await zc.get([plain.fail("first"), plain.fail("second")])
    assert not held.done()
    await probe.open("k")
    assert await held == "k"


async def test_wait(actors: Any) -> None:
    plain, _, _ = actors
    probe: Any = await Probe.spawn()
    slow = [probe.ahold(str(i)) for i in range(3)]
    await probe.until("0 began", "1 began", "2 began")
    quick = plain.echo(1)
    refs = [slow[0], quick, slow[1], slow[2]]
    done, pending = await zc.wait(refs)
    assert done == [quick]
    assert pending == slow
    done, pending = await zc.wait(refs, num_returns=4, timeout=0)
    assert done == [quick]
    assert pending == slow
    done, pending = await zc.wait(slow, timeout=0.01)
    assert done == []
    assert pending == slow
    await probe.open("2")
    await slow[2]
    await probe.open("0")
    await slow[0]
    done, pending = await zc.wait(refs, num_returns=2)
    assert done == [slow[0], quick], "the input's order"
    assert pending == [slow[1], slow[2]]
    failed = plain.fail("counts as done")
    done, _ = await zc.wait([failed, slow[1]])
    assert done == [failed]
    with pytest.raises(ValueError, match="counts"):
        await failed
    for wrong in (0, -1, 5):
        with pytest.raises(ValueError, match=f"num_returns is {wrong}"):
            await zc.wait(refs, num_returns=wrong)
    other: Any
    for other in (object(), True, 1.0, None):
        with pytest.raises(TypeError, match="zc.wait: num_returns must be an int, not "):
            await zc.wait(refs, num_returns=other)
    with pytest.raises(ValueError, match="more than once"):
        await zc.wait([quick, quick])
    with pytest.raises(ValueError, match="num_returns"):
        await zc.wait([])
    for _ in range(20):
        await zc.wait([slow[1]], timeout=0)
    assert not slow[1]._call.callbacks, "polling leaves nothing behind"
    await probe.open("1")
    done, pending = await zc.wait(slow, num_returns=3, timeout=20)
    assert done == slow
    assert pending == []


async def test_cancelling_a_wait_cancels_no_call() -> None:
    probe: Any = await Probe.spawn()
    refs = [probe.ahold("k")]
    await probe.until("k began")
    for function in (zc.get, zc.wait):
        task = asyncio.create_task(function(refs))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await probe.open("k")
    assert await zc.get(refs) == ["k"]


@pytest.mark.parametrize("waits", [zc.get, zc.wait])
async def test_time_limits_are_seconds(actors: Any, waits: Any) -> None:
    plain, _, _ = actors
    for bad, error in (
        ("1", TypeError),
        (True, TypeError),
        (Decimal(1), TypeError),
        (-1, ValueError),
        (nan, ValueError),
    ):
        with pytest.raises(error, match=rf"zc\.{waits.__name__}: timeout is"):
            await waits([plain.echo(1)], timeout=bad)
    for good in (1e300, inf, 10**400, np.float32(20), np.int64(20), Fraction(39, 2)):
        assert await waits([plain.echo(1)], timeout=good)
