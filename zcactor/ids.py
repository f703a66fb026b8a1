"""The source of the ids of processes, actors and objects: random numbers that a peer cannot guess.

Every random name comes from this module, so that one number can decide all names of a simulated run
(`simulation`). Keys, nonces and tokens are not names: they are drawn from the system where they are used.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ActorId", "ProcessId", "SpawnIds", "bits", "drawn_from", "for_spawn", "new_actor", "new_process", "token"]

ProcessId = NewType("ProcessId", bytes)
"""The 16 bytes that name a process to its peers."""
ActorId = NewType("ActorId", bytes)
"""The 16 bytes that name an actor, the same in all of its lives."""


class SpawnIds(NamedTuple):
    """The ids of a spawn. The spawner makes them, so that the request for a place can be repeated."""

    request: bytes
    """The 16 bytes that name the request: one that is repeated has the same."""
    actor: ActorId
    object_id: int
    """The id by which processes hold the new actor: 1 to 2**62."""


class BitSource(Protocol):
    """A generator of random numbers, such as `random.Random`."""

    def getrandbits(self, k: int, /) -> int:
        """A number of `k` random bits."""


_source: BitSource = secrets.SystemRandom()


def token(nbytes: int = 16) -> bytes:
    """`nbytes` random bytes."""
    return _source.getrandbits(8 * nbytes).to_bytes(nbytes, "little")


def new_process() -> ProcessId:
    """The id of a new process."""
    return ProcessId(token())


def new_actor() -> ActorId:
    """The id of a new actor."""
    return ActorId(token())


def for_spawn() -> SpawnIds:
    """The ids of a new spawn. The spawner makes them, so a request whose answer was lost can be asked again, and no
    actor is made twice."""
    return SpawnIds(token(), new_actor(), 1 + bits(62))


def bits(count: int) -> int:
    """A number of `count` random bits."""
    return _source.getrandbits(count)


@contextlib.contextmanager
def drawn_from(source: BitSource) -> Iterator[None]:
    """Draw from `source` inside the block, in every thread. For simulations only: anybody may foretell such ids."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
