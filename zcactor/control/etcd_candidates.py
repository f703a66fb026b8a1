"""The processes that lead a cluster or would, as etcd knows them: each under a lease of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zcactor.control.etcd_messages import EtcdRefused, EtcdSilent
from zcactor.control.head_log import LogUnusable

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.control.etcd_gateway import EtcdGateway
    from zcactor.control.etcd_messages import EtcdKeys
    from zcactor.control.head_log import Candidate

__all__ = ["KNOWN", "EtcdCandidates"]

KNOWN: Final = 10
"""Seconds for which a candidate is known that was killed."""


class EtcdCandidates:
    """The candidates of one cluster. Used on the loop's thread.

    Args:
        gateway: returns the way to etcd, or raises LogUnusable.
        keys: of the cluster.
    """

    def __init__(self, gateway: Callable[[], EtcdGateway], keys: EtcdKeys) -> None:
        self._gateway = gateway
        self._keys = keys
        self.lease = 0
        """The lease under which others know of this process; 0 where they do not."""

    async def announce(self, me: Candidate) -> None:
        """Have others know of this process, until this is cancelled. Its lease lasts on then for a while."""
        while True:
            try:
                await self._renew(me)
            except EtcdRefused:
                self.lease = 0  # it has ended
            except (EtcdSilent, LogUnusable):
                pass  # it lasts for a while, or is made again
            await asyncio.sleep(KNOWN / 5)

    async def _renew(self, me: Candidate) -> None:
        call = self._gateway().call
        if self.lease:
            answer = await call("/v3/lease/keepalive", {"ID": str(self.lease)}, within=0)
            if answer.get("result", {}).get("TTL"):
                return
            self.lease = 0
        lease = int((await call("/v3/lease/grant", {"TTL": str(KNOWN)}, within=0))["ID"])
        await call("/v3/kv/txn", self._keys.candidate(me, lease), within=0)
        self.lease = lease

    async def all(self) -> list[str]:
        """The addresses of all candidates, ``host:port``.

        Raises:
            EtcdSilent, EtcdRefused, LogUnusable: etcd does not tell them.
        """
        return self._keys.candidates(await self._gateway().call("/v3/kv/txn", self._keys.all_candidates(), within=0))
