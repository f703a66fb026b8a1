"""The beginning of a head with a log in a folder."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcactor.control.bootstrap import Bootstrap
from zcactor.control.file_log import FRESH, FileLog
from zcactor.control.head_log import Candidate
from zcactor.control.node_table import machine_of
from zcactor.logs import logger
from zcactor.process.place import Place
from zcactor.transport.registry import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.config import Config
    from zcactor.control.entries import Entries
    from zcactor.control.failover import Failover
    from zcactor.control.head import Head
    from zcactor.control.head_log import HeadLog

__all__ = ["HeadBootstrap"]


class HeadBootstrap(Bootstrap):
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
            log = FileLog(Path(folder), setup["token"], fresh=fresh)
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
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                self._directory.joinpath(f"{self.cluster.hex()}.{suffix}").unlink()

    def expect(self, head: Head, taking: Failover, entries: Entries) -> None:
        """See `zcactor.control.bootstrap.Bootstrap.expect`: a node that is about to be started beside the head is
        waited for, and none that has ended."""
        if self._beside:
            taking.await_beside(machine_of(self._directory))
        super().expect(head, taking, entries)

    async def refuses(self, address: str) -> bool:
        """See `zcactor.control.bootstrap.Bootstrap.refuses`."""
        host, _, port = address.rpartition("@")[2].rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except OSError as error:  # it may return from there all the same
            logger.debug("the node at %s cannot be looked at: %s", address, error)
        else:
            writer.close()
        return False
