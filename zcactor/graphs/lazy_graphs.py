"""The way to the graphs of a process. Most processes have none, and do not import the modules for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.process.lazy_part import LazyPart

if TYPE_CHECKING:
    from zcactor.graphs.graphs import Graphs
    from zcactor.process.context import LocalProcess

__all__ = ["LazyGraphs"]


class LazyGraphs(LazyPart["Graphs"]):
    """The maker of the graphs of a process when they are first needed.

    Args:
        process: the process.
        hosts: the runners of its actors, by index.
    """

    def __init__(self, process: LocalProcess, hosts: Any) -> None:
        def make() -> Graphs:
            from zcactor.graphs.graphs import Graphs

            return Graphs(process, hosts)

        super().__init__(make)
