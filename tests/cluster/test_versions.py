"""Two versions of the protocol in one cluster: the newer end serves the older one, and sends nothing that it lacks."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import Hosts
from zcactor.transport.version import OLDEST_SERVED

NEWER = """
from zcactor.transport import version
version.PROTOCOL_VERSION += 1  # before anything has read it
from zcactor.process.context import current
from zcactor.rpc.services import Services, remote
from zcactor.transport.stream import handshake
assert handshake.PROTOCOL_VERSION == version.PROTOCOL_VERSION

class Later:
    @remote(127)
    async def later(self) -> int: ...
    @remote(250)
    def told(self, what) -> None: ...

@zc.actor
class Sums:
    def __init__(self): self.kept = None
    def keep(self, x): self.kept = x; return float(x.sum())
    def give(self): return self.kept
    async def all(self, group, x): return float((await group.allreduce(x)).sum())
    def stream(self, count): yield from range(count)

async def main():
    async with zc.init(address=ADDRESS, HOW):
        one, two = await Sums.spawn(), await Sums.spawn()
        x = np.arange(1 << 17, dtype="f8")
        assert await one.keep(x) == x.sum() == await two.keep(one.give())
        assert np.array_equal(await two.give(), x)
        assert [item async for item in one.stream(5)] == [*range(5)]
        group = await zc.group([one, two])
        assert await zc.get([actor.all(group, x) for actor in (one, two)]) == [2 * x.sum()] * 2
        process = current()
        for peer in (process.sessions.head, one._remote.location[0]):
            session = await process.connections.connect(peer)
            process.requests.send(session, Later.told, ("a message",))
            process.requests.send(session, Later.told, ({"key": [1]},))
            try:
                await process.requests.ask_of(session, Later.later)
            except zc.ProtocolError as error:
                text = str(error)
                assert "answers no service method 127" in text and "another version of zcactor" in text, text
            assert await process.requests.ask(session, Services.ping)
        tell(served=True)
asyncio.run(main())
"""
OLDER = """
from zcactor.transport import version
version.PROTOCOL_VERSION = version.OLDEST_SERVED = REFUSED
async def main():
    try:
        async with zc.init(address=ADDRESS, transports=("tcp",)):
            tell(refused=None)
    except zc.VersionMismatch as error:
        tell(refused=str(error))
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("transports", [("local", "tcp"), ("tcp",)])
def test_a_newer_program_in_a_cluster_of_the_version_before(transports: tuple[str, ...]) -> None:
    with Hosts() as hosts:
        node = hosts.start()
        source = NEWER.replace("HOW", f"transports={transports!r}, store_capacity=1 << 26")
        with hosts.program(source, node.record.address) as program:
            assert program.told("served")
            assert program.status() == 0


@pytest.mark.slow
def test_a_program_that_is_too_old_is_refused_by_name() -> None:
    with Hosts() as hosts:
        node = hosts.start()
        with hosts.program(OLDER.replace("REFUSED", str(OLDEST_SERVED - 1)), node.record.address) as program:
            line = program.told("refused")
            assert f"refused protocol {OLDEST_SERVED - 1} " in line and "its zcactor is newer" in line, line
