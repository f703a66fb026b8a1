"""How a process can be reached: its endpoint, made of the transports that the configuration allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.transport.local import LocalEndpoint

if TYPE_CHECKING:
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.transport.base import Endpoint
    from zcactor.transport.tcp import TcpEndpoint

__all__ = ["make_endpoint", "preload"]


def make_endpoint(config: Config, directory: Path, process: bytes, token: bytes, store: Store) -> Endpoint:
    """The endpoint of one process of a node, not started.

    Where processes of one host may map each other's arenas and that is preferred, no other way is ever needed between
    them, and nothing else listens.
    """
    names = config.transports.split(",")
    arena = store.arena
    local = LocalEndpoint(directory, process, token, arena.fd, arena.nbytes, config.recv_depth, config.eager_limit)
    if names[0] == "local":
        return local
    from zcactor.transport.select import SelectingEndpoint

    # What comes behind `local` is of no use on one host; RDMA and TCP before it share an endpoint.
    first = names[: names.index("local")] if "local" in names else names
    ways: list[Endpoint] = [_between_hosts(config, first, process, token, store)]
    if "local" in names:
        ways.append(local)
    return SelectingEndpoint(directory, process, ways)


def preload(transports: str) -> None:
    """Import what an endpoint for these `transports` needs, so that a process that is forked has it."""
    if not transports.startswith("local"):
        import zcactor.transport.select
        import zcactor.transport.verbs.endpoint  # noqa: F401


def _between_hosts(config: Config, names: list[str], process: bytes, token: bytes, store: Store) -> TcpEndpoint:
    arena = store.arena
    endpoint: TcpEndpoint
    if "verbs" not in names or ("tcp" in names and names.index("tcp") < names.index("verbs")):
        from zcactor.transport.tcp import TcpEndpoint

        endpoint = TcpEndpoint(
            config.host, process, token, arena.fd, arena.nbytes, config.recv_depth, config.eager_limit
        )
    else:
        from zcactor.transport.verbs.endpoint import VerbsEndpoint
        from zcactor.transport.verbs.load import bindings

        endpoint = VerbsEndpoint(
            config.host, process, token, arena, arena.fd, config.recv_depth, config.eager_limit,
            binding=lambda: bindings(None if config.verbs_binding == "auto" else config.verbs_binding),
            lookup=store.lookup, device=config.verbs_device, device_port=config.verbs_port,
            gid_index=config.verbs_gid_index, verbs_eager_limit=config.verbs_eager_limit, falls_back="tcp" in names,
        )  # fmt: skip

    def may_read(peer: bytes, object_id: int, offset: int, nbytes: int) -> bool:
        del peer
        block = store.lookup(object_id)
        return block is not None and block.offset <= offset and offset + nbytes <= block.offset + block.nbytes

    endpoint.authorize = may_read
    return endpoint
