"""The beginning of a head with a log: a new cluster, or the one that an earlier head has left."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from zcactor.control.entries import emptying_changes, opened_change, read
from zcactor.control.forcing import reason
from zcactor.control.head_log import MAX_CHANGES, LogUnusable
from zcactor.ids import ProcessId
from zcactor.logs import logger
from zcactor.transport.version import OLDEST_SERVED, PROTOCOL_VERSION

if TYPE_CHECKING:
    from zcactor.control.entries import Entries, MemberEntry
    from zcactor.control.failover import Failover
    from zcactor.control.head import Head
    from zcactor.control.head_log import Candidate, HeadLog, HeadState, Term

__all__ = ["Bootstrap"]


class Bootstrap:
    """The steps by which a head begins its term.

    Args:
        log: the log.
        name: of the log, for people.
        cluster: the id of the cluster, which is the head's process id.
        patience: seconds that nodes go on without a head.
        remedy: the remedy for a log that cannot be used, for messages.
    """

    def __init__(self, log: HeadLog, name: str, cluster: ProcessId, patience: float, remedy: str = "") -> None:
        self.log: HeadLog = log
        self.name = name
        self.cluster = cluster
        self._patience = patience
        self._remedy = remedy
        self._term: Term | None = None
        self._state: HeadState = {}
        self.entries: Entries | None = None
        """The entries of the cluster with which the head goes on; None for a new cluster."""
        self.closed = False
        """Whether the cluster that the log knows has ended in order."""

    async def campaign(self, me: Candidate) -> None:
        """Take the log for this head, before it listens, and read it. From here on no earlier head lives.

        Raises:
            LogInUse: another head uses the log.
            LogUnusable: the log cannot be used as it is.
            LogUnavailable: the log cannot be read.
        """
        self._term = await self.log.campaign(me)
        self._state = await self.log.load(self._term)
        entries = self.read(self._state)
        known = entries.cluster
        self.closed = known is not None and known.closed
        if known is not None and not known.closed:
            if known.cluster != self.cluster:
                raise LogUnusable(f"another head has begun a cluster with the log {self.name} just now; try again")
            self.entries = entries

    def read(self, state: HeadState) -> Entries:
        """Read entries of the log with which this head is to go on.

        Raises:
            LogUnusable: they are in another form, or of a cluster that goes on and whose heads speak a protocol that
                this one does not read.
        """
        try:
            entries = read(state)
        except msgspec.DecodeError as error:
            raise LogUnusable(f"the log {self.name} has an entry of another form: {error}; {self._remedy}") from error
        known = entries.cluster
        if known is not None and not known.closed and not OLDEST_SERVED <= known.protocol <= PROTOCOL_VERSION:
            raise LogUnusable(
                f"the log {self.name} is of a cluster that speaks protocol {known.protocol or 'before 14'}, and this "
                f"zcactor speaks {PROTOCOL_VERSION}: start the head with the zcactor that wrote it; or {self._remedy}"
            )
        return entries

    async def begin(self, head: Head, address: str) -> None:
        """Begin the term of a head that listens at `address`, ``host:port``, and takes no connection yet.

        Raises:
            HeadUnavailable: the log takes nothing.
        """
        assert self._term is not None
        head.recorder.leads(self._term)
        head.members.patience, head.members.log = self._patience, self.name
        taking = None
        if self.entries is None:
            changes = emptying_changes(self._state)
            for first in range(0, len(changes), MAX_CHANGES):
                await head.recorder.record(*changes[first : first + MAX_CHANGES])
        else:
            taking = head.take_over(self.entries)
        await head.recorder.record(opened_change(self.cluster, address))
        if taking is not None and self.entries is not None:  # its time begins when nodes and programs can return
            self.expect(head, taking, self.entries)
            head.process.tasks.start(self._finish(head, taking, self.entries))

    def expect(self, head: Head, taking: Failover, entries: Entries) -> None:
        """Tell a take-over, as it begins, which nodes it need not wait for, and which others it has to. It waits for
        the members of the log, but for those that have ended."""
        for key, member in entries.members.items():
            head.process.tasks.start(self._look_at(head, taking, ProcessId(bytes.fromhex(key)), member))

    async def refuses(self, address: str) -> bool:
        """Whether the host of a process, by its word, has nobody that listens at the address of that process."""
        return False

    async def _look_at(self, head: Head, taking: Failover, node: ProcessId, member: MemberEntry) -> None:
        """Do not wait for a node that has ended with the earlier head, as when all processes of a host are killed."""
        if await self.refuses(member.facts["address"]):
            taking.ended(node)
            if head.members.leader_lease is not None:
                head.members.leader_lease.ended(node.hex())

    async def _finish(self, head: Head, taking: Failover, entries: Entries) -> None:
        leader_lease = head.members.leader_lease
        permitted = None
        if leader_lease is not None:
            permitted = partial(leader_lease.settled, lambda: logger.warning("%s", reason(head.members)))
        if not await taking.finish(head.members.fence, permitted):
            return
        assert self._term is not None
        logger.warning(
            "took over cluster %s, epoch %d: %d nodes, %d actors, %d names", self.cluster.hex()[:8],
            self._term.epoch, taking.nodes, taking.actors, len(entries.names),
        )  # fmt: skip
