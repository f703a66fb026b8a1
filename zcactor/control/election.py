"""The beginning and the end of a head's term that others can end: heads that stand by take its place."""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from zcactor.control.bootstrap import Bootstrap
from zcactor.control.head_log import Deposed, LogUnavailable
from zcactor.control.head_watch import boot_clock
from zcactor.control.leader_lease import LeaderLease
from zcactor.errors import ConnectionLost, HeadUnavailable, ProtocolError
from zcactor.ids import ProcessId
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.control.entries import Entries
    from zcactor.control.failover import Failover
    from zcactor.control.head import Head
    from zcactor.control.head_log import Candidate, LeaderAt

__all__ = ["Election"]

_ANSWER: Final = 2.0
"""Seconds that a process has to take a call."""
_LOOK: Final = 1.0
"""Seconds between two calls of a process, and two looks at who else would lead."""
_PAUSE: Final = 1.0
"""Seconds until a standby campaigns again where the log was silent when it had just won."""


class Election(Bootstrap, ABC):
    """The steps by which a head begins terms that others can end, one after the other; see `Bootstrap`."""

    own: str = ""
    """The place where this head listens, as others look for it; set before its term begins."""
    resigned: bool = False
    """Whether this head has given its term to another one."""
    stood: bool = False
    """Whether another head has led while this one waited."""
    again: bool = False
    """Whether this head has lost its term to another one, or to nobody, and is to stand by again."""

    @abstractmethod
    async def candidates(self) -> Sequence[str]:
        """The places of all heads, this one among them.

        Raises:
            LogUnavailable: the log does not tell them.
        """

    @abstractmethod
    async def summon(self, address: str, epoch: int) -> None:
        """Tell the process at `address` that this head leads, in a term of that epoch.

        Raises:
            ConnectionLost, ProtocolError: it cannot be told.

        Cancelling leaves open whether it was told.
        """

    async def win(self, me: Candidate) -> None:
        """Campaign until this head leads and has read the log.

        Raises:
            LogInUse, LogUnusable: as `Bootstrap.campaign` does.
            LogUnavailable, Deposed: the log cannot be read, and no other head has led before.

        Cancelling gives the candidacy up.
        """
        while True:
            try:
                await self.campaign(me)
                return
            except (LogUnavailable, Deposed) as error:
                if not self.stood:
                    raise
                logger.warning("this head leads, and stands by again, because its log cannot be read: %s", error)
            if self._term is not None:
                await self.log.resign(self._term)
            await asyncio.sleep(_PAUSE)

    async def begin(self, head: Head, address: str) -> None:
        """See `Bootstrap.begin`. From here on the end of the term ends the head, too."""
        assert self._term is not None
        members = [] if self.entries is None else list(self.entries.members)
        leader_lease = LeaderLease(self._term, members, head.process.config.head_patience, boot_clock)
        if self.entries is None:  # it has no members, so it acts at once
            await leader_lease.settled()
        head.members.leader_lease = leader_lease
        head.recorder.lasts = leader_lease.lasts
        try:
            await super().begin(head, address)
        except (Deposed, HeadUnavailable) as error:
            logger.warning("this head cannot begin: %s", error)
            self._step_down(head, None)
            return
        head.heads.own = self.own
        head.members.tell_heads = lambda: head.process.tasks.start(head.heads.tell())
        head.process.tasks.start(self._watch(head))
        head.process.tasks.start(self._introduce(head))

    async def _watch(self, head: Head) -> None:
        """End the head once another one leads, or its term has ended."""
        assert self._term is not None
        own, known = self._term.epoch, False
        async for leader in self.log.leaders():
            known = known or (leader is not None and leader.epoch == own)  # the one told before is older than the term
            if (leader is None and known) or (leader is not None and leader.epoch > own):
                self._step_down(head, leader)
                return

    def _step_down(self, head: Head, leader: LeaderAt | None) -> None:
        if head.members.leader_lease is not None:
            head.members.leader_lease.depose()
        head.recorder.depose(head.recorder.epoch if leader is None else leader.epoch)
        if not head.closing and not self.resigned:
            self.again = True
            head.finish()

    async def _introduce(self, head: Head) -> None:
        """Tell nodes and programs where other heads are. End the head where one of them knows a later one."""
        assert self._term is not None
        while not head.recorder.is_deposed and self._term.valid_until() != -math.inf:
            with contextlib.suppress(LogUnavailable):
                head.heads.all = await self.candidates()
            await head.heads.tell()
            await asyncio.sleep(_LOOK)
        self._step_down(head, None)

    def expect(self, head: Head, taking: Failover, entries: Entries) -> None:
        """See `Bootstrap.expect`. Nodes and programs are called, too: their connection to a head that is stopped does
        not end, and nobody may have told them of this one."""
        super().expect(head, taking, entries)
        addresses = {key: member.facts["address"] for key, member in entries.members.items()}
        addresses.update({key: driver.address for key, driver in entries.drivers.items()})
        for key, address in addresses.items():
            if address:
                head.process.tasks.start(self._call(taking, ProcessId(bytes.fromhex(key)), address))

    async def _call(self, taking: Failover, process: ProcessId, address: str) -> None:
        """Tell a process where this head is, until it has come."""
        assert self._term is not None
        while taking.awaits(process) and not taking.done.is_set():
            try:
                async with asyncio.timeout(_ANSWER):
                    await self.summon(address, self._term.epoch)
            except (TimeoutError, ConnectionLost, ProtocolError) as error:  # it may have ended, and come all the same
                logger.debug("process %s was not told where this head is: %s", process.hex()[:8], error)
            await asyncio.sleep(_LOOK)
