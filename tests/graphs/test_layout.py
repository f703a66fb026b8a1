"""The layout of graphs, without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.binding import GraphNode
from zcactor.graphs import layout
from zcactor.graphs.layout import NodeSlot, lay_out, tasks_of

FOUNDER, A, B = b"f" * 16, b"a" * 16, b"b" * 16


class Drawn:
    """A graph that is written down without actors."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.add = self.nodes.append

    def input(self) -> GraphNode:
        """An input."""
        return GraphNode(self, None, None)

    def call(self, name: str, *args: Any, **kwargs: Any) -> GraphNode:
        """A method."""
        remote: Any = SimpleNamespace(label=f"actor of {name}")
        return GraphNode(self, remote, SimpleNamespace(label=name), args, kwargs)  # type: ignore[arg-type]


def test_inputs_come_first_and_then_the_start() -> None:
    g = Drawn()
    alone = g.call("alone", 7)
    x = g.input()
    both = g.call("both", x, alone, flag=x)
    made = lay_out(g.nodes, [both, alone])
    assert made.inputs == (x,) and made.start == 1 and made.outputs == (3, 2)
    first, second = made.steps
    assert (first.number, first.args, first.needs) == (2, (7,), (1,))
    assert (second.args, second.kwargs, second.needs) == ((NodeSlot(0), NodeSlot(2)), {"flag": NodeSlot(0)}, (0, 2))
    assert [made.label(number) for number in range(4)] == ["input 0", "the start", "alone", "both"]


def test_one_frame_a_process_and_value() -> None:
    g = Drawn()
    x = g.input()
    left, right = g.call("left", x), g.call("right", x)
    joined = g.call("joined", left, right)
    tasks = tasks_of(lay_out(g.nodes, [joined]), [A, A, B], FOUNDER)
    assert list(tasks) == [FOUNDER, A, B]
    assert dict(tasks[FOUNDER].targets) == {0: (A,)} and not tasks[FOUNDER].steps
    assert dict(tasks[A].targets) == {2: (B,), 3: (B,)} and len(tasks[A].steps) == 2
    assert dict(tasks[B].targets) == {4: (FOUNDER,)}
    assert set(tasks[A].peers) == {FOUNDER, B} and tasks[A].peers[B] == "actor of joined"
    assert set(tasks[B].peers) == {FOUNDER, A} and set(tasks[FOUNDER].peers) == {A, B}


def test_a_program_that_hosts_its_actors_sends_to_itself() -> None:
    g = Drawn()
    made = g.call("made", g.input())
    tasks = tasks_of(lay_out(g.nodes, [made]), [FOUNDER], FOUNDER)
    assert dict(tasks[FOUNDER].targets) == {0: (FOUNDER,), 2: (FOUNDER,)} and not tasks[FOUNDER].peers


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_NODES", 3)
    g = Drawn()
    x = g.input()
    made = g.call("made", g.call("made", x))
    with pytest.raises(ValueError, match="the graph has 3 nodes; 2 are possible"):
        lay_out(g.nodes, [made])
