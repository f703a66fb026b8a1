"""The layout of a graph: its nodes in the order in which they can run, and what each process has to do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.api.binding import GraphNode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zcactor.api.remote_actor import RemoteActor
    from zcactor.interface import MethodSpec

__all__ = ["MAX_NODES", "RUN_BITS", "GraphLayout", "GraphStep", "NodeSlot", "Task", "lay_out", "tasks_of"]

RUN_BITS: Final = 40
"""Bits of an edge's key that count runs: a million runs a second last for 12 days, and a graph is compiled anew then.
The bits above name the node."""
MAX_NODES: Final = 1 << 20
"""Nodes of a graph, at most: a frame names one in the remaining bits of its key."""


class NodeSlot(NamedTuple):
    """An argument whose value comes with each run."""

    node: int


class GraphStep(NamedTuple):
    """One method of a graph."""

    number: int
    remote: RemoteActor
    spec: MethodSpec
    args: tuple[Any, ...]
    """Constants, and a `NodeSlot` in the place of each node."""
    kwargs: Mapping[str, Any]
    needs: tuple[int, ...]
    """The numbers of the nodes whose values it takes, each once."""


class GraphLayout(NamedTuple):
    """A graph whose nodes are numbered: inputs, then the start of each run, then methods behind what they need."""

    inputs: tuple[GraphNode, ...]
    steps: tuple[GraphStep, ...]
    outputs: tuple[int, ...]

    @property
    def start(self) -> int:
        """The number of the node whose value tells methods without another node that a run begins."""
        return len(self.inputs)

    def label(self, number: int) -> str:
        """The name of a node in messages."""
        if number < self.start:
            return f"input {number}"
        return "the start" if number == self.start else self.steps[number - self.start - 1].spec.label


def lay_out(nodes: Sequence[GraphNode], outputs: Sequence[GraphNode]) -> GraphLayout:
    """Number the nodes of a graph, which were made in an order in which they can run.

    Raises:
        ValueError: there is no output, there are too many nodes, or a node is needed by no output.
    """
    if not outputs:
        raise ValueError("a graph without outputs has no result: name its outputs with g.output(node, ...)")
    if len(nodes) >= MAX_NODES:
        raise ValueError(f"the graph has {len(nodes)} nodes; {MAX_NODES - 1} are possible")
    inputs = tuple(node for node in nodes if node._remote is None)
    methods = [node for node in nodes if node._remote is not None]
    order = [*inputs, None, *methods]
    numbers = {id(node): number for number, node in enumerate(order) if node is not None}
    needed, left = set[int](), list(outputs)
    while left:
        node = left.pop()
        if id(node) not in needed:
            needed.add(id(node))
            left += [each for each in (*node._args, *node._kwargs.values()) if type(each) is GraphNode]
    for node in nodes:
        if id(node) not in needed:
            raise ValueError(f"no output needs {node!r}: use it, name it as an output, or leave it out")

    def slot(value: Any) -> Any:
        return NodeSlot(numbers[id(value)]) if type(value) is GraphNode else value

    steps = []
    for node in methods:
        assert node._remote is not None
        assert node._spec is not None
        args = tuple(map(slot, node._args))
        kwargs = {name: slot(value) for name, value in node._kwargs.items()}
        needs = tuple(dict.fromkeys(each.node for each in (*args, *kwargs.values()) if type(each) is NodeSlot))
        steps.append(GraphStep(numbers[id(node)], node._remote, node._spec, args, kwargs, needs or (len(inputs),)))
    return GraphLayout(inputs, tuple(steps), tuple(numbers[id(node)] for node in outputs))


class Task(NamedTuple):
    """The nodes of a graph that concern one process."""

    steps: tuple[GraphStep, ...]
    """Its methods."""
    targets: Mapping[int, tuple[bytes, ...]]
    """The processes that take the value of each node made here, by number."""
    peers: Mapping[bytes, str]
    """The names of the processes that it takes values from or gives them to, by process."""


def tasks_of(layout: GraphLayout, places: Sequence[bytes], founder: bytes) -> dict[bytes, Task]:
    """Divide a graph among the processes of its actors, and the process that runs it.

    Args:
        layout: the graph.
        places: the process of each step.
        founder: the process that gives the inputs and takes the outputs.
    """
    makers = [founder] * (layout.start + 1) + list(places)
    takers: dict[int, dict[bytes, None]] = {number: {} for number in range(len(makers))}
    for step, place in zip(layout.steps, places, strict=True):
        for number in step.needs:
            takers[number][place] = None
    for number in layout.outputs:
        takers[number][founder] = None
    names = {place: step.remote.label for step, place in zip(reversed(layout.steps), reversed(places), strict=True)}
    names[founder] = "the process that runs the graph"
    tasks = {}
    for process in dict.fromkeys([founder, *places]):
        targets = {number: tuple(to) for number, to in takers.items() if makers[number] == process and to}
        peers = {place for to in targets.values() for place in to}
        peers |= {makers[number] for number, to in takers.items() if process in to} | {founder}
        steps = tuple(step for step, place in zip(layout.steps, places, strict=True) if place == process)
        tasks[process] = Task(steps, targets, {place: names[place] for place in sorted(peers - {process})})
    return tasks
