"""The beginning of a head whose log is in etcd, and of one that stands by until the head that leads is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from zcactor.control.election import Election
from zcactor.control.entries import CLUSTER_KEY
from zcactor.control.etcd_log import EtcdLog
from zcactor.control.head_log import Candidate, LogUnavailable, LogUnusable
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.logs import logger
from zcactor.node.head_state import HeadBootstrap
from zcactor.process.place import Place
from zcactor.transport.registry import tls_of
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import binding_of, shake_hands
from zcactor.transport.stream.head_word import HeadWord, say
from zcactor.transport.stream.listener import Listener
from zcactor.transport.stream.probe import NOBODY, Standby, identify
from zcactor.transport.stream.summons import summon

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.config import Config
    from zcactor.control.head import Head
    from zcactor.transport.stream.tls import Tls

__all__ = ["Signpost", "StandbyBootstrap", "written"]

_BACKLOG: Final = 128


class Signpost:
    """A listener at the place where a head will listen, once it leads. Used on the loop's thread.

    Args:
        host: the IP address at which it listens.
        port: the port; 0 lets the system choose.
        token: the cluster's secret, 32 bytes.
        tls: the certificates where all bytes pass through TLS, otherwise None.

    Raises:
        OSError: the address is not one of this host's, or the port is in use.
    """

    def __init__(self, host: str, port: int, token: bytes, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = tls
        self.leader = HeadWord("", 0)
        """The head that leads."""
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with contextlib.ExitStack() as undo:
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            sock = undo.enter_context(socket.socket(family, kind))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may use the port
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            self.port: int = sock.getsockname()[1]
            self._listener = Listener(sock, self._greet, source=_source_of)
            undo.pop_all()

    async def _greet(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            if self._tls is not None:
                sock = undo.enter_context(await self._tls.accept(sock))
            hello = Introduction(NOBODY, os.getpid(), 0, 4, 64, Purpose.NAME)
            handshake = Handshake(self._token, hello, accepting=True, binding=binding_of(sock))
            await shake_hands(sock, handshake)
            if handshake.peer.purpose is Purpose.NAME:
                await say(sock, handshake, self._token, self.leader.encode())

    async def aclose(self) -> None:
        """Stop listening. Idempotent."""
        await self._listener.aclose()


def _source_of(sock: socket.socket) -> str | None:
    """The IP address that a connection comes from; None where it has ended already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return None


_LEFT: Final = 15.0
"""Seconds that a head which is no standby waits for the term of one that was killed: etcd ends it after 2 to 4, and a
busy machine needs more."""
_ANSWER: Final = 2.0
"""Seconds that a standby has to say that it is there."""
_ABLE: Final = 10.0
"""Seconds between two looks of a standby at the protocol of the head that leads. One of a newer version may have taken
over, whose log this one could not read once it leads."""


def written(host: str, port: int) -> str:
    """The place ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class StandbyBootstrap(Election, HeadBootstrap):
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
        self._heard = asyncio.Event()
        """Set when the head that leads, or its absence, was told."""

    @property
    def port(self) -> int:
        """The port at which this head listens, and listened as a standby."""
        return self._port

    async def take(self) -> None:
        """Wait until this head leads. Meanwhile it tells others which head does.

        Raises:
            LogUnusable: the log cannot be used as it is, or could not be once this head leads, as the head that leads
                is of a newer version; or another head leads and this one is no standby.
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
                await self._stand_by(signpost, Candidate(self._address, place.host, place.pid))
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
        if self.stood:
            self._beside = False  # the node beside this one has joined the head that led
        elif self._fresh:
            self.entries = None
        self.clear()

    async def _follow(self, signpost: Signpost) -> None:
        async for leader in self.log.leaders():
            signpost.leader = HeadWord("", 0) if leader is None else HeadWord(leader.address, leader.epoch)
            self._heard.set()

    async def _stand_by(self, signpost: Signpost, me: Candidate) -> None:
        """Wait until this head leads, as long as it could."""
        waiting = [asyncio.create_task(self._stay_able(signpost)), asyncio.create_task(self.win(me))]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _stay_able(self, signpost: Signpost) -> NoReturn:
        """Look again and again whether this head could go on with the log of the one that leads. Say once that it
        stands by.

        Raises:
            LogUnusable: it could not.
        """
        while True:
            leader = signpost.leader
            if leader.place and leader.place != self._address:
                with contextlib.suppress(LogUnavailable):  # etcd is away, and may say it later
                    found = await self._etcd.entry_of(leader.epoch, "cluster", CLUSTER_KEY)
                    self.read({} if found is None else {"cluster": {CLUSTER_KEY: found}})
                if not self.stood:
                    self.stood = True
                    self._standing_by(self._address)
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABLE):
                    await self._heard.wait()

    @property
    def is_over(self) -> bool:
        """Whether the cluster for which this standby waited has ended in order."""
        return self.stood and self.closed

    async def begin(self, head: Head, address: str) -> None:
        """See `zcactor.control.election.Election.begin`."""
        self.own = self._address
        head.resign = partial(self.resign, head)
        await super().begin(head, address)

    async def candidates(self) -> Sequence[str]:
        """See `zcactor.control.election.Election.candidates`."""
        return await self._etcd.candidates()

    async def summon(self, address: str, epoch: int) -> None:
        """See `zcactor.control.election.Election.summon`."""
        await summon(address, self._address, epoch, self._token, tls_of(self._config))

    async def resign(self, head: Head) -> bool:
        """End the head where another one stands by. Returns whether that is so."""
        tls = tls_of(self._config)
        for place in head.heads.standbys:  # one that was killed is known for a while
            try:
                async with asyncio.timeout(_ANSWER):
                    await identify(place, self._token, tls)
            except Standby:
                self.resigned = True
                logger.warning("this head resigns; the standby at %s leads from now on", place)
                head.finish()
                return True
            except (TimeoutError, ConnectionLost, ProtocolError) as error:
                logger.debug("the standby at %s is gone: %s", place, error)
        return False

    async def aclose(self) -> None:
        """Let go of the log. Idempotent."""
        await self.log.aclose()
