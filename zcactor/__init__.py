"""zcactor: actors whose large arrays travel by reference.

Decorate a class with `@zc.actor`, spawn it, await its methods. Arrays that are passed lie in shared memory, and the
receiver maps them: nothing is encoded, and every copy is counted.

The rooms, and which may import which: ``docs/explanation/architecture.md``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Type checkers on other systems would read no further behind a comparison.
if sys.platform not in ("linux",):  # noqa: FURB171
    raise ImportError(f"zcactor runs on Linux, and this is {sys.platform}: on Windows use WSL2, elsewhere a container")

from zcactor import errors
from zcactor.api.actor import (
    Actor,
    CurrentActor,
    actor,
    current_actor,
    get_actor,
    kill,
    method,
    spawn,
    stop,
)
from zcactor.api.arrays import asarray, empty, freeze, full, in_store, numpy_allocator, ones, zeros
from zcactor.api.future import ObjectRef, put
from zcactor.api.handle import ActorHandle
from zcactor.api.operation import Operation
from zcactor.api.stream import ObjectStream
from zcactor.api.waiting import get, wait
from zcactor.config import Config
from zcactor.errors import (
    ActorDied,
    ActorUnavailable,
    AlreadyInitialized,
    AuthenticationError,
    ConnectionLost,
    CopyWarning,
    DeadlineExceeded,
    DeviceError,
    DeviceUnavailable,
    GroupBroken,
    GroupMismatch,
    GroupTimeout,
    HeadUnavailable,
    InsufficientResources,
    MailboxFull,
    NameTaken,
    NoSuchActor,
    NotInitialized,
    ObjectLost,
    OutOfMemory,
    ProtocolError,
    RemoteError,
    VersionMismatch,
    ZcactorError,
)
from zcactor.marshal import move
from zcactor.process.loops import run

if TYPE_CHECKING:
    from zcactor import cluster, gpu, hooks, topology
    from zcactor.api.binding import GraphNode
    from zcactor.api.inspection import (
        ActorInfo,
        NodeInfo,
        PeerPath,
        actors,
        available_resources,
        cluster_resources,
        explain,
        nodes,
        stats,
    )
    from zcactor.collectives.cost import GroupPlan
    from zcactor.collectives.group import Group, group
    from zcactor.collectives.reducer import Reducer
    from zcactor.driver.driver import init, shutdown
    from zcactor.driver.runtimes import Runtime
    from zcactor.graphs.compiled import CompiledGraph
    from zcactor.graphs.explaining import GraphPlan
    from zcactor.graphs.graph import Graph, graph
    from zcactor.loading import load
    from zcactor.observe.stats import Stats
    from zcactor.shuffling import shuffle

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorDied",
    "ActorHandle",
    "ActorInfo",
    "ActorUnavailable",
    "AlreadyInitialized",
    "AuthenticationError",
    "CompiledGraph",
    "Config",
    "ConnectionLost",
    "CopyWarning",
    "CurrentActor",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceUnavailable",
    "Graph",
    "GraphNode",
    "GraphPlan",
    "Group",
    "GroupBroken",
    "GroupMismatch",
    "GroupPlan",
    "GroupTimeout",
    "HeadUnavailable",
    "InsufficientResources",
    "MailboxFull",
    "NameTaken",
    "NoSuchActor",
    "NodeInfo",
    "NotInitialized",
    "ObjectLost",
    "ObjectRef",
    "ObjectStream",
    "Operation",
    "OutOfMemory",
    "PeerPath",
    "ProtocolError",
    "Reducer",
    "RemoteError",
    "Runtime",
    "Stats",
    "VersionMismatch",
    "ZcactorError",
    "__version__",
    "actor",
    "actors",
    "asarray",
    "available_resources",
    "cluster",
    "cluster_resources",
    "current_actor",
    "empty",
    "errors",
    "explain",
    "freeze",
    "full",
    "get",
    "get_actor",
    "gpu",
    "graph",
    "group",
    "hooks",
    "in_store",
    "init",
    "kill",
    "load",
    "method",
    "move",
    "nodes",
    "numpy_allocator",
    "ones",
    "put",
    "run",
    "shuffle",
    "shutdown",
    "spawn",
    "stats",
    "stop",
    "topology",
    "wait",
    "zeros",
]

_DRIVER, _INSPECTION = "zcactor.driver.driver", "zcactor.api.inspection"
_COLLECTIVES = "zcactor.collectives.group"
_LATER = {
    "ActorInfo": _INSPECTION,
    "CompiledGraph": "zcactor.graphs.compiled",
    "Graph": "zcactor.graphs.graph",
    "GraphNode": "zcactor.api.binding",
    "GraphPlan": "zcactor.graphs.explaining",
    "Group": _COLLECTIVES,
    "GroupPlan": "zcactor.collectives.cost",
    "NodeInfo": _INSPECTION,
    "PeerPath": _INSPECTION,
    "Reducer": "zcactor.collectives.reducer",
    "Runtime": "zcactor.driver.runtimes",
    "Stats": "zcactor.observe.stats",
    "actors": _INSPECTION,
    "available_resources": _INSPECTION,
    "cluster_resources": _INSPECTION,
    "explain": _INSPECTION,
    "graph": "zcactor.graphs.graph",
    "group": _COLLECTIVES,
    "init": _DRIVER,
    "load": "zcactor.loading",
    "nodes": _INSPECTION,
    "shuffle": "zcactor.shuffling",
    "shutdown": _DRIVER,
    "stats": _INSPECTION,
}
"""Names whose modules are imported at first use: these take a fifth of the import time, and an actor never needs
them."""
_SUBMODULES = {"cluster", "gpu", "hooks", "topology"}
"""Public modules, imported at first use too."""

_MOVED = {"gpu_allocator": "allocator", "gpu_stream": "stream"} | {
    name: name for name in ("DeviceArray", "DevicePath", "GpuInfo", "GpuStream", "gpus", "to_device", "to_host")
}
"""Names that versions before had here, with those in `zcactor.gpu`."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"zcactor.{name}")
    module = _LATER.get(name)
    if name in _MOVED:
        raise AttributeError(f"zcactor.{name} is zcactor.gpu.{_MOVED[name]}")
    if module is None:
        raise AttributeError(f"module 'zcactor' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
