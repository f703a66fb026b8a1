"""The explanation of a compiled graph: its edges, with what travels on each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GraphEdge", "GraphPlan"]


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """One edge of a graph: from the maker of a value to a method that takes it, or to the program."""

    source: str
    """``"input 0"``, ``"the start"`` of a run, or the method that makes the value."""
    target: str
    """The method that takes it, or ``"output"``."""
    transport: str
    """The kind of the connection: ``"local"`` (mapped memory), ``"tcp"``, ``"verbs"``, ``"loopback"``, or ``"same
    process"``; empty while the graph is not compiled because an actor is being restarted."""
    nbytes: int
    """Bytes of the arrays of its largest value so far; 0 before the first run, and for values without arrays."""
    blocks: int
    """Blocks of memory that hold its values at the same time, as far as nobody keeps one: one for each run in flight;
    0 for values that travel in frames."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The edges of a compiled graph. ``str()`` is a table."""

    edges: tuple[GraphEdge, ...]
    in_flight: int
    """Runs that are under way at the same time, at most."""

    def __str__(self) -> str:
        rows = [("edge", "transport", "bytes", "blocks")]
        rows += [
            (f"{edge.source} -> {edge.target}", edge.transport, f"{edge.nbytes:,}", str(edge.blocks))
            for edge in self.edges
        ]
        first, second = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
        lines = [f"{a:<{first}}  {b:<{second}}  {c:>15}  {d:>6}" for a, b, c, d in rows]
        return "\n".join([f"graph with {self.in_flight} runs in flight at most", *lines])
