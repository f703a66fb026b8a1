"""`graph` and `Graph`: calls of actors' methods that are written down once and run many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zcactor.api.binding import GraphNode, building
from zcactor.api.operation import operation
from zcactor.exception_pickling import shown_class
from zcactor.graphs.compiled import CompiledGraph
from zcactor.graphs.layout import lay_out
from zcactor.graphs.runs import Runs
from zcactor.process.context import current
from zcactor.process.spinning import check_spin

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Token

    from zcactor.api.binding import Owning

__all__ = ["Graph", "graph"]


class _Limits:
    """The dtype and the shape that an input accepts."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> None:
        self._dtype = dtype
        self._shape = shape

    def check(self, index: int, value: Any) -> None:
        """Check the value of input number `index`.

        Raises:
            TypeError: it is no array, or has another dtype.
            ValueError: it has another shape.
        """
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        if dtype is None or shape is None:
            raise TypeError(f"input {index} of the graph takes arrays; the value is of type {shown_class(type(value))}")
        if self._dtype is not None and dtype != self._dtype:
            raise TypeError(f"input {index} of the graph takes arrays of {self._dtype}; the value has dtype {dtype}")
        if self._shape is not None and tuple(shape) != self._shape:
            raise ValueError(f"input {index} of the graph takes shape {self._shape}; the value has {tuple(shape)}")


class Graph:
    """A graph that is being written down; `zcactor.graph` makes it, for ``async with``."""

    def __init__(self, in_flight: int, spin_us: float) -> None:
        self._in_flight = in_flight
        self._spin_us = spin_us
        self._nodes: list[GraphNode] = []
        self._outputs: list[GraphNode] = []
        self._token: Token[Owning | None] | None = None

    async def __aenter__(self) -> Self:
        self._token = building.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._token is not None:
            building.reset(self._token)
            self._token = None

    def add(self, node: GraphNode) -> None:
        """Take note of a node, which `input` or ``bind`` has made."""
        self._nodes.append(node)

    def input(self, dtype: Any = None, shape: Sequence[int] | None = None) -> GraphNode:
        """Make an input, whose value comes with each run.

        Args:
            dtype: a dtype, or a value that ``np.dtype`` makes one of; None for any value.
            shape: of the array; None for any.

        Raises:
            TypeError: `dtype` is no dtype, or `shape` is no sequence of integers.
            ValueError: a negative length.
        """
        sizes = None
        if shape is not None:
            if isinstance(shape, int | str) or not all(isinstance(each, int | np.integer) for each in shape):
                raise TypeError(f"Graph.input: shape is {shape!r}; it takes a sequence of integers, or None")
            sizes = tuple(int(each) for each in shape)
            if any(each < 0 for each in sizes):
                raise ValueError(f"Graph.input: shape is {sizes}; lengths are at least 0")
        limits = None if dtype is None and sizes is None else _Limits(None if dtype is None else np.dtype(dtype), sizes)
        return GraphNode(self, None, None, limits=limits)

    def output(self, *nodes: GraphNode) -> None:
        """Name the results of a run, in their order. Further calls add to them.

        Raises:
            TypeError: an element is no node.
            ValueError: a node of another graph, or one that is an output already.
        """
        for node in nodes:
            if type(node) is not GraphNode:
                raise TypeError(
                    f"Graph.output takes nodes, not {shown_class(type(node))}: handle.method.bind() makes one"
                )
            if node._graph is not self:
                raise ValueError(f"Graph.output: {node!r} belongs to another graph")
            if any(node is each for each in self._outputs):
                raise ValueError(f"Graph.output: {node!r} is an output already")
            self._outputs.append(node)

    @operation
    async def compile(self) -> CompiledGraph:
        """Connect the processes of the actors along the edges, and give each its methods and their constants. Runs
        connect nothing and look up nothing.

        Returns:
            The graph, ready to run. It does not change with what is added here later.

        Raises:
            NotInitialized: no runtime is running.
            ValueError: there is no output, or a node that no output needs.
            ActorDied: an actor is dead.
            ConnectionLost: a process is not reached.
            Exception: the error of packing a constant.
            RemoteError: the error of unpickling a constant in an actor's process, or of a reference among them.

        Cancelling leaves nothing behind.
        """
        process = current()
        layout = lay_out(self._nodes, self._outputs)

        graphs = process.graphs()
        runs = Runs(graphs, layout, self._in_flight, self._spin_us)
        await runs.compile()
        graphs.add(runs)
        return CompiledGraph(runs)


def graph(*, in_flight: int = 4, spin_us: float = 0.0) -> Graph:
    """Write down calls that are made again and again, with the same actors and the same edges between them::

        async with zc.graph() as g:
            image = g.input()
            g.output(joiner.join.bind(left.half.bind(image), right.half.bind(image)))
        run = await g.compile()
        result = await run(pixels)

    A run sends one frame along each edge, from actor to actor, and nothing passes the program but inputs and outputs.
    Compare `CompiledGraph.map` for a series of runs. An exception skips the methods that need its value, in that run
    alone, and is raised by the run's reference.

    Args:
        in_flight: runs that are under way at the same time, at most; later ones wait in the program.
        spin_us: microseconds for which the processes stay awake after each message, so that the next one costs no
            wake-up. Each of them keeps a processor busy for that time: use it where every actor has its own. 0 costs
            nothing.

    Raises:
        TypeError: `in_flight` is no integer, or `spin_us` no number.
        ValueError: `in_flight` is below 1, or `spin_us` negative.

    The idea is that of Ray's compiled graphs; these need no spinning processor and no channel of their own.
    """
    if isinstance(in_flight, bool) or not isinstance(in_flight, int):
        raise TypeError(f"zc.graph: in_flight is {in_flight!r}, and must be an integer")
    if in_flight < 1:
        raise ValueError(f"zc.graph: in_flight is {in_flight}, and must be at least 1")
    return Graph(in_flight, check_spin(spin_us, "zc.graph"))
