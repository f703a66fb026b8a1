"""The beginning of a head with a log in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcactor.control.beginning import Beginning
from zcactor.control.file_log import FRESH, FileLog
from zcactor.control.head_log import Candidate
from zcactor.control.node_table import machine_of
from zcactor.ids import ProcessId
from zcactor.process.place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.config import Config
    from zcactor.control.entries import Entries
    from zcactor.control.head import Head
    from zcactor.control.head_log import HeadLog
    from zcactor.control.take_over import TakeOver

__all__ = ["HeadBeginning"]

logger = logging.getLogger("zcactor")
_LEFT = ("sock", "tcp", "verbs")
"""Suffixes of the files by which an earlier head was found on its host."""


class HeadBeginning(Beginning):
    """The steps by which a head begins its term.

    Args:
        setup: of the agent; see `zcactor.node.agent_main.send_setup`.
        config: its settings.
        log: the log; None for the one in the folder that `setup` has.
        remedy: the remedy for a log that cannot be used.
    """

    def __init__(
        self, setup: Mapping[str, Any], config: Config, log: HeadLog | None = None, remedy: str = FRESH
    ) -> None:
        name = str(log)
        if log is None:
            folder, fresh = setup["state"]
            log = FileLog(Path(folder), fresh=fresh)
            name = str(log.path)
        super().__init__(log, name, setup["agent"], config.head_patience, remedy)
        self._address = f"{config.host}:{setup['port']}"
        self._directory = Path(setup["directory"])
        self._beside: bool = setup["beside"]

    async def take(self) -> None:
        """Take the log, as `campaign` does, and remove what an earlier head has left in the run directory.

        Raises:
            LogInUse, LogUnusable, LogUnavailable: as `campaign` does.
        """
        place = Place.here()
        await self.campaign(Candidate(self._address, place.host, place.pid))
        if self.entries is not None:
            self.clear()

    def clear(self) -> None:
        """Remove what an earlier head of the cluster has left in the run directory."""
        for suffix in _LEFT:
            with contextlib.suppress(FileNotFoundError):
                self._directory.joinpath(f"{self.cluster.hex()}.{suffix}").unlink()

    def expect(self, head: Head, taking: TakeOver, entries: Entries) -> None:
        """See `zcactor.control.beginning.Beginning.expect`: a node that is about to be started beside the head is
        waited for, and none that has ended."""
        if self._beside:
            taking.await_beside(machine_of(self._directory))
        for key, member in entries.members.items():
            place = member.facts["address"].rpartition("@")[2]
            head.process.tasks.start(self._look_at(head, taking, ProcessId(bytes.fromhex(key)), place))

    async def _look_at(self, head: Head, taking: TakeOver, node: ProcessId, place: str) -> None:
        """Do not wait for a node that has ended with the earlier head, as when all processes of a host are killed."""
        host, _, port = place.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            taking.ended(node)
            if head.members.standing is not None:
                head.members.standing.ended(node.hex())
        except OSError as error:  # it may return from there all the same
            logger.debug("node %s at %s cannot be looked at: %s", node.hex()[:8], place, error)
        else:
            writer.close()
