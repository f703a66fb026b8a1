"""Where ids of processes, actors and objects come from: random numbers that a peer cannot guess.

Everything that is named at random is named here, so that one number can decide all names of a simulated run
(`zcactor.simulation`). Keys, nonces and tokens are no names: they are drawn from the system where they are used.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

__all__ = ["bits", "drawn_from", "token"]

_source: random.Random = secrets.SystemRandom()


def token(nbytes: int = 16) -> bytes:
    """`nbytes` random bytes."""
    return _source.getrandbits(8 * nbytes).to_bytes(nbytes, "little")


def bits(count: int) -> int:
    """A number of `count` random bits."""
    return _source.getrandbits(count)


@contextlib.contextmanager
def drawn_from(source: random.Random) -> Iterator[None]:
    """Draw from `source` inside the block, in every thread: for simulations alone, whose ids anybody may foretell."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
