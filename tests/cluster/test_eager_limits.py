"""A program with a larger eager limit than its cluster: each connection has the smaller one."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import Hosts

pytestmark = pytest.mark.slow

PROGRAM = """
from zcactor.process.context import current

@zc.actor
class Echo:
    def nothing(self): pass
    def echo(self, x): return x
    def copied(self, x): return x.copy()
    def size(self, x): return len(x)
    def items(self, x):
        for _ in range(2): yield x
    async def items_async(self, x):
        for _ in range(2): yield x
    def fails(self, text): raise ValueError(text)
    async def total(self, group, x):
        return float((await group.allreduce(x)).sum()), len(await group.broadcast(x if group.rank else None, root=1))

async def main():
    async with zc.init(ADDRESS, eager_limit="1 MiB") as node:
        for x in np.ones(60_000, "u1"), "x" * 60_000, {(1, 2): "x" * 60_000}:
            size = len(x)
            new = [await Echo.spawn() for _ in range(4)]
            assert await new[0].size(x) == size, "the call waits for the connection"
            assert await new[1].size.options(idempotent=True, retries=1)(x) == size
            assert await new[2].size(zc.put(x)) == size
            assert await new[3].size(new[0].echo(x)) == size
            a, b = new[:2]
            assert len(await a.echo(x)) == size
            passed = [b.size(a.copied(x) if size > 1 and type(x) is not str else a.echo(x)) for _ in range(3)]
            assert await zc.get(passed) == [size] * 3
            for stream in a.items(x), a.items_async(x):
                assert [len(item) async for item in stream] == [size] * 2
            async with zc.graph() as graph:
                given = graph.input()
                first = a.echo.bind(given)
                graph.output(first, b.size.bind(first), b.echo.bind(given))
            run = await graph.compile()
            for _ in range(2):
                first, counted, second = await run(x)
                assert len(first) == len(second) == size == counted
            await run.close()
        session = await current().connections.connect(a._remote.location[0])
        assert session.connection.eager_limit == 16384
        try:
            await a.fails("x" * 60_000)
        except zc.RemoteError as error:
            assert type(error.original) is ValueError and len(str(error.original)) >= 60_000
        group = await zc.group([a, b])
        x = np.ones(7_000)
        assert await zc.get([each.total(group, x) for each in (a, b)]) == [(14_000.0, 7_000)] * 2
    tell(done=True)
zc.run(main())
"""


def test_each_way_of_a_value_fits_the_smaller_limit() -> None:
    with Hosts() as hosts:
        head = hosts.start()
        with hosts.program(PROGRAM, head.record.address) as program:
            assert program.told("done") is True
            assert program.status() == 0
