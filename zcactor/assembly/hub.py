"""The hub of a process: the answers to its sessions' requests, by the parts that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.api.future import ObjectRef
from zcactor.marshal import arrays
from zcactor.process.context import current_host

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.config import Config
    from zcactor.execution.runners import Hosts
    from zcactor.marshal import Marshaller
    from zcactor.native import hot
    from zcactor.objects.adoption import Adoptions
    from zcactor.objects.promises import Promises
    from zcactor.objects.pushes import Pushes
    from zcactor.objects.resolver import Resolver
    from zcactor.objectstore.checking import Checker
    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Block, Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.simultaneous_open import SimultaneousOpens
    from zcactor.rpc.call import Call
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session
    from zcactor.transport.os_process import OsProcess

__all__ = ["ProcessHub", "checker_of"]


def checker_of(config: Config) -> Checker | None:
    """The check mode of a process with these settings; None where it is off."""
    if not config.check:
        return None
    from zcactor.objectstore.checking import Checker  # most processes do without

    return Checker(_actor)


def _actor() -> str:
    host = current_host.get()
    return "" if host is None else str(host.label)


class ProcessHub:
    """A `zcactor.rpc.hub.Hub`, whose parts `use` gives it.

    Args:
        hello: the hello message of the process.
        store: of the process.
        counters: of the process.
        marshaller: knows which of its arrays lie in the store.
        hosts: the process's runners.
        checker: its check mode; None without.
    """

    import_region: Callable[[Any, Region, bool, bool], tuple[Part, asyncio.Future[Part] | None]]
    read_result: Callable[[Call], None]
    sent_again: Callable[[Call], None]
    forward_received: Callable[[Incoming, int, int, bytes], None]
    argument_received: Callable[[Any, int, int, str], Any]
    push_received_plain: Callable[[int, int, Any], None]
    push_coming: Callable[[int, int], None]
    push_received: Callable[[int, int, int, Any, Sequence[Part], int], None]
    session_lost: Callable[[Any, Exception | None, list[Call]], None]
    greeted: Callable[[Any], None]
    adoptions: Adoptions

    def __init__(
        self, hello: Hello, store: Store, counters: hot.Counters, marshaller: Marshaller, hosts: Hosts,
        checker: Checker | None,
    ) -> None:  # fmt: skip
        self.process = hello.process
        self.store = store
        self.counters = counters
        self.checker = checker
        self.share, self.share_copied = marshaller.share, marshaller.share_copied
        self.dtype_codes, self.dtypes = arrays.known_codes, arrays.known_dtypes
        self.ref_type: type = ObjectRef
        self.hosts = hosts.by_index
        self.call_received = hosts.call_received
        self._hello = hello

    def use(
        self, resolver: Resolver, promises: Promises, pushes: Pushes, connections: Connections, adoptions: Adoptions,
        simultaneous_opens: SimultaneousOpens,
    ) -> None:  # fmt: skip
        """Answer by these parts, before the first session begins."""
        self.import_region, self.read_result = resolver.import_region, promises.read_result
        self.sent_again, self.forward_received = pushes.sent_again, pushes.forward
        expectations = pushes.expectations
        self.push_received, self.push_received_plain = expectations.pushed, expectations.pushed_plain
        self.push_coming, self.argument_received = expectations.coming, expectations.argument
        self.takers = expectations.takers
        self.session_lost, self.adoptions = connections.session_lost, adoptions
        self.greeted = simultaneous_opens.greeted

    def hello(self) -> Hello:
        """See `zcactor.rpc.hub.Hub`, as for all methods here."""
        return self._hello

    def cancel_received(self, incoming: Incoming) -> None:
        """Cancel a call whose caller has cancelled it, or is gone."""
        if incoming.host is not None:
            incoming.host.cancel(incoming)

    def park(self, reader: OsProcess, session: Session, blocks: Mapping[int, Block]) -> None:
        """Keep blocks that `reader` maps."""
        hello = session.peer_hello
        number = (session.peer_process, session.number) if hello is None else hello.session  # no message names it
        self.store.parking.park(reader, (session.peer_process, number), blocks)

    def outlived(self, session: Session) -> None:
        """Note that a lease of the peer has ended after the connection."""
        self.adoptions.let_go(session.peer_process)
