"""Ranks that are killed. It is apart from the actor, whose processes need not import pytest."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

import zcactor as zc

__all__ = ["survivors_of_a_kill"]


async def survivors_of_a_kill(group: zc.Group, actors: list[Any], rng: random.Random, *args: Any) -> list[Any]:
    """Kill one of the ranks at any moment while all reduce with `args` of `Rank.many`, after the number. Returns the
    others, whose numbers of results differ by one at most."""
    victim = rng.randrange(len(actors))
    pid = await actors[victim].pid()
    survivors = [actor for rank, actor in enumerate(actors) if rank != victim]
    calls = [actor.many(group, 100_000, *args) for actor in survivors]
    last = actors[victim].many(group, 100_000, *args)
    await asyncio.sleep(rng.random() * 0.1)  # a moment in the middle of the work, not one to wait for
    os.kill(pid, signal.SIGKILL)
    done = await zc.get(calls, timeout=30)
    assert max(done) - min(done) <= 1
    with pytest.raises(zc.ActorDied):
        await last
    return survivors
