"""The beginning of a head with a log in a folder: a new cluster, or the one that an earlier head has left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor.control.entries import emptying_changes, opened_change, read
from zcactor.control.file_log import FRESH, FileLog
from zcactor.control.head_log import MAX_CHANGES, Candidate, LogUnusable
from zcactor.control.node_table import machine_of
from zcactor.ids import ProcessId
from zcactor.process.place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.config import Config
    from zcactor.control.entries import Entries
    from zcactor.control.head import Head
    from zcactor.control.head_log import HeadState, Term
    from zcactor.control.take_over import TakeOver

__all__ = ["HeadBeginning"]

logger = logging.getLogger("zcactor")
_LEFT = ("sock", "tcp", "verbs")
"""Suffixes of the files by which an earlier head was found on its host."""


class HeadBeginning:
    """The steps by which a head begins its term.

    Args:
        setup: of the agent; see `zcactor.node.agent_main.send_setup`.
        config: its settings.
    """

    def __init__(self, setup: Mapping[str, Any], config: Config) -> None:
        folder, fresh = setup["state"]
        self.log = FileLog(Path(folder), fresh=fresh)
        self._cluster: ProcessId = setup["agent"]
        self._address = f"{config.host}:{setup['port']}"
        self._directory = Path(setup["directory"])
        self._patience = config.head_patience
        self._beside: bool = setup["beside"]
        self._term: Term | None = None
        self._state: HeadState = {}
        self._entries: Entries | None = None

    async def campaign(self) -> None:
        """Take the log for this head, before it listens, and read it. From here on no earlier head lives, and what one
        has left in the run directory is removed.

        Raises:
            LogInUse: another head uses the log.
            LogUnusable: the log cannot be used as it is.
            LogUnavailable: the log cannot be read.
        """
        place = Place.here()
        self._term = await self.log.campaign(Candidate(self._address, place.host, place.pid))
        self._state = await self.log.load(self._term)
        try:
            entries = read(self._state)
        except msgspec.DecodeError as error:
            raise LogUnusable(f"the log {self.log.path} has an entry of another form: {error}; {FRESH}") from error
        known = entries.cluster
        if known is not None and not known.closed:
            if known.cluster != self._cluster:
                raise LogUnusable(f"another head has begun a cluster with the log {self.log.path} just now; try again")
            self._entries = entries
            for suffix in _LEFT:
                with contextlib.suppress(FileNotFoundError):
                    self._directory.joinpath(f"{self._cluster.hex()}.{suffix}").unlink()

    async def begin(self, head: Head, address: str) -> None:
        """Begin the term of a head that listens at `address`, ``host:port``, and takes no connection yet.

        Raises:
            HeadUnavailable: the log takes nothing.
        """
        assert self._term is not None
        head.recorder.leads(self._term)
        head.members.patience, head.members.log = self._patience, str(self.log.path)
        if self._entries is None:
            changes = emptying_changes(self._state)
            for first in range(0, len(changes), MAX_CHANGES):
                await head.recorder.record(*changes[first : first + MAX_CHANGES])
        else:
            taking = head.take_over(self._entries)
            if self._beside:
                taking.await_beside(machine_of(self._directory))
            for key, member in self._entries.members.items():
                place = member.facts["address"].rpartition("@")[2]
                head.process.tasks.start(self._look_at(taking, ProcessId(bytes.fromhex(key)), place))
            head.process.tasks.start(self._finish(taking, head.members.fence, self._entries))
        await head.recorder.record(opened_change(self._cluster, address))

    async def _look_at(self, taking: TakeOver, node: ProcessId, place: str) -> None:
        """Do not wait for a node that has ended with the earlier head, as when all processes of a host are killed."""
        host, _, port = place.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            taking.ended(node)
        except OSError as error:  # it may return from there all the same
            logger.debug("node %s at %s cannot be looked at: %s", node.hex()[:8], place, error)
        else:
            writer.close()

    async def _finish(self, taking: TakeOver, fence: float, entries: Entries) -> None:
        await taking.finish(fence)
        assert self._term is not None
        logger.warning(
            "took over cluster %s, epoch %d: %d nodes, %d actors, %d names", self._cluster.hex()[:8],
            self._term.epoch, taking.nodes, taking.actors, len(entries.names),
        )  # fmt: skip
