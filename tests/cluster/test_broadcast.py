"""One array to many hosts: the source of each host's copy, and the other hosts' reads when one host dies meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts
from zcactor.cluster.daemon import StartedNode

NBYTES = 64 << 20
NAMES = "abcde"

ACTORS = f"""
import zlib
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.serve import DataServer

NBYTES = {NBYTES}

@zc.actor
class Source:
    def __init__(self):
        self.asked = asked = []
        answer = DataServer._answer
        def counting(server, channel, arena, object_id, offset, nbytes):
            asked.append(nbytes)
            answer(server, channel, arena, object_id, offset, nbytes)
        DataServer._answer = counting
        self.array = zc.empty(NBYTES // 8)
        self.array[:] = np.random.default_rng(5).random(NBYTES // 8)
    def checksum(self): return zlib.crc32(self.array)
    async def spread(self, readers):
        # Each by itself: one that dies takes no other along.
        ends = await asyncio.gather(*(reader.keep(self.array) for reader in readers), return_exceptions=True)
        return [end if type(end) is int else type(end).__name__ for end in ends]
    def out(self): return sum(self.asked)

@zc.actor
class Reader:
    def __init__(self):
        self.stuck = threading.Event()
    def keep(self, array):
        self.array = array
        return zlib.crc32(array)
    async def pid(self): return os.getpid()
    async def hangs_when(self, what):
        stuck = self.stuck
        if what == "reading":
            async def pull(*_):
                stuck.set()
                await asyncio.Event().wait()
            TcpConnection.pull = pull
        else:
            def answer(*_):
                stuck.set()
                hang()
            DataServer._answer = answer
    async def hangs(self):
        while not self.stuck.is_set():
            await asyncio.sleep(0.01)

async def cast(ids):
    source = await Source.options(node=ids[0]).spawn()
    return source, [await Reader.options(node=node).spawn() for node in ids[1:]]

async def figures(readers):
    stats = [await zc.stats(reader) for reader in readers]
    return [[s.bytes_received, s.bytes_mapped, s.bytes_copied] for s in stats]
"""


@pytest.fixture
def nodes() -> Iterator[tuple[Hosts, list[StartedNode]]]:
    with Hosts() as hosts:
        for name in NAMES:
            hosts.run_directories(name).mkdir(mode=0o700, exist_ok=True)
        head = hosts.start("a", store_capacity=4 * NBYTES)
        others = [hosts.start(name, head, store_capacity=4 * NBYTES) for name in NAMES[1:]]
        yield hosts, [head, *others]


BROADCAST = (
    ACTORS
    + """
async def main():
    async with zc.init(ADDRESS):
        ids = [node.node_id for node in await zc.nodes()]
        source, readers = await cast(ids)
        tell(expected=await source.checksum())
        tell(sums=await source.spread(readers))
        tell(out=await source.out())
        tell(figures=await figures(readers))
        more = [await Reader.options(node=ids[1]).spawn(), await Reader.options(node=ids[1]).spawn()]
        tell(sums=await source.spread(more))
        tell(out=await source.out())
        tell(figures=await figures([*more, readers[0]]))
zc.run(main())
"""
)


@pytest.mark.slow
def test_a_broadcast_leaves_its_owner_twice_and_each_host_takes_it_once(
    nodes: tuple[Hosts, list[StartedNode]],
) -> None:
    hosts, (head, *_) = nodes
    with hosts.program(BROADCAST, head.record.address) as program:
        expected = program.told("expected")
        assert program.told("sums") == [expected] * 4
        assert program.told("out") == 2 * NBYTES
        assert program.told("figures") == [[NBYTES, 0, 0]] * 4
        assert program.told("sums") == [expected] * 2
        assert program.told("out") == 2 * NBYTES
        figures = program.told("figures")
        assert figures == [[0, NBYTES, 0]] * 2 + [[NBYTES, 0, 0]], "the host has it, and the others there map it"
        assert program.status() == 0


DYING = (
    ACTORS
    + """
WHAT = "{what}"

async def main():
    async with zc.init(ADDRESS):
        ids = [node.node_id for node in await zc.nodes()]
        source, (victim, *others) = await cast(ids)
        tell(expected=await source.checksum())
        if WHAT == "reading":
            await victim.hangs_when(WHAT)
            spreading = source.spread([victim, *others])
        else:
            await source.spread([victim])
            await victim.hangs_when(WHAT)
            spreading = source.spread(others)
        await victim.hangs()
        tell(kill=True)
        tell(sums=(await spreading)[-3:])
        tell(figures=await figures(others))
zc.run(main())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reading", "serving"])
def test_a_host_that_dies_in_a_broadcast(nodes: tuple[Hosts, list[StartedNode]], what: str) -> None:
    hosts, (head, victim, *_) = nodes
    with hosts.program(DYING.replace("{what}", what), head.record.address) as program:
        expected = program.told("expected")
        assert program.told("kill")
        os.kill(victim.process.pid, signal.SIGKILL)
        assert program.told("sums", 50) == [expected] * 3
        for received, mapped, copied in program.told("figures"):
            assert (received, mapped, copied) == (NBYTES, 0, 0)
        assert program.status() == 0
