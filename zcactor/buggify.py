"""Places where the unlikely is done on purpose in a simulation, so that rare paths are taken often.

The idea is FoundationDB's macro of that name ("FoundationDB: A Distributed Unbundled Transactional Key Value Store",
SIGMOD 2021, section 4). Whatever is done at such a place has to be right at any time: being late, or going a longer
way. Outside of a simulation nothing happens. No place is on the way of every call.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["buggify", "dawdle", "decided_by"]

DAWDLE: Final = 0.05
"""Seconds by which something is late."""
_decide: Callable[[str], bool] | None = None


def buggify(place: str) -> bool:
    """Whether to do the unlikely at `place`, this time. False outside of `decided_by`."""
    return _decide is not None and _decide(place)


async def dawdle(place: str) -> None:
    """Be late by `DAWDLE` seconds where `buggify` says so."""
    if buggify(place):
        await asyncio.sleep(DAWDLE)


@contextlib.contextmanager
def decided_by(decide: Callable[[str], bool]) -> Iterator[None]:
    """Ask `decide` at each place inside the block, in every thread: for simulations alone."""
    global _decide
    before, _decide = _decide, decide
    try:
        yield
    finally:
        _decide = before
