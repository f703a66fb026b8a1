"""The workloads of a simulation: a module for each kind of program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.simulation.workloads.broadcast import Broadcasts
from zcactor.simulation.workloads.calls import Calls
from zcactor.simulation.workloads.drains import Drains
from zcactor.simulation.workloads.drivers import Drivers
from zcactor.simulation.workloads.handles import Handles
from zcactor.simulation.workloads.head import Subjects
from zcactor.simulation.workloads.moves import Moves
from zcactor.simulation.workloads.names import Names
from zcactor.simulation.workloads.promises import Chains
from zcactor.simulation.workloads.resources import Resources
from zcactor.simulation.workloads.restarts import Restarts
from zcactor.simulation.workloads.storms import Storms
from zcactor.simulation.workloads.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.simulation.workloads.scene import Workload

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
