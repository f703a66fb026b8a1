"""Fault injection for simulations: places where the unlikely happens on purpose, so that rare paths are taken often.

The idea is FoundationDB's macro of that name ("FoundationDB: A Distributed Unbundled Transactional Key Value Store",
SIGMOD 2021, section 4). The behaviour injected at a place must be correct at any time, such as being late or taking a
longer way. Outside of a simulation nothing is injected. No place is on the way of every call.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["buggify", "dawdle", "decided_by"]

DAWDLE: Final = 0.05
"""Seconds of an injected delay."""
_decide: Callable[[str], bool] | None = None
injects: bool = False
"""Whether anything may be injected: for ways that are taken so often that a function for each place costs too much."""


def buggify(place: str) -> bool:
    """Whether to do the unlikely at `place` this time. Always False outside of `decided_by`."""
    return _decide is not None and _decide(place)


async def dawdle(place: str) -> None:
    """Sleep for `DAWDLE` seconds where `buggify` says so."""
    if buggify(place):
        await asyncio.sleep(DAWDLE)


@contextlib.contextmanager
def decided_by(decide: Callable[[str], bool]) -> Iterator[None]:
    """Let `decide` answer for each place inside the block, in every thread. For simulations only."""
    global _decide, injects
    before, _decide = _decide, decide
    injects = True
    try:
        yield
    finally:
        _decide, injects = before, before is not None
