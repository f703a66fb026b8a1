"""Bound calls: a method of an actor with its arguments, as a node of a graph that runs many times."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.api.remote_actor import RemoteActor
    from zcactor.interface import MethodSpec

__all__ = ["GraphNode", "Owning", "bind", "building"]


class Owning(Protocol):
    """The graph of a node, as nodes know it; see `zcactor.graphs.graph.Graph`."""

    def add(self, node: GraphNode) -> None:
        """Take note of a node."""


building: ContextVar[Owning | None] = ContextVar("zcactor_building", default=None)
"""The graph whose ``async with`` block runs: a node without nodes among its arguments belongs to it."""


class GraphNode:
    """One value of each run of a graph: an input of the graph, or the result of a method.

    `zcactor.graphs.graph.Graph.input` and ``handle.method.bind()`` make nodes. A node is an argument of further
    ``bind`` calls, and the graph's ``output``. It belongs to its graph, and travels nowhere.
    """

    __slots__ = ("__weakref__", "_args", "_graph", "_kwargs", "_limits", "_remote", "_spec")

    def __init__(
        self, graph: Owning, remote: RemoteActor | None, spec: MethodSpec | None, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None, limits: Any = None,
    ) -> None:  # fmt: skip
        self._graph = graph
        self._remote = remote
        """The actor; None for an input."""
        self._spec = spec
        self._args = args
        self._kwargs = dict(kwargs or {})
        self._limits = limits
        """The dtype and shape that an input accepts; None for all, and for a method."""
        graph.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a GraphNode stands for one value of each run, and travels nowhere: give it to bind() as an argument, not "
            "within a list or another container"
        )

    def __repr__(self) -> str:
        return f"<graph node {self._spec.label if self._spec is not None else 'input'}>"


def bind(remote: RemoteActor, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GraphNode:
    """Make the node of a method's call.

    Raises:
        TypeError: the arguments do not fit the method's signature, or a node lies within a container.
        ValueError: the nodes among the arguments belong to different graphs, or there is none and no graph is being
            built.
    """
    spec.check(args, kwargs)
    graph = building.get()
    first: GraphNode | None = None
    for value in (*args, *kwargs.values()):
        if type(value) is not GraphNode:
            if issubclass(type(value), list | tuple | set) and any(type(each) is GraphNode for each in value):
                raise TypeError(
                    f"{spec.label}.bind(): a node lies within a {type(value).__name__}; give each node as an argument "
                    "of its own"
                )
            continue
        if first is not None and value._graph is not first._graph:
            raise ValueError(f"{spec.label}.bind(): {first!r} and {value!r} belong to different graphs")
        if first is None:
            first, graph = value, value._graph
    if graph is None:
        raise ValueError(
            f"{spec.label}.bind(): no argument is a node, and no graph is being built; bind within "
            "'async with zc.graph() as g:'"
        )
    return GraphNode(graph, remote, spec, args, kwargs)
