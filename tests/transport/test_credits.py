"""Credits between two ends: the receive queue is never overrun, and no end waits for ever."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zcactor.errors import ProtocolError
from zcactor.rpc.messages import UNCREDITED, Kind
from zcactor.transport.credits import Credits

MIN_DEPTH, MAX_DEPTH = 3, 65535


@pytest.mark.parametrize("depth", [-1, 0, MIN_DEPTH - 1, MAX_DEPTH + 1])
def test_impossible_depth(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth is {depth} frames"):
        Credits(depth)


@pytest.mark.parametrize("depth", [MIN_DEPTH, 4, 5, 64, MAX_DEPTH])
def test_window_is_taken_and_returned(depth: int) -> None:
    account = Credits(depth)
    assert account.window == depth - 2
    for _ in range(account.window):
        assert account.take()
    assert not account.take()
    account.returned(account.window)
    assert account.take()


def test_more_returned_than_outstanding() -> None:
    account = Credits(10)
    assert account.take()
    with pytest.raises(ProtocolError, match="returned 2 credits, but only 1"):
        account.returned(2)
    account.returned(1)
    assert account.available == account.window


def test_more_received_than_the_window() -> None:
    account = Credits(5)
    for _ in range(3):
        account.consumed()
    with pytest.raises(ProtocolError, match="window of 3"):
        account.consumed()


@pytest.mark.parametrize(("depth", "due_at"), [(3, 1), (4, 2), (5, 2), (6, 3), (10, 5)])
def test_due_beyond_half_of_the_window(depth: int, due_at: int) -> None:
    account = Credits(depth)
    for owed in range(1, account.window + 1):
        account.consumed()
        assert account.owed == owed
        assert account.due == (owed >= due_at)
    assert account.take_owed() == account.window
    assert account.owed == 0
    assert not account.due


class TwoEnds(RuleBasedStateMachine):
    """Two accounts joined by two queues. A frame is (kind, credits returned) and stays queued until it is consumed."""

    @initialize(depth=st.integers(MIN_DEPTH, 12))
    def open(self, depth: int) -> None:
        self.depth = depth
        self.ends = (Credits(depth), Credits(depth))
        self.queues: tuple[deque[tuple[Kind, int]], ...] = (deque(), deque())  # queues[i]: frames towards end i
        self.said_goodbye = [False, False]

    def put(self, end: int, kind: Kind) -> None:
        self.queues[1 - end].append((kind, self.ends[end].take_owed()))

    def get(self, end: int) -> None:
        kind, count = self.queues[end].popleft()
        self.ends[end].returned(count)
        if kind not in UNCREDITED:
            self.ends[end].consumed()

    def acknowledge_due(self, end: int) -> None:
        if self.ends[end].due and not self.said_goodbye[end]:
            self.put(end, Kind.CREDIT)

    @rule(end=st.integers(0, 1), frames=st.integers(1, 12))
    def send(self, end: int, frames: int) -> None:
        for _ in range(frames):
            if not self.said_goodbye[end] and self.ends[end].take():
                self.put(end, Kind.CALL)

    @rule(end=st.integers(0, 1), frames=st.integers(1, 12), prompt=st.booleans())
    def receive(self, end: int, frames: int, prompt: bool) -> None:
        for _ in range(min(frames, len(self.queues[end]))):
            self.get(end)
            if prompt:
                self.acknowledge_due(end)

    @rule(end=st.integers(0, 1))
    def acknowledge(self, end: int) -> None:
        self.acknowledge_due(end)

    @precondition(lambda self: not any(self.said_goodbye))
    @rule(end=st.integers(0, 1))
    def nobody_is_stuck_when_all_is_consumed(self, end: int) -> None:
        self.acknowledge_due(end)
        self.acknowledge_due(1 - end)
        while self.queues[0] or self.queues[1]:
            for side in (end, 1 - end):
                if self.queues[side]:
                    self.get(side)
                    self.acknowledge_due(side)
        for account in self.ends:
            assert account.available > 0

    @rule(end=st.integers(0, 1))
    def goodbye(self, end: int) -> None:
        if not self.said_goodbye[end]:
            self.put(end, Kind.GOODBYE)
            self.said_goodbye[end] = True

    @invariant()
    def receive_queue_is_never_overrun(self) -> None:
        for queue in self.queues:
            assert len(queue) <= self.depth

    @invariant()
    def every_credit_is_somewhere(self) -> None:
        for end, account in enumerate(self.ends):
            on_the_way = sum(1 for kind, _ in self.queues[1 - end] if kind not in UNCREDITED)
            on_the_way += sum(count for _, count in self.queues[end])
            assert account.available + on_the_way + self.ends[1 - end].owed == account.window


TwoEnds.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTwoEnds = pytest.mark.slow(TwoEnds.TestCase)
