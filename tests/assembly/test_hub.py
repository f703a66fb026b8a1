"""The hub of a process: its parts answer the sessions' requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.assembly.test_process import PATIENCE, Pair
from zcactor.rpc.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zcactor.rpc.hub import Hub


async def test_a_process_is_a_hub_of_its_parts() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, _):
        hub: Hub = caller.hub
        assert hub.hello().version == PROTOCOL_VERSION and hub.hello().process == hub.process == caller.process
        assert hub.store is caller.store and hub.counters is caller.counters
        assert hub.hosts is caller.hosts.by_index
        assert hub.session_lost == caller.connections.session_lost
        assert hub.import_region == caller.resolver.import_region and hub.read_result == caller.promises.read_result
