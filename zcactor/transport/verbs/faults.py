"""What a fake fabric can be told to get wrong, and who may look on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.transport.verbs.base import Receive, Send

__all__ = ["FAILING", "Faults", "Watcher"]

FAILING: Final = (
    "register", "ibv_dereg_mr", "create_queue_pair", "destroy_queue_pair", "connect", "to_error", "reset", "post_sends",
    "post_reads", "post_receives", "poll", "arm", "drain_events", "async_events",
)  # fmt: skip
"""Calls that `Faults.fail` can have fail."""


@dataclass(slots=True)
class _Failure:
    """One that is to come."""

    error: Exception
    after: int
    share: float


class Watcher(Protocol):
    """Sees every message, and every receive that is posted, when it is. Queues are those of
    `zcactor.transport.verbs.fake`."""

    def sent(self, qp: Any, send: Send) -> None:
        """`qp` posts `send`, which the fabric has not touched yet."""

    def took(self, qp: Any, peer: Any, send: Send, receive: Receive) -> None:
        """`send` of `qp` arrives at `peer`, in `receive`."""

    def posted(self, srq: Any, receives: Sequence[Receive]) -> None:
        """`receives` are in the queue."""

    def missed(self, qp: Any, peer: Any) -> None:
        """A message of `qp` found no receive at `peer`."""


class Faults:
    """Failures that are to come, one for each kind of call."""

    def __init__(self) -> None:
        self.to_come: dict[str, _Failure] = {}
        """By call. Empty for most of the time: what is called for each message looks first, and asks only then."""

    def fail(self, call: str, error: Exception, *, after: int = 0, share: float = 0.0) -> None:
        """Have one call of that kind, on any device, raise `error`. What it was to destroy stays.

        Args:
            call: one of `FAILING`.
            error: raised once.
            after: calls that go well before.
            share: of a chain: how much of it is posted all the same, from 0 to 1.
        """
        self.to_come[call] = _Failure(error, after, share)

    @property
    def failed(self) -> bool:
        """Whether every failure that was wished for has happened."""
        return not self.to_come

    def meet(self, call: str) -> _Failure | None:
        """The failure of this call, if it is to fail."""
        failure = self.to_come.get(call)
        if failure is None:
            return None
        failure.after -= 1
        return self.to_come.pop(call) if failure.after < 0 else None

    def check(self, call: str) -> None:
        """Raise the failure of this call, if it is to fail."""
        failure = self.meet(call)
        if failure is not None:
            raise failure.error
