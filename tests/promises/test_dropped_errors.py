"""Errors that a program has dropped keep nothing: no frame of the runtime's in a traceback leads back to the error."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.testing import until

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


@zc.actor
class Failing:
    """An actor whose methods raise."""

    async def fail(self) -> None:
        """Raise."""
        raise ValueError("no")

    async def items(self) -> Any:
        """One item, and an error."""
        yield 1
        raise ValueError("no more")


@pytest.fixture
def collector() -> Iterator[None]:
    """No collection of garbage, which would free what is in a cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _no_such_actor(_: Any) -> None:
    await zc.get_actor("nobody")


async def _too_large(_: Any) -> None:
    await Failing.options(num_cpus=1000).spawn()


async def _two(actor: Any) -> None:
    await zc.get([actor.fail(), actor.fail()])


async def _one(actor: Any) -> None:
    await actor.fail()


async def _items(actor: Any) -> None:
    async for _ in actor.items():
        pass


async def _in_thread(actor: Any) -> None:
    def block() -> None:
        actor.fail().result(PATIENCE)

    await asyncio.to_thread(block)


async def _of_dead(actor: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
    await zc.kill(actor)
    await ask(actor)


async def _stats(actor: Any) -> None:
    await _of_dead(actor, zc.stats)


async def _explain(actor: Any) -> None:
    await _of_dead(actor, zc.explain)


async def _items_of_dead(actor: Any) -> None:
    await _of_dead(actor, _items)


ASKED = [_no_such_actor, _too_large, _two, _one, _items, _in_thread, _stats, _explain, _items_of_dead]


@pytest.mark.parametrize("ask", ASKED, ids=lambda ask: ask.__name__.strip("_"))
async def test_the_frames_of_a_dropped_error_are_let_go(
    zc_runtime: zc.Runtime, collector: None, ask: Callable[[Any], Awaitable[None]]
) -> None:
    async def asking(actor: Any) -> weakref.ref[Any]:
        array = np.ones(100_000)
        held.append(weakref.ref(array))
        await ask(actor)
        return held[0]

    held: list[weakref.ref[Any]] = []
    actor = await Failing.spawn()
    with pytest.raises((zc.ZcactorError, ValueError)) as raised:
        await asking(actor)
    del raised
    await until(lambda: held[0]() is None, "the array of the frame that the error came through")
