"""The workloads of a simulation: a module for each kind of program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulation.workloads.broadcast import Broadcasts
from simulation.workloads.calls import Calls
from simulation.workloads.drains import Drains
from simulation.workloads.drivers import Drivers
from simulation.workloads.handles import Handles
from simulation.workloads.head import Subjects
from simulation.workloads.moves import Moves
from simulation.workloads.names import Names
from simulation.workloads.promises import Chains
from simulation.workloads.resources import Resources
from simulation.workloads.restarts import Restarts
from simulation.workloads.storms import Storms
from simulation.workloads.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from simulation.workloads.scene import Workload

__all__ = ["WORKLOADS"]

WORKLOADS: Final[Mapping[str, type[Workload]]] = {
    each.name: each
    for each in (
        Broadcasts,
        Calls,
        Drivers,
        Handles,
        Moves,
        Names,
        Chains,
        Resources,
        Restarts,
        Storms,
        Streams,
        Drains,
        Subjects,
    )
}
"""The workloads by their names on the command line."""
