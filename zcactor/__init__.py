"""zcactor: actors whose large arrays travel by reference.

Decorate a class with `@zc.actor`, spawn it, await its methods. Arrays that are passed lie in shared memory and are
mapped by the receiver: nothing is encoded and nothing is copied that is not counted.

The map, from the top layer down to the wire:

- ``cli`` (the command line), ``cluster`` (nodes that outlive a command)
- ``runtime`` (driver, node agent, zygote, workers; hosts and mailboxes)
- ``actor`` (decorators, spawning), ``handle`` (what stands for an actor), ``future`` (references and streams),
  ``arrays`` (arrays in the store), ``loading`` (from files)
- ``marshal`` (values to payloads and parts)
- ``rpc`` (frames, credits, sessions)
- ``objectstore`` (arena, allocator, blocks, leases)
- ``transport`` (connections between processes)
- ``errors``, ``config``

Each module imports only from layers below its own; ``docs/architecture.md`` tells the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zcactor import errors
from zcactor.actor import (
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
from zcactor.arrays import asarray, empty, full, in_store, numpy_allocator, ones, zeros
from zcactor.config import Config
from zcactor.errors import (
    ActorDied,
    ActorUnavailable,
    AlreadyInitialized,
    AuthenticationError,
    ConnectionLost,
    DeadlineExceeded,
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
from zcactor.future import ObjectRef, ObjectStream, get, put, wait
from zcactor.handle import ActorHandle
from zcactor.marshal import move
from zcactor.runtime.loops import run

if TYPE_CHECKING:
    from zcactor.loading import load
    from zcactor.observe.stats import Stats
    from zcactor.runtime.driver import Node, init, shutdown
    from zcactor.runtime.inspection import (
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

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorDied",
    "ActorHandle",
    "ActorInfo",
    "ActorUnavailable",
    "AlreadyInitialized",
    "AuthenticationError",
    "Config",
    "ConnectionLost",
    "CurrentActor",
    "DeadlineExceeded",
    "InsufficientResources",
    "MailboxFull",
    "NameTaken",
    "NoSuchActor",
    "Node",
    "NodeInfo",
    "NotInitialized",
    "ObjectLost",
    "ObjectRef",
    "ObjectStream",
    "OutOfMemory",
    "PeerPath",
    "ProtocolError",
    "RemoteError",
    "Stats",
    "VersionMismatch",
    "ZcactorError",
    "__version__",
    "actor",
    "actors",
    "asarray",
    "available_resources",
    "cluster_resources",
    "current_actor",
    "empty",
    "errors",
    "explain",
    "full",
    "get",
    "get_actor",
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
    "shutdown",
    "spawn",
    "stats",
    "stop",
    "wait",
    "zeros",
]

_DRIVER, _INSPECTION = "zcactor.runtime.driver", "zcactor.runtime.inspection"
_LATER = {
    "ActorInfo": _INSPECTION,
    "Node": _DRIVER,
    "NodeInfo": _INSPECTION,
    "PeerPath": _INSPECTION,
    "Stats": "zcactor.observe.stats",
    "actors": _INSPECTION,
    "available_resources": _INSPECTION,
    "cluster_resources": _INSPECTION,
    "explain": _INSPECTION,
    "init": _DRIVER,
    "load": "zcactor.loading",
    "nodes": _INSPECTION,
    "shutdown": _DRIVER,
    "stats": _INSPECTION,
}
"""Names whose modules are imported when they are first used: a fifth of the import time, which an actor never needs."""


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'zcactor' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
