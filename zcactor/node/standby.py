"""The beginning of a head whose log is in etcd, and of one that stands by until the head that leads is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.assembly.endpoints import tls_of
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.head_log import Candidate, Deposed, LogUnavailable, LogUnusable
from zcactor.control.head_watch import boot_clock
from zcactor.control.standing import Standing
from zcactor.errors import ConnectionLost, HeadUnavailable, ProtocolError
from zcactor.ids import ProcessId
from zcactor.node.head_state import HeadBeginning
from zcactor.node.signpost import Signpost
from zcactor.process.place import Place
from zcactor.transport.stream.head_word import HeadWord
from zcactor.transport.stream.probe import Standby, identify
from zcactor.transport.stream.summons import summon

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.config import Config
    from zcactor.control.entries import Entries
    from zcactor.control.head import Head
    from zcactor.control.head_log import LeaderAt
    from zcactor.control.take_over import TakeOver

__all__ = ["StandbyBeginning", "written"]

logger = logging.getLogger("zcactor")
_LEFT: Final = 15.0
"""Seconds that a head which is no standby waits for the term of one that was killed: etcd ends it after 2 to 4, and a
busy machine needs more."""
_ANSWER: Final = 2.0
"""Seconds that a standby has to say that it is there."""
_LOOK: Final = 1.0
"""Seconds between two looks at who else would lead."""
_PAUSE: Final = 1.0
"""Seconds until a standby campaigns again where etcd was silent when it had just won."""


def written(host: str, port: int) -> str:
    """The place ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class StandbyBeginning(HeadBeginning):
    """The steps by which a head with a log in etcd begins its terms, one after the other.

    Args:
        setup: of the agent; see `zcactor.node.agent_main.send_setup`. Its ``etcd`` has the URL, whether to begin a
            cluster anew, and whether to wait as long as another head leads.
        config: its settings.
        standing_by: called with ``host:port`` once, where another head leads and this one waits.
    """

    def __init__(self, setup: Mapping[str, Any], config: Config, standing_by: Callable[[str], None]) -> None:
        url, fresh, waits = setup["etcd"]
        self._etcd = EtcdLog.at(url, setup["token"], os.environ)
        super().__init__(setup, config, self._etcd, "give another name at the end of the URL")
        self._config = config
        self._port: int = setup["port"]
        self._token: bytes = setup["token"]
        self._fresh: bool = fresh
        self._waits: bool = waits
        self._standing_by = standing_by
        self._stood = False
        """Whether another head has led while this one waited."""
        self._resigned = False
        self.again = False
        """Whether this head has lost its term to another one, or to nobody, and is to stand by again."""

    @property
    def port(self) -> int:
        """The port at which this head listens, and listened as a standby."""
        return self._port

    async def take(self) -> None:
        """Wait until this head leads. Meanwhile it tells others which head does.

        Raises:
            LogUnusable: the log cannot be used as it is, or another head leads and this one is no standby.
            LogUnavailable: the log cannot be read.
            OSError: this head cannot listen.

        Cancelling gives the candidacy up.
        """
        signpost = Signpost(self._config.host, self._port, self._token, tls_of(self._config))
        self._port = signpost.port
        self._address = written(self._config.host, self._port)
        place = Place.here()
        following = asyncio.create_task(self._follow(signpost))
        try:
            self._etcd.announce(Candidate(self._address, place.host, place.pid))
            if self._waits:
                await self._win(Candidate(self._address, place.host, place.pid))
            else:
                async with asyncio.timeout(_LEFT):
                    await self.campaign(Candidate(self._address, place.host, place.pid))
        except TimeoutError:
            raise LogUnusable(
                f"the head at {signpost.leader.place} leads the cluster of {self.name}: start this one with --standby"
            ) from None
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, LogUnusable):  # the campaign says that as well
                await following
            await signpost.aclose()
        if self._stood:
            self._beside = False  # the node beside this one has joined the head that led
        elif self._fresh:
            self.entries = None
        self.clear()

    async def _win(self, me: Candidate) -> None:
        """Campaign until this head leads and has read the log."""
        while True:
            try:
                await self.campaign(me)
                return
            except (LogUnavailable, Deposed) as error:
                if not self._stood:
                    raise
                logger.warning("this head leads, and stands by again, because its log cannot be read: %s", error)
            if self._term is not None:
                await self.log.resign(self._term)
            await asyncio.sleep(_PAUSE)

    async def _follow(self, signpost: Signpost) -> None:
        async for leader in self.log.leaders():
            signpost.leader = HeadWord("", 0) if leader is None else HeadWord(leader.address, leader.epoch)
            if leader is not None and self._waits and leader.address != self._address and not self._stood:
                self._stood = True
                self._standing_by(self._address)

    @property
    def is_over(self) -> bool:
        """Whether the cluster for which this standby waited has ended in order."""
        return self._stood and self.closed

    async def begin(self, head: Head, address: str) -> None:
        """See `zcactor.control.beginning.Beginning.begin`. From here on the end of the term ends the head, too."""
        assert self._term is not None
        members = [] if self.entries is None else list(self.entries.members)
        standing = Standing(self._term, members, head.process.config.head_patience, boot_clock)
        if self.entries is None:
            await standing.settled()
        head.members.standing = standing
        head.recorder.lasts = standing.lasts
        try:
            await super().begin(head, address)
        except (Deposed, HeadUnavailable) as error:
            logger.warning("this head cannot begin: %s", error)
            self._step_down(head, None)
            return
        head.heads.own = self._address
        head.resign = partial(self.resign, head)
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
        if head.members.standing is not None:
            head.members.standing.depose()
        head.recorder.depose(head.recorder.epoch if leader is None else leader.epoch)
        if not head.closing and not self._resigned:
            self.again = True
            head.finish()

    async def _introduce(self, head: Head) -> None:
        """Tell nodes and programs where other heads are. End the head where one of them knows a later one."""
        assert self._term is not None
        while not head.recorder.is_deposed and self._term.valid_until() != -math.inf:
            with contextlib.suppress(LogUnavailable):
                head.heads.all = await self._etcd.candidates()
            await head.heads.tell()
            await asyncio.sleep(_LOOK)
        self._step_down(head, None)

    def expect(self, head: Head, taking: TakeOver, entries: Entries) -> None:
        """See `zcactor.control.beginning.Beginning.expect`. Nodes and programs are called, too: their connection to a
        head that is stopped does not end, and nobody may have told them of this one."""
        super().expect(head, taking, entries)
        addresses = {key: member.facts["address"] for key, member in entries.members.items()}
        addresses.update({key: driver.address for key, driver in entries.drivers.items()})
        for key, address in addresses.items():
            if address:
                head.process.tasks.start(self._call(taking, ProcessId(bytes.fromhex(key)), address))

    async def _call(self, taking: TakeOver, process: ProcessId, address: str) -> None:
        """Tell a process where this head is, until it has come."""
        assert self._term is not None
        tls = tls_of(self._config)
        while taking.awaits(process) and not taking.done.is_set():
            try:
                async with asyncio.timeout(_ANSWER):
                    await summon(address, self._address, self._term.epoch, self._token, tls)
            except (TimeoutError, ConnectionLost, ProtocolError) as error:  # it may have ended, and come all the same
                logger.debug("process %s was not told where this head is: %s", process.hex()[:8], error)
            await asyncio.sleep(_LOOK)

    async def resign(self, head: Head) -> bool:
        """End the head where another one stands by. Returns whether that is so."""
        tls = tls_of(self._config)
        for place in head.heads.standbys:  # one that was killed is known for a while
            try:
                async with asyncio.timeout(_ANSWER):
                    await identify(place, self._token, tls)
            except Standby:
                self._resigned = True
                logger.warning("this head resigns; the standby at %s leads from now on", place)
                head.finish()
                return True
            except (TimeoutError, ConnectionLost, ProtocolError) as error:
                logger.debug("the standby at %s is gone: %s", place, error)
        return False

    async def aclose(self) -> None:
        """Let go of the log. Idempotent."""
        await self.log.aclose()
