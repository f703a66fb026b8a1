"""zcactor: actors whose large arrays travel by reference.

Decorate a class with `@zc.actor`, spawn it, await its methods. Arrays that are passed lie in shared memory and are
mapped by the receiver: nothing is encoded and nothing is copied that is not counted.

The map, from what users touch down to the wire:

- ``actor`` (decorators, spawning), ``handle`` (what stands for an actor), ``future`` (references and streams),
  ``arrays`` (arrays in the store), ``errors``, ``config``
- ``runtime`` (driver, node agent, zygote, workers; hosts and mailboxes)
- ``marshal`` (values to payloads and parts)
- ``rpc`` (frames, credits, sessions)
- ``objectstore`` (arena, allocator, blocks, leases)
- ``transport`` (connections between processes)

Each module imports only from those below it; ``docs/architecture.md`` tells the rest.
"""

from __future__ import annotations

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
from zcactor.arrays import asarray, empty, full, in_store, ones, zeros
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
from zcactor.runtime.loops import run

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
    "method",
    "move",
    "nodes",
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
