"""The log of a head: the facts that it has decided and must not forget, and the right to decide.

A head knows facts of three kinds. Some are true elsewhere, and are reported again after its end: workers, addresses,
resources in use. Some it has decided: names, detached actors, counts of restarts, members. Those it records here,
before it acts on them. And at most one head decides at a time, in its *term*, whose *epoch* is greater than that of
every term before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from zcactor.errors import ZcactorError
from zcactor.process.epochs import Deposed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = [
    "KINDS", "MAX_CHANGES", "MAX_NBYTES", "Candidate", "Change", "Deposed", "HeadLog", "HeadState", "LastingTerm",
    "LeaderAt", "LogInUse", "LogUnavailable", "LogUnusable", "Term", "applied", "check_batch", "nbytes_of",
]  # fmt: skip

KINDS: Final = ("cluster", "member", "candidate", "driver", "name", "actor", "recipe")
"""The kinds of entries."""
MAX_CHANGES: Final = 128
"""Changes in a batch: as many as a transaction of etcd has by default (--max-txn-ops)."""
MAX_NBYTES: Final = 1 << 20
"""Bytes of keys and values in a batch: below the default limit of a request to etcd (--max-request-bytes, 1.5 MiB)."""
HeadState: TypeAlias = Mapping[str, Mapping[str, bytes]]
"""The entries of a log: values by key, for each kind."""


class Change(NamedTuple):
    """A change of one entry."""

    kind: str
    """One of `KINDS`."""
    key: str
    value: bytes | None
    """The entry's new value; None removes the entry."""


class Candidate(msgspec.Struct, frozen=True):
    """A process that would lead."""

    address: str
    """The address at which it listens, ``host:port``."""
    host: str
    """The name of its host."""
    pid: int


class LeaderAt(NamedTuple):
    """The leader of a cluster."""

    epoch: int
    address: str


class LogUnavailable(ZcactorError):
    """The log could not take in or tell something now. Nothing of it was done.

    Args:
        log: the log's name: a path, for instance.
        why: the reason.
    """

    def __init__(self, log: str, why: str) -> None:
        super().__init__(f"{log}: {why}")
        self.log = log


class LogUnusable(ZcactorError):
    """The log cannot be used as it is. The message names what is wrong and the remedy."""


class LogInUse(LogUnusable):
    """Another head uses the log.

    Args:
        log: the log's name.
        holder: the head that uses it; None where that has not written it down yet.
    """

    def __init__(self, log: str, holder: Candidate | None) -> None:
        who = "another head" if holder is None else f"the head at {holder.address} on {holder.host} (pid {holder.pid})"
        super().__init__(f"{log} is in use by {who}: stop that, or give this head another folder")
        self.holder = holder


class Term(Protocol):
    """The right to decide."""

    epoch: int
    """Greater than that of every earlier term of this cluster."""

    def valid_until(self) -> float:
        """The time until which nobody else can lead, in seconds of CLOCK_BOOTTIME; infinite where only the end of this
        process ends the term, and negative infinity once the log has said that the term is over."""
        ...


class LastingTerm:
    """A term that lasts until its holder ends it, or the holder's process ends."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def valid_until(self) -> float:
        """For ever."""
        return math.inf


class HeadLog(Protocol):
    """The log of the heads of one cluster."""

    recipe_nbytes: int
    """Bytes of the largest recipe that this log keeps. Larger recipes are held by agents, and the log names these."""

    async def campaign(self, me: Candidate) -> Term:
        """Wait until this process leads.

        Raises:
            LogInUse: another head uses a log for which nobody can wait.
            LogUnusable: the log cannot be used as it is.
            LogUnavailable: the log does not answer.

        Cancelling gives the candidacy up.
        """
        ...

    async def load(self, term: Term) -> HeadState:
        """All entries, as of a moment within the term.

        Raises:
            Deposed: the term is over.
            LogUnavailable: the log does not answer.
            LogUnusable: an entry is not of a holder of the cluster's token.
        """
        ...

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        """Make the changes, all or none of them. They are durable when this returns.

        Raises:
            Deposed: the term is over, and nothing was changed.
            LogUnavailable: the log cannot take them, and nothing was changed.
            ValueError: the batch has an unknown kind, or is too large; see `check_batch`.

        Cancelling waits no further; the changes may be made all the same.
        """
        ...

    def leaders(self) -> AsyncIterator[LeaderAt | None]:
        """The leader, at once and at each change; None while there is no leader. A slow reader misses intermediate
        ones."""
        ...

    async def resign(self, term: Term) -> None:
        """End the term in order, so that the next head need not wait. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go of the log. A term that is not resigned ends as if this process had. Idempotent."""
        ...


def nbytes_of(change: Change) -> int:
    """The bytes of a change's key and value."""
    return len(change.key.encode()) + len(change.value or b"")


def check_batch(changes: Sequence[Change]) -> None:
    """Check that a log may take `changes` as one batch.

    Raises:
        ValueError: a kind is unknown, or the batch is larger than `MAX_CHANGES` or `MAX_NBYTES`.
    """
    if len(changes) > MAX_CHANGES:
        raise ValueError(f"a batch has at most {MAX_CHANGES} changes, and this has {len(changes)}")
    for change in changes:
        if change.kind not in KINDS:
            raise ValueError(f"there is no kind {change.kind!r} of entries; kinds: {', '.join(KINDS)}")
    nbytes = sum(map(nbytes_of, changes))
    if nbytes > MAX_NBYTES:
        raise ValueError(f"a batch has at most {MAX_NBYTES} bytes of keys and values, and this has {nbytes}")


def applied(state: HeadState, changes: Sequence[Change]) -> dict[str, dict[str, bytes]]:
    """The entries after `changes`, in their order; `state` is left as it is."""
    after = {kind: dict(entries) for kind, entries in state.items()}
    for kind, key, value in changes:
        entries = after.setdefault(kind, {})
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value
        if not entries:
            del after[kind]
    return after
