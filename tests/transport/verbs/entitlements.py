"""The messages that peers may send, compared with the posted receives at every post of the fake device.

A credit lets the peer send a message, so a receive for it has to be in the queue from the moment in which the credit
leaves. This account is kept from the messages themselves, apart from the connections' own: the header that a
`SlotSender` writes shows whether a message takes a credit, and how many credits it takes along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest

from zcactor.transport.credits import RESERVED
from zcactor.transport.verbs.device.slots import DATA, PROBE
from zcactor.transport.verbs.driver.base import Receive, Send
from zcactor.transport.verbs.driver.codes import QpState
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair, FakeSharedReceiveQueue
from zcactor.transport.verbs.peer.sending import SlotSender

__all__ = ["Entitlements", "entitlements"]


class _End:
    """A control queue pair, as far as its messages show it."""

    def __init__(self) -> None:
        self.window = 0  # unknown until its `SlotSender` writes the first message
        self.written: dict[int, tuple[bool, int]] = {}  # by wr_id: whether it takes a credit, credits it takes along
        self.reported = 0  # credits that have left with messages
        self.arrived = 0  # messages of the peer that took a credit
        self.slots: dict[int, bool] = {}  # the peer's messages that are not posted again: whether each took a credit
        self.peer: ref[FakeQueuePair] | None = None  # weak: the two would keep each other alive


class Entitlements:
    """A watcher as `zcactor.transport.verbs.driver.faults.Watcher` describes it."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.posts = 0
        """Messages that were checked when they were posted."""
        self._ends: WeakKeyDictionary[FakeQueuePair, _End] = WeakKeyDictionary()

    def wrote(self, sender: SlotSender, kind: int, owed: int, send: Send) -> None:
        """Note that `sender` has written the header of `send`."""
        qp = sender._qp
        if isinstance(qp, FakeQueuePair):
            end = self._ends.setdefault(qp, _End())
            end.window = sender._credits.window
            end.written[send.wr_id] = kind in (DATA, PROBE), owed

    def sent(self, qp: FakeQueuePair, send: Send) -> None:
        """See `Watcher`."""
        end = self._ends.get(qp)
        if end is not None and send.wr_id in end.written:
            self.posts += 1
            end.reported += end.written[send.wr_id][1]
        self._check()

    def took(self, qp: FakeQueuePair, peer: FakeQueuePair, send: Send, receive: Receive) -> None:
        """See `Watcher`."""
        sender = self._ends.get(qp)
        if sender is not None and send.wr_id in sender.written:
            credited, _ = sender.written.pop(send.wr_id)
            end = self._ends.setdefault(peer, _End())
            end.peer = ref(qp)
            end.arrived += credited
            end.slots[receive.wr_id] = credited

    def posted(self, srq: FakeSharedReceiveQueue, receives: Sequence[Receive]) -> None:
        """See `Watcher`."""
        for qp, end in self._ends.items():
            if qp.srq is srq:
                for receive in receives:
                    end.slots.pop(receive.wr_id, None)

    def missed(self, qp: FakeQueuePair, peer: FakeQueuePair) -> None:
        """See `Watcher`."""
        if qp in self._ends and peer in self._ends:
            self.violations.append(f"a message of {qp} found no receive at {peer}")

    def _check(self) -> None:
        needed: Counter[FakeSharedReceiveQueue] = Counter()
        for qp, end in list(self._ends.items()):
            peer = None if end.peer is None else end.peer()
            if peer is None or qp.srq is None or not end.window or not qp.current == peer.current == QpState.RTS:
                continue
            kept = sum(end.slots.values())
            if kept > end.arrived - end.reported:
                self.violations.append(
                    f"{qp}: {kept} receives are not posted again, and {end.arrived - end.reported} of the messages in "
                    "them have not been reported"
                )
            out = end.window + end.reported - end.arrived
            needed[qp.srq] += out + max(0, RESERVED - (len(end.slots) - kept))
        for srq, count in needed.items():
            if len(srq.receives) < count:
                self.violations.append(f"{len(srq.receives)} receives are posted, and peers may send {count} messages")


@pytest.fixture(autouse=True)
def entitlements(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entitlements]:
    """Watch every fabric of the test, and fail the test when a peer might send without a posted receive."""
    watcher = Entitlements()
    message = SlotSender._message

    def written(self: SlotSender, kind: int, *arguments: Any) -> Send:
        owed = self._credits.owed
        send = message(self, kind, *arguments)
        watcher.wrote(self, kind, owed - self._credits.owed, send)
        return send

    monkeypatch.setattr(SlotSender, "_message", written)
    monkeypatch.setattr(FakeFabric, "watcher", watcher)
    yield watcher
    assert not watcher.violations, "\n".join(watcher.violations[:3])
