"""The beginnings of heads with the shared log: of those whose terms last, and of those whose terms are leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.control.beginning import Beginning
from zcactor.control.contested import Contested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.control.head_log import Candidate, HeadLog
    from zcactor.ids import ProcessId
    from zcactor.simulation.endpoint import SimEndpoint

__all__ = ["SimBeginning", "SimContested"]


class SimBeginning(Beginning):
    """The steps of a head whose term ends with its process.

    Args:
        log, cluster, patience: see `zcactor.control.beginning.Beginning`.
        endpoint: of the head, by which it calls nodes and programs.
    """

    def __init__(self, log: HeadLog, cluster: ProcessId, patience: float, endpoint: SimEndpoint) -> None:
        super().__init__(log, "the shared log", cluster, patience)
        self.endpoint = endpoint

    async def lead(self, me: Candidate) -> None:
        """Wait until this head leads.

        Raises:
            LogUnavailable: its log does not answer.
        """
        await self.campaign(me)

    async def refuses(self, address: str) -> bool:
        """See `Beginning.refuses`."""
        return await self.endpoint.refuses(address)


class SimContested(Contested, SimBeginning):
    """The steps of a head whose term is a lease. It is the only one of its cluster."""

    def __init__(self, log: HeadLog, cluster: ProcessId, patience: float, endpoint: SimEndpoint) -> None:
        super().__init__(log, cluster, patience, endpoint)
        self.own = endpoint.address
        self.stood = True  # no command waits for it, which could be told that the log does not answer

    async def lead(self, me: Candidate) -> None:
        """Wait until this head leads."""
        await self.win(me)

    async def candidates(self) -> Sequence[str]:
        """See `Contested.candidates`."""
        return (self.own,)

    async def summon(self, address: str, epoch: int) -> None:
        """See `Contested.summon`."""
        await self.endpoint.summon(address, self.own, epoch)
