"""A cluster whose hosts speak TLS to each other, and peers that it does not let in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.transport.certificates import Authority
from zcactor.errors import AuthenticationError, ProtocolError

PROGRAM = """
@zc.actor
class Maker:
    def made(self, count): return np.arange(count, dtype=np.float64)
    def total(self, array): return float(array.sum())

async def main():
    async with zc.init(ADDRESS, store_capacity=1 << 26, security=TLS):
        nodes = await zc.nodes()
        far = [await Maker.options(node=node.node_id).spawn() for node in nodes]
        for maker in far:
            path = await zc.explain(maker)
            tell(path=[path.transport, path.reason])
        count = 1 << 20
        tell(mine=await far[1].total(np.arange(count, dtype=np.float64)))
        tell(passed=await far[0].total(far[1].made(count)))
        tell(back=float((await far[1].made(count)).sum()))
zc.run(main())
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


@pytest.mark.slow
def test_arrays_between_hosts(hosts: Hosts, tmp_path: Path) -> None:
    authority = Authority()
    there = {host: f"tls:{authority.folder(tmp_path / host)}" for host in "ab"}
    head = hosts.start(security=there["a"])
    hosts.start("b", head, security=there["b"])
    with hosts.program(f"TLS = {there['a']!r}\n{PROGRAM}", head.record.address) as program:
        paths = [program.told("path") for _ in range(2)]
        assert sorted(kind for kind, _ in paths) == ["local", "tcp"]
        assert any("by TLS" in reason for _, reason in paths)
        total = float(sum(range(1 << 20)))
        assert [program.told(what) for what in ("mine", "passed", "back")] == [total] * 3
        assert program.status() == 0


@pytest.mark.slow
def test_who_is_not_let_in(hosts: Hosts, tmp_path: Path) -> None:
    ours, theirs = (f"tls:{Authority().folder(tmp_path / host)}" for host in "ab")
    head = hosts.start(security=ours)
    with pytest.raises(AuthenticationError, match=f"{head.record.address}: the peer's certificate is not accepted"):
        hosts.start("b", head, security=theirs)
    with pytest.raises(ProtocolError, match=f"{head.record.address}: the peer takes connections by TLS only"):
        hosts.start("b", head)
    with pytest.raises(AuthenticationError, match=r"ca\.pem there cannot be read"):
        hosts.start("b", security=f"tls:{tmp_path}/none")
