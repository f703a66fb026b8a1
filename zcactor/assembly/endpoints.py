"""The endpoint of a process, made of the transports that the configuration allows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zcactor.config import ports_of
from zcactor.errors import AuthenticationError, ConnectionLost, HeadUnavailable
from zcactor.folders import NoFolder, expanded
from zcactor.ids import ProcessId
from zcactor.objectstore.store import Block
from zcactor.process.cluster import MembershipService
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.stream.endpoint import ListeningEndpoint
from zcactor.transport.stream.record_layer import REMEDY, Integrity, can_seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.peers.head_link import HeadLink
    from zcactor.process.places import Places
    from zcactor.transport.base import Endpoint
    from zcactor.transport.stream.tls import Tls
    from zcactor.transport.tcp.endpoint import TcpEndpoint

__all__ = [
    "address_of",
    "find_through",
    "hear_of_heads",
    "make_endpoint",
    "may_read",
    "preload",
    "problem_of",
    "tell_of_term",
    "tls_of",
]


def tls_of(config: Config) -> Tls | None:
    """The TLS settings for connections between hosts; None where `config` sets no TLS.

    Raises:
        AuthenticationError: the folder is not as it should be; see `zcactor.transport.stream.tls.load_tls`.
    """
    if config.tls is None:
        return None
    from zcactor.transport.stream.tls import load_tls

    try:
        folder = expanded(config.tls, os.environ)
    except NoFolder as error:
        raise AuthenticationError(f"tls is {config.tls!r}: {error}, or name the folder of tls in full") from error
    return load_tls(folder)


def make_endpoint(
    config: Config, directory: Path, process: bytes, token: bytes, store: Store, *, clustered: bool = False,
    port: int = 0, apart: str = "",
) -> Endpoint:  # fmt: skip
    """The endpoint of one process of a node, not started.

    Where processes of one host prefer to map each other's arenas, they need no other transport between them. Then no
    other transport listens, unless the process has peers on other hosts.

    Args:
        config: the settings; `transports` and `host` decide.
        directory: the run directory.
        process: the process id.
        token: the secret that the peers hold as well.
        store: the store that peers map and read.
        clustered: whether the process has peers on other hosts.
        port: the port at which to listen for those; 0 lets the system choose.
        apart: see `zcactor.transport.local.endpoint.LocalEndpoint`.

    Raises:
        AuthenticationError: as for `tls_of`, where transports besides `local` are used; or arrays are to be
            authenticated, and no library is installed that can.
    """
    if config.integrity == "arrays" and config.tls is None and not can_seal():
        raise AuthenticationError(
            "integrity is 'arrays', and cryptography, which authenticates them, is not installed; "
            f"{REMEDY}, or set integrity to 'auto' (ZCACTOR_INTEGRITY)"
        )
    names = config.transports.split(",")
    arena = store.arena
    local = LocalEndpoint(
        directory,
        process,
        token,
        arena.fd,
        arena.nbytes,
        config.recv_depth,
        config.eager_limit,
        store.supply_extents,
        apart,
    )
    if names[0] == "local" and (not clustered or len(names) == 1):
        return local
    from zcactor.transport.selector import SelectingEndpoint

    # On one host the transports after `local` are of no use. RDMA and TCP share an endpoint.
    far = [name for name in names if name != "local"]
    if "local" in names and not clustered:
        far = names[: names.index("local")]
    ways: list[Endpoint] = [_between_hosts(config, far, process, token, store, port)]
    if "local" in names:
        ways.insert(0 if names[0] == "local" else 1, local)
    return SelectingEndpoint(directory, process, ways, config.require or "")


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
    """Import the modules that an endpoint for these `transports` needs, so that forks of this process have them."""
    if clustered or not transports.startswith("local"):
        import zcactor.transport.selector
        import zcactor.transport.verbs.endpoint
        from zcactor.transport.verbs.driver.presence import has_device

        if has_device():
            import zcactor.transport.verbs.peer.connect  # noqa: F401


def _between_hosts(
    config: Config, names: list[str], process: bytes, token: bytes, store: Store, port: int
) -> TcpEndpoint:
    arena = store.arena
    tls = tls_of(config)
    sealing = config.sealing == "on"
    integrity = Integrity[config.integrity.upper()]
    endpoint: TcpEndpoint
    if "verbs" not in names or ("tcp" in names and names.index("tcp") < names.index("verbs")):
        from zcactor.transport.tcp.endpoint import TcpEndpoint

        endpoint = TcpEndpoint(
            config.host, process, token, arena.fd, arena.nbytes, config.recv_depth, config.eager_limit, port=port,
            sealing=sealing, integrity=integrity, tls=tls,
        )  # fmt: skip
    else:
        from zcactor.transport.verbs.driver.bindings import bindings
        from zcactor.transport.verbs.endpoint import VerbsEndpoint

        endpoint = VerbsEndpoint(
            config.host, process, token, arena, arena.fd, config.recv_depth, config.eager_limit,
            binding=lambda: bindings(None if config.verbs_binding == "auto" else config.verbs_binding, quick=True),
            lookup=store.lookup, device=config.verbs_device, device_port=config.verbs_port,
            gid_index=config.verbs_gid_index, verbs_eager_limit=config.verbs_eager_limit,
            marks=(config.verbs_traffic_class, config.verbs_service_level, config.verbs_pkey_index),
            falls_back="tcp" in names, port=port, sealing=sealing, integrity=integrity, tls=tls,
        )  # fmt: skip

    endpoint.authorize = may_read
    endpoint.ports = None if config.ports is None else ports_of(config.ports)
    return endpoint


def may_read(session: Any, object_id: int, offset: int, nbytes: int) -> Block | None:
    """The object of ours that holds these bytes; None unless the peer of `session` has a lease on it. From any
    thread."""
    block = None if session is None else session.leases.get(object_id)
    if isinstance(block, Block) and block.offset <= offset and offset + nbytes <= block.offset + block.nbytes:
        return block
    return None
