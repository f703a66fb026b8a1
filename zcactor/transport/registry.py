"""The registry of transports: for each name of the setting ``transports`` the way to make its endpoints.

`zcactor.config.TRANSPORTS` has the names, in the default order of preference, and the module of each. The module's
``TRANSPORT`` is a `Transport`. A module is imported when a process needs its transport.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from zcactor.config import TRANSPORTS, security_of
from zcactor.errors import AuthenticationError
from zcactor.folders import NoFolder, expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.transport.base import Endpoint
    from zcactor.transport.stream.tls import Tls

__all__ = ["SUFFIXES", "EndpointSettings", "OwnArena", "OwnStore", "Transport", "prefers_host", "tls_of", "transport"]

SUFFIXES: Final = ("sock", *TRANSPORTS)
"""Suffixes of the files by which a process is found in a run directory."""


class OwnArena(Protocol):
    """The arena of this process; see `zcactor.objectstore.arena.Arena`."""

    @property
    def fd(self) -> int:
        """The memfd, which stays the arena's."""

    @property
    def address(self) -> int:
        """Its address in this process."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    def pin(self, offset: int, nbytes: int) -> None:
        """Allocate memory for these bytes, and never return it to the system."""


class OwnStore(Protocol):
    """The objects of this process; see `zcactor.objectstore.store.Store`."""

    @property
    def arena(self) -> OwnArena:
        """The memory that peers map and read."""

    def lookup(self, object_id: int, /) -> Any:
        """The object with that id, which has `offset` and `nbytes`; None without such an object. From any thread."""

    def supply_extents(self, reader: bytes, places: Collection[int]) -> Any:
        """The extents of GPU memory around places, for a peer."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The facts that an endpoint is made from."""

    config: Config
    """The settings of the process."""
    names: Sequence[str]
    """The transports of the process, the preferred one first."""
    directory: Path
    """The run directory."""
    process: bytes
    """16 random bytes that name the process."""
    token: bytes
    """The secret that the peers hold as well."""
    store: OwnStore
    """The store that peers map and read."""
    authorize: Callable[[Any, int, int, int], object]
    """``authorize(receiver, object_id, offset, nbytes)`` returns an object that keeps these bytes; None where the peer
    may not read them. From any thread."""
    port: int = 0
    """The port at which to listen for peers on other hosts; 0 lets the system choose."""
    apart: str = ""
    """As for `zcactor.transport.local.endpoint.LocalEndpoint`."""

    @property
    def tls(self) -> Tls | None:
        """See `tls_of`."""
        return tls_of(self.config)


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport as its module registers it."""

    make: Callable[[EndpointSettings], Endpoint]
    """The function that makes the endpoint of a process, not started."""
    by_name: bool = False
    """As of its endpoints: whether it connects the processes of one host alone, by their names. Processes that prefer
    it, and have no peers on other hosts, need no further transport."""
    shares: str = ""
    """The transport that it shares an endpoint with, where it has one that falls back to that. The endpoint is that of
    the first one in the order of preference. Empty where it has an endpoint of its own."""
    preload: Callable[[], None] | None = None
    """The function that imports the further modules which connections need, so that forks of this process have them."""


def transport(name: str) -> Transport:
    """Find a transport, and import its module.

    Args:
        name: one of `zcactor.config.TRANSPORTS`.
    """
    found: Transport = import_module(TRANSPORTS[name]).TRANSPORT
    return found


def prefers_host(transports: str) -> bool:
    """Whether processes of one host prefer to map each other's arenas, and need no other transport between them.

    Args:
        transports: the setting.
    """
    return transport(transports.partition(",")[0]).by_name


def tls_of(config: Config) -> Tls | None:
    """The TLS settings for connections between hosts; None where `config` sets no TLS.

    Raises:
        AuthenticationError: the folder is not as it should be; see `zcactor.transport.stream.tls.load_tls`.
    """
    named = security_of(config.security).tls
    if named is None:
        return None
    from zcactor.transport.stream.tls import load_tls

    try:
        folder = expanded(named, os.environ)
    except NoFolder as error:
        raise AuthenticationError(f"security is {config.security!r}: {error}, or name the folder in full") from error
    return load_tls(folder)
