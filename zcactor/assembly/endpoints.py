"""The endpoint of a process, made of the registered transports that the configuration allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.config import TRANSPORTS
from zcactor.errors import AuthenticationError, ConnectionLost, HeadUnavailable
from zcactor.ids import ProcessId
from zcactor.objectstore.store import Block
from zcactor.process.cluster import MembershipService
from zcactor.transport.registry import EndpointSettings, prefers_host, transport
from zcactor.transport.stream.endpoint import ListeningEndpoint
from zcactor.transport.stream.record_layer import REMEDY, can_seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.peers.head_link import HeadLink
    from zcactor.process.places import Places
    from zcactor.transport.base import Endpoint

__all__ = [
    "address_of",
    "find_through",
    "hear_of_heads",
    "make_endpoint",
    "may_read",
    "preload",
    "problem_of",
    "tell_of_term",
]


def make_endpoint(
    config: Config, directory: Path, process: bytes, token: bytes, store: Store, *, clustered: bool = False,
    port: int = 0, apart: str = "",
) -> Endpoint:  # fmt: skip
    """The endpoint of one process of a node, not started.

    Where processes of one host prefer to map each other's arenas, they need no other transport between them. Then no
    other transport listens, unless the process has peers on other hosts.

    Args:
        config: the settings; `transports` decides.
        directory: the run directory.
        process: the process id.
        token: the secret that the peers hold as well.
        store: the store that peers map and read.
        clustered: whether the process has peers on other hosts.
        port: the port at which to listen for those; 0 lets the system choose.
        apart: see `zcactor.transport.local.endpoint.LocalEndpoint`.

    Raises:
        AuthenticationError: as for `zcactor.transport.registry.tls_of`, where transports besides `local` are used; or
            arrays are to be authenticated, and no library is installed that can.
    """
    if config.security == "arrays" and not can_seal():
        raise AuthenticationError(
            "security is 'arrays', and cryptography, which authenticates them, is not installed; "
            f"{REMEDY}, or set security to 'auto' (ZCACTOR_SECURITY)"
        )
    names = []
    for name in config.transports.split(","):
        names.append(name)
        if transport(name).by_name and not clustered:
            break
    settings = EndpointSettings(config, names, directory, process, token, store, may_read, port, apart)
    ways: dict[str, Endpoint] = {}
    for name in names:
        found = transport(name)
        if (found.shares or name) not in ways:
            ways[found.shares or name] = found.make(settings)
    if len(ways) == 1 and transport(names[0]).by_name:
        return ways[names[0]]
    from zcactor.transport.selector import SelectingEndpoint

    return SelectingEndpoint(directory, process, list(ways.values()))


def find_through(endpoint: Endpoint, places: Places, head: HeadLink, head_address: str) -> None:
    """Have an endpoint that reaches other hosts find processes: at the places that handles state, and by asking the
    cluster's head for the others.

    Args:
        endpoint: the endpoint; one that reaches its own host only is left as it is.
        places: the places of processes, as handles state them.
        head: the link of the same process to the head, which is asked.
        head_address: the address at which the head listens; empty where the cluster has no other hosts.
    """
    if not head_address:
        return

    own, at, place = head_address.rpartition("@")
    head.look_at(place)

    async def find(name: str) -> str:
        wanted = ProcessId(bytes.fromhex(name))
        if wanted == head.process:
            return f"{own}{at}{head.places.current}"
        claimed = places.try_(wanted)
        if claimed:
            return claimed
        try:
            found = await head.ask(MembershipService.find, wanted)
        except HeadUnavailable as error:
            raise ConnectionLost(f"process {name} is not found: {error}") from error
        return found

    from zcactor.transport.selector import SelectingEndpoint

    endpoint.find_by(find)
    if isinstance(endpoint, SelectingEndpoint):
        endpoint.is_urgent = lambda address: address.rpartition("@")[2] in head.places and head.outage.going_on
        endpoint.elsewhere = lambda name: f"{own}@{head.places.current}" if name == own and head.places.told else ""


def hear_of_heads(endpoint: Endpoint, heard: Callable[[str, int], None]) -> None:
    """Have an endpoint that reaches other hosts call ``heard(place, epoch)`` where another process says that a head
    leads at that place, ``host:port``, in a term of that epoch."""
    for way in _listening(endpoint):
        way.summoned = heard


def tell_of_term(endpoint: Endpoint, term: Callable[[], int]) -> None:
    """Have an endpoint that reaches other hosts tell all that ask for its name the epoch that ``term()`` returns, in
    which this process leads its cluster; 0 where it leads none."""
    for way in _listening(endpoint):
        way.term = term


def _listening(endpoint: Endpoint) -> Iterator[ListeningEndpoint]:
    from zcactor.transport.selector import SelectingEndpoint

    for way in endpoint.ways if isinstance(endpoint, SelectingEndpoint) else [endpoint]:
        if isinstance(way, ListeningEndpoint):
            yield way


def problem_of(endpoint: Endpoint) -> str:
    """The reason why an endpoint cannot reach other hosts though it should; empty where it can."""
    from zcactor.transport.selector import SelectingEndpoint

    if not isinstance(endpoint, SelectingEndpoint):
        return ""
    return next((way.viability() or "" for way in endpoint.ways if not way.by_name), "")


def address_of(endpoint: Endpoint) -> str:
    """The address at which peers on other hosts find the process of a started endpoint; empty where they cannot."""
    return endpoint.far_address


def preload(transports: str, *, clustered: bool = False) -> None:
    """Import the modules that an endpoint for these `transports` needs, or for any where they are empty, so that forks
    of this process have them."""
    if clustered or not transports or not prefers_host(transports):
        import zcactor.transport.selector  # noqa: F401

        for name in TRANSPORTS:
            load = transport(name).preload
            if load is not None:
                load()


def may_read(session: Any, object_id: int, offset: int, nbytes: int) -> Block | None:
    """The object of ours that holds these bytes; None unless the peer of `session` has a lease on it. From any
    thread."""
    block = None if session is None else session.leases.get(object_id)
    if isinstance(block, Block) and block.offset <= offset and offset + nbytes <= block.offset + block.nbytes:
        return block
    return None
