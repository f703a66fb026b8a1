"""Planned failures of a fake fabric, and watchers of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.transport.verbs.driver.base import Receive, Send

__all__ = ["FAILING", "DeviceFaults", "Watcher"]

FAILING: Final = (
    "register", "ibv_dereg_mr", "create_queue_pair", "destroy_queue_pair", "connect", "to_error", "reset", "post_sends",
    "post_reads", "post_receives", "poll", "arm", "drain_events", "async_events",
)  # fmt: skip
"""Calls that `DeviceFaults.fail` accepts, besides ``"register_dma_buf"``, which is for arrays on GPUs only."""


@dataclass(slots=True)
class _Failure:
    """A planned failure."""

    error: Exception
    after: int
    share: float


class Watcher(Protocol):
    """A watcher of all messages and posted receives. Queues are those of `zcactor.transport.verbs.driver.fake`."""

    def sent(self, qp: Any, send: Send) -> None:
        """Note that `qp` posts `send`, which the fabric has not processed yet."""

    def took(self, qp: Any, peer: Any, send: Send, receive: Receive) -> None:
        """Note that `send` of `qp` arrives at `peer`, in `receive`."""

    def posted(self, srq: Any, receives: Sequence[Receive]) -> None:
        """Note that `receives` are in the queue."""

    def missed(self, qp: Any, peer: Any) -> None:
        """Note that a message of `qp` found no receive at `peer`."""


class DeviceFaults:
    """Planned failures, one for each kind of call."""

    def __init__(self) -> None:
        self.to_come: dict[str, _Failure] = {}
        """Planned failures by call. Mostly empty, so calls for each message check this before they call `check`."""

    def fail(self, call: str, error: Exception, *, after: int = 0, share: float = 0.0) -> None:
        """Make one call of that kind, on any device, raise `error`. An object that it would destroy stays.

        Args:
            call: one of `FAILING`.
            error: raised once.
            after: number of calls that succeed before.
            share: part of a chain, from 0 to 1, that is posted nevertheless.
        """
        self.to_come[call] = _Failure(error, after, share)

    @property
    def failed(self) -> bool:
        """Whether all planned failures have happened."""
        return not self.to_come

    def meet(self, call: str) -> _Failure | None:
        """Take the planned failure of this call, if it is due."""
        failure = self.to_come.get(call)
        if failure is None:
            return None
        failure.after -= 1
        return self.to_come.pop(call) if failure.after < 0 else None

    def check(self, call: str) -> None:
        """Raise the planned failure of this call, if it is due."""
        failure = self.meet(call)
        if failure is not None:
            raise failure.error
