"""Nodes that outlive the process that starts them: two made-up hosts, programs that join, and every way to end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import CLOSING_ACTOR, KEEPER, Hosts, beside, stop
from tests.driver.programs import alive, until
from zcactor.cluster import daemon
from zcactor.cluster.daemon import StartedNode, log_directory, stop_nodes
from zcactor.cluster.records import NodeFile, list_nodes
from zcactor.device.fake import host_uuids
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.node.agent_main import send_setup
from zcactor.token import make_token_file, read_token_file
from zcactor.transport.stream import handshake_io
from zcactor.workers.run_directory import shared_names

HELPERS = '''
async def again(call):
    """The result of ``call()``, which may have to wait for an actor that starts again."""
    while True:
        try:
            return await call()
        except zc.ActorUnavailable:
            await asyncio.sleep(0.01)

zc.actor(Busy)

@zc.actor
class Maker:
    def made(self, count): return np.arange(count, dtype=np.float64)
    def total(self, array): return float(array.sum())
    def pid(self): return os.getpid()
    def visible(self): return os.environ.get("CUDA_VISIBLE_DEVICES")
    async def node(self): return zc.current_actor().node
'''


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def ended(*nodes: StartedNode) -> list[tuple[NodeFile, bool]]:
    """The result of `stop` where those have ended by themselves: heads, and the nodes beside them."""
    return [(record, True) for record in records(*nodes)]


def records(*nodes: StartedNode) -> list[NodeFile]:
    """The records of nodes of one cluster and of those beside heads, in the order of `list_nodes`."""
    found = [each.record for node in nodes for each in node.all]
    return sorted(found, key=lambda record: (record.role != "head", record.node))


def a_port_that_is_taken() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


# ---- one node


@pytest.mark.slow
def test_a_head_from_start_to_stop(hosts: Hosts) -> None:
    node = hosts.start()
    record = node.record
    assert record.role == "head"
    assert record.address == record.head
    assert record.address.startswith("127.0.0.1:")
    assert record.pid == node.process.pid
    member = beside(node)
    assert (member.record.role, member.record.head) == ("member", record.address)
    assert member.record.pid == member.process.pid != record.pid
    assert list_nodes(hosts.run_directories("a")) == records(node) == [record, member.record]
    assert list_nodes(hosts.run_directories("b")) == []
    assert node.token == str(hosts.token_file)
    assert len(read_token_file(hosts.token_file)) == 32
    log = Path(record.log)
    assert log.parent == log_directory(hosts.variables("a"))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    (directory,) = hosts.run_directories("a").iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    node.control.close()  # the process that started the node is gone
    member.control.close()
    assert stop(hosts) == ended(node)
    assert node.process.wait() == member.process.wait() == 0
    assert log.read_text() == Path(member.record.log).read_text() == ""
    hosts.assert_clean("a")
    assert stop(hosts) == []


@pytest.mark.slow
def test_a_head_and_an_agent_do_without_numpy(hosts: Hosts) -> None:
    node = hosts.start()
    for each in node.all:
        assert "_multiarray_umath" not in Path(f"/proc/{each.record.pid}/maps").read_text(), each.record.role
    below = psutil.Process(beside(node).record.pid).children(recursive=True)
    maps = [Path(f"/proc/{process.pid}/maps") for process in below]
    until(lambda: any("_multiarray_umath" in path.read_text() for path in maps), "a zygote with NumPy, for workers")


@pytest.mark.slow
def test_one_that_does_not_stay_ends_with_who_started_it(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    node = hosts.start(stays=False)
    assert node.record.log == ""
    assert list_nodes(hosts.run_directories("a")) == records(node)
    node.control.close()
    assert node.process.wait(20) == beside(node).process.wait(20) == 0
    hosts.assert_clean("a")
    assert hosts.logs() == []


@pytest.mark.slow
def test_a_hangup_and_a_signal_end_it_in_order(hosts: Hosts) -> None:
    for number in (signal.SIGHUP, signal.SIGTERM):
        node = hosts.start()
        node.process.send_signal(number)
        assert node.process.wait(20) == beside(node).process.wait(20) == 0
        hosts.assert_clean("a")


@pytest.mark.slow
def test_two_heads_on_one_host(hosts: Hosts) -> None:
    first, second = hosts.start(), hosts.start()
    found = list_nodes(hosts.run_directories("a"))
    assert found == sorted(found, key=lambda record: record.role != "head")
    assert set(found) == {*records(first), *records(second)}
    assert len(list(hosts.run_directories("a").iterdir())) == 2
    assert set(stop(hosts)) == {*ended(first), *ended(second)}
    for node in (*first.all, *second.all):
        node.process.wait()
    hosts.assert_clean("a")


@pytest.mark.slow
def test_one_that_does_not_end_in_time_is_killed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    node = hosts.start()
    node.process.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    monkeypatch.setattr(daemon, "_KILLED", 3.0)
    assert stop_nodes(0.0, hosts.run_directories("a")) == [(node.record, False), (beside(node).record, True)]
    assert node.process.wait() == -signal.SIGKILL
    until(lambda: not hosts.processes(), "what it had started to end with it")
    assert list_nodes(hosts.run_directories("a")) == []
    again = hosts.start()  # the next node removes the leftovers
    (path,) = hosts.run_directories("a").iterdir()
    assert path.name[-32:] == shared_names(again.record.node, read_token_file(hosts.token_file))[0]
    assert stop(hosts) == ended(again)
    again.process.wait()
    hosts.assert_clean("a")


@pytest.mark.slow
def test_settings_and_resources_reach_the_node(hosts: Hosts) -> None:
    with a_port_that_is_taken() as taken:
        port = taken.getsockname()[1]
    node = hosts.start(
        port=port, num_cpus=7, num_gpus=3, resources={"tape": 1.5}, host="127.0.0.2", own_host=True,
        environ={"CUDA_VISIBLE_DEVICES": ""},  # GPUs that the node does not know are counted
    )  # fmt: skip
    assert node.record.address == f"127.0.0.2:{port}"
    with hosts.program(
        """
async def main():
    async with zc.init(ADDRESS):
        tell(resources=await zc.cluster_resources())
zc.run(main())
""",
        node.record.address,
    ) as program:
        assert program.told("resources") == {"CPU": 7.0, "GPU": 3.0, "tape": 1.5}
        assert program.status() == 0


# ---- refused starts, which leave nothing behind


@pytest.mark.slow
def test_port_in_use(hosts: Hosts) -> None:
    with a_port_that_is_taken() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionLost, match=f"cannot listen at 127.0.0.1 port {port}: .*in use"):
            hosts.start(port=port)
    hosts.assert_clean("a")


@pytest.mark.slow
def test_an_address_of_another_machine(hosts: Hosts) -> None:
    hosts.token_file.parent.mkdir(parents=True)
    hosts.token_file.touch(0o600)
    hosts.token_file.write_text(secrets.token_hex(32))
    with pytest.raises(ConnectionLost, match="cannot listen at 203.0.113.7.*: Cannot assign"):
        hosts.start(host="203.0.113.7", own_host=True)
    hosts.assert_clean("a")


def test_nobody_at_the_address(hosts: Hosts) -> None:
    with a_port_that_is_taken() as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    token = {"ZCACTOR_TOKEN": secrets.token_hex(32)}
    with pytest.raises(ConnectionLost, match=f"{address} cannot be reached over TCP: Connection refused"):
        hosts.start(head=address, environ=token)
    hosts.assert_clean("a")


def test_silence_at_the_address(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.05)
    with a_port_that_is_taken() as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=f"{address} did not answer the handshake"):
            hosts.start(head=address, environ={"ZCACTOR_TOKEN": secrets.token_hex(32)})
    hosts.assert_clean("a")


@pytest.mark.slow
def test_another_token(hosts: Hosts) -> None:
    head = hosts.start()
    wrong = secrets.token_hex(32)
    with pytest.raises(AuthenticationError, match="holds another token") as refused:
        hosts.start("b", head, environ={"ZCACTOR_TOKEN": wrong})
    assert head.record.address in str(refused.value)
    assert wrong not in str(refused.value)
    assert stop(hosts) == ended(head)
    head.process.wait()
    hosts.assert_clean("a", "b")


def test_a_member_needs_a_token(hosts: Hosts) -> None:
    with pytest.raises(AuthenticationError, match=f"to join 127.0.0.1:1 .* copy {hosts.token_file} from the head"):
        hosts.start(head="127.0.0.1:1")
    assert not hosts.token_file.exists()


def test_a_head_that_others_reach_needs_a_token(hosts: Hosts) -> None:
    with pytest.raises(AuthenticationError, match="make one with 'zcactor token'"):
        hosts.start(host="192.0.2.1", own_host=True)
    assert not hosts.token_file.exists()
    hosts.assert_clean("a")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("head", [None, "127.0.0.1:1"])
def test_every_address_at_once_is_none(hosts: Hosts, host: str, head: str | None) -> None:
    with pytest.raises(ValueError, match=rf"^{host} is no place .* for instance --host [0-9.]+$"):
        hosts.start(host=host, own_host=True, head=head)
    assert not hosts.token_file.exists()


def test_a_token_that_others_can_read(hosts: Hosts) -> None:
    hosts.token_file.parent.mkdir(parents=True)
    hosts.token_file.write_text(secrets.token_hex(32))
    hosts.token_file.chmod(0o644)
    for head in (None, "127.0.0.1:1"):
        with pytest.raises(AuthenticationError, match=f"mode 0644.*chmod 600 {hosts.token_file}"):
            hosts.start(head=head)
    hosts.assert_clean("a")


@pytest.mark.slow
def test_a_token_that_another_head_makes_at_the_same_moment(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def late(path: Path) -> bytes:
        made.append(make_token_file(path))
        return make_token_file(path)

    monkeypatch.setattr(daemon, "make_token_file", late)
    node = hosts.start()
    assert node.token == str(hosts.token_file)
    assert made == [read_token_file(hosts.token_file)]


@pytest.mark.slow
def test_a_node_that_fails_at_its_start(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(sock: socket.socket, setup: Any) -> None:
        send_setup(sock, {**setup, "config": {**setup["config"], "recv_depth": -1}})

    monkeypatch.setattr(daemon, "send_setup", nonsense)
    with pytest.raises(ConnectionLost, match=r"ended at its start with status 1; the end of (?s:.*)recv_depth") as lost:
        hosts.start()
    (log,) = hosts.logs()
    assert str(log) in str(lost.value)
    hosts.assert_clean("a")


def test_a_node_that_is_not_ready_in_time(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "send_setup", lambda *_: None)
    with pytest.raises(ConnectionLost, match=r"did not start within 0.1 s \(spawn_timeout\)"):
        hosts.start(spawn_timeout=0.1)
    hosts.assert_clean("a")


@pytest.mark.slow
def test_the_token_is_in_no_environment(hosts: Hosts) -> None:
    token = secrets.token_hex(32)
    node = hosts.start(environ={"ZCACTOR_TOKEN": token})
    assert node.token == "ZCACTOR_TOKEN"
    for pid in hosts.processes():
        for name in ("environ", "cmdline"):
            assert token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


# ---- a cluster

TWO_NODES = (
    HELPERS
    + """
async def main():
    async with zc.init(ADDRESS) as node:
        nodes = await zc.nodes()
        tell(nodes=[[n.node_id, n.address, n.host, dict(n.resources), list(n.transports), n.alive] for n in nodes])
        tell(repr=repr(node))
        here, there = [await Maker.options(node=n.node_id).spawn() for n in nodes]
        tell(at=[await here.node(), await there.node()])
        tell(paths=[(await zc.explain(here)).transport, (await zc.explain(there)).transport])
        sums = [await there.total(await here.made(1 << 17)), await here.total(await there.made(1 << 17))]
        sums += [await there.total(here.made(1 << 17)), await here.total(there.made(1 << 17))]
        tell(sums=sums)
        tell(mine=await there.total(np.ones(1 << 17)))
        spread = [await Maker.options(node="spread").spawn() for _ in range(4)]
        tell(spread=[await actor.node() for actor in spread])
        tape = await Maker.options(resources={"tape": 1}).spawn()
        tell(tape=await tape.node())
        tell(free=await zc.available_resources())
        for wanted in ({"resources": {"tape": 2}}, {"num_cpus": 3}, {"resources": {"moon": 1}}):
            try:
                await Maker.options(**wanted).spawn()
            except zc.InsufficientResources as error:
                tell(refused=str(error))
        await tape.pid()
    tell(done=True)
zc.run(main())
"""
)


GPUS_OF_NODES = (
    HELPERS
    + """
async def main():
    async with zc.init(ADDRESS):
        head, member = await zc.nodes()
        tell(total=await zc.cluster_resources())
        first = [await Maker.options(num_gpus=1, node=node.node_id).spawn() for node in (head, member)]
        tell(first=[await actor.visible() for actor in first])
        moving = await Maker.options(num_gpus=1, node="spread", max_restarts=1).spawn()
        tell(moving=await moving.visible())
        tell(agent=member.pid)
        await zc.stop(first[0])
        tell(stopped=True)
        while len(await zc.nodes()) > 1:
            await asyncio.sleep(0.05)
        tell(moved=await again(moving.visible))
        tell(free=await zc.available_resources())
zc.run(main())
"""
)


@pytest.mark.slow
def test_each_node_has_gpus_of_its_own(hosts: Hosts) -> None:
    settings: dict[str, Any] = {"gpu": "fake:devices=3", "num_gpus": None}
    uuids = host_uuids("devices=3")
    head = hosts.start(environ={"CUDA_VISIBLE_DEVICES": "1"}, **settings)
    hosts.start("b", head, environ={"CUDA_VISIBLE_DEVICES": f"2,{uuids[0]}"}, **settings)
    with hosts.program(GPUS_OF_NODES, head.record.address) as program:
        assert program.told("total")["GPU"] == 3
        assert program.told("first") == [uuids[1], uuids[2]]
        assert program.told("moving") == uuids[0]
        agent = program.told("agent")
        assert program.told("stopped")
        os.kill(agent, signal.SIGKILL)
        assert program.told("moved") == uuids[1], "in its next life it has a GPU of the other node"
        assert program.told("free")["GPU"] == 0
        assert program.status() == 0


@pytest.mark.slow
def test_a_cluster_of_two_hosts(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("b", head, num_cpus=1, resources={"tape": 1})
    assert member.record.role == "member"
    assert member.record.head == head.record.address
    nodes = [beside(head), member]
    ids = [node.record.node for node in nodes]
    with hosts.program(TWO_NODES, head.record.address) as program:
        assert program.told("nodes") == [
            [
                node.record.node, f"{node.record.node}@{node.record.address}", socket.gethostname(), resources,
                ["local", "verbs", "tcp"], True,
            ]
            for node, resources in zip(nodes, [{"CPU": 2.0}, {"CPU": 1.0, "tape": 1.0}], strict=True)
        ]  # fmt: skip
        assert head.record.address in program.told("repr")
        assert program.told("at") == ids
        local, remote = program.told("paths")
        assert local == "local"
        assert remote in ("tcp", "verbs")
        count = 1 << 17
        assert program.told("sums") == [count * (count - 1) / 2] * 4
        assert program.told("mine") == count
        assert sorted(program.told("spread")) == sorted(ids * 2)
        assert program.told("tape") == ids[1]
        assert program.told("free") == {"CPU": 3.0, "tape": 0.0}
        for what in ("tape", "CPU", "moon"):
            refused = program.told("refused")
            assert what in refused
            assert all(node[:8] in refused for node in ids), refused
        assert program.told("done")
        assert program.status() == 0
    assert stop(hosts) == ended(head)
    for node in (head, member):
        assert node.process.wait(20) == 0
    hosts.assert_clean("a", "b")


DETACHING = """
zc.actor(Busy)

async def main():
    async with zc.init(ADDRESS):
        stays = await Busy.options(name="stays", lifetime="detached").spawn()
        owned = await Busy.options(name="goes").spawn()
        tell(pids=[await stays.pid(), await owned.pid()])
        if HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    tell(done=True)
HOW = "{how}"
zc.run(main())
"""

FINDING = """
zc.actor(Busy)

async def main():
    async with zc.init(ADDRESS):
        found = await zc.get_actor("stays")
        tell(stays=await found.pid())
        while True:
            try:
                await zc.get_actor("goes")
            except zc.NoSuchActor as error:
                tell(goes=str(error))
                break
            await asyncio.sleep(0.01)
        await zc.stop(found)
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_what_outlives_a_program(hosts: Hosts, how: str) -> None:
    head = hosts.start()
    with hosts.program(DETACHING.replace("{how}", how), head.record.address) as program:
        stays, goes = program.told("pids")
        assert program.status() == (0 if how == "ended" else -signal.SIGKILL)
    with hosts.program(FINDING, head.record.address) as program:
        assert program.told("stays") == stays
        assert "no actor named 'goes'" in program.told("goes")
        until(lambda: not alive(goes), "the owned actor to end")
        assert program.status() == 0
    until(lambda: not alive(stays), "the detached actor to end when it is stopped")
    assert stop(hosts) == ended(head)
    head.process.wait()
    hosts.assert_clean("a")


LEAVING_ARRAYS = """
@zc.actor
class Keeper:
    def keep(self, *arrays):
        self.arrays = arrays
    def sums(self): return [float(array.sum()) for array in self.arrays]
    def give(self): return self.arrays
    def pid(self): return os.getpid()

async def leave():
    keeper = await Keeper.options(name="keeper", lifetime="detached").spawn()
    # NumPy's and the store's own; smaller and larger than what is given back at once, which is 2 MiB
    await keeper.keep(np.full(1 << 17, 5.0), np.full(1 << 20, 5.0), zc.full(1 << 17, 5.0), zc.full(1 << 20, 5.0))

async def main():
    if HOW == "in order":
        async with zc.init(ADDRESS):
            await leave()
    else:
        await zc.init(ADDRESS)
        await leave()
        if HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
LOOKING_AT_ARRAYS = """
@zc.actor
class Other:
    def sums(self, arrays): return [float(array.sum()) for array in arrays]

async def look():
    async with zc.init(ADDRESS):
        keeper = await zc.get_actor("keeper")
        junk = [zc.full(1 << 17, 99.0) for _ in range(8)]
        other = await Other.spawn()
        tell(sums=await keeper.sums())
        tell(passed=await other.sums(await keeper.give()))
        tell(on=await other.sums(keeper.give()))
asyncio.run(look())
"""
PARKED = """
def waiting(): return [thread for thread in threading.enumerate() if thread.name == "zcactor-parking"]

tell(waiting=[thread.name for thread in waiting()])
while left := waiting():
    left[0].join()
tell(gone=True)
"""
SUMS = [5.0 * (1 << 17), 5.0 * (1 << 20)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in order", "by its exit", "killed"])
def test_arrays_outlive_the_program_that_made_them(hosts: Hosts, how: str) -> None:
    head = hosts.start()
    with hosts.program(f"HOW = {how!r}\n{LEAVING_ARRAYS}", head.record.address) as program:
        assert program.status() == (-signal.SIGKILL if how == "killed" else 0)
    with hosts.program(LOOKING_AT_ARRAYS, head.record.address) as program:
        assert program.told("sums") == SUMS
        assert program.told("passed") == program.told("on") == SUMS, "its process adopts what it passes on"
        assert program.status() == 0


@pytest.mark.slow
def test_arrays_outlive_the_runtime_of_a_program_that_lives_on(hosts: Hosts) -> None:
    """The memory of a program's arrays goes back when their reader is gone."""
    head = hosts.start()
    source = f"HOW = 'in order'\n{LEAVING_ARRAYS}{LOOKING_AT_ARRAYS}"
    kill = "asyncio.run(look())\nos.kill(PID, signal.SIGKILL)"
    source = source.replace("tell(sums=", "global PID\n        PID = await keeper.pid()\n        tell(sums=")
    with hosts.program(source.replace("asyncio.run(look())", kill) + PARKED, head.record.address) as program:
        assert program.told("sums") == SUMS
        assert program.told("waiting") == ["zcactor-parking"]
        assert program.told("gone")
        assert program.status() == 0


LOSING_A_NODE = (
    HELPERS
    + """
async def main():
    async with zc.init(ADDRESS):
        head, member = [node.node_id for node in await zc.nodes()]
        doomed = await Busy.options(node=member).spawn()
        phoenix = await Maker.options(max_restarts=1).spawn()
        waiting = doomed.wait()
        assert await phoenix.node() == member
        tell(ready=[await doomed.pid(), await phoenix.pid()])
        try:
            await waiting
        except zc.ActorDied as error:
            tell(died=str(error))
        while (place := await again(phoenix.node)) == member:  # it is stopped in order: one actor after the other ends
            await asyncio.sleep(0)
        tell(restarted_at=place)
        while len(nodes := await zc.nodes()) > 1:
            await asyncio.sleep(0.01)
        tell(nodes=[node.node_id for node in nodes])
        tell(resources=await zc.cluster_resources())
        tell(states=sorted([actor.class_name, actor.state, actor.restarts] for actor in await zc.actors()))
        try:
            await doomed.pid()
        except zc.ActorDied as error:
            tell(still=str(error))
zc.run(main())
"""
)


@pytest.mark.slow
def test_a_member_is_killed(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("b", head, resources={"tape": 1})
    with hosts.program(LOSING_A_NODE, head.record.address, host="b") as program:
        pids = program.told("ready")
        member.process.kill()
        member.process.wait()
        label = f"node {member.record.node[:8]}"
        assert label in program.told("died")
        assert program.told("restarted_at") == beside(head).record.node
        assert program.told("nodes") == [beside(head).record.node]
        assert program.told("resources") == {"CPU": 2.0}
        assert program.told("states") == [["Busy", "dead", 0], ["Maker", "alive", 1]]
        assert label in program.told("still")
        assert program.status() == 0
    until(lambda: not any(map(alive, pids)), "its actors to end")
    assert label in Path(head.record.log).read_text()
    assert stop(hosts) == ended(head)
    head.process.wait()
    hosts.assert_clean("a")


LOSING_THE_HEAD = """
zc.actor(Busy)

async def main():
    async with zc.init(ADDRESS):
        head, member = [node.node_id for node in await zc.nodes()]
        actors = [await Busy.options(node=node).spawn() for node in (head, member)]
        waiting = [actor.wait() for actor in actors]
        tell(ready=[await actor.pid() for actor in actors])
        for ref in waiting:
            try:
                await ref
            except (zc.ActorDied, zc.ActorUnavailable, zc.ConnectionLost) as error:
                tell(lost=type(error).__name__)
        try:
            await zc.nodes()
        except zc.ConnectionLost as error:
            tell(nodes=str(error))
    tell(done=True)
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("host", ["a", "b"])
def test_the_head_is_killed(hosts: Hosts, host: str) -> None:
    head = hosts.start()
    member = hosts.start("b", head)
    with hosts.program(LOSING_THE_HEAD, head.record.address, host=host) as program:
        pids = program.told("ready")
        head.process.kill()
        head.process.wait()
        assert member.process.wait(20) == 0
        assert program.told("lost")
        assert program.told("lost")
        assert program.told("nodes")
        assert program.told("done")
        assert program.status() == 0
    assert not any(map(alive, pids))
    hosts.assert_clean("b")
    assert "head is lost" in Path(member.record.log).read_text()
    assert list_nodes(hosts.run_directories("a")) == []


LEAVING_BEHIND = """
shell = ["/bin/sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo $!"]
@zc.actor
class Starter:
    def started(self):
        own = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        return [subprocess.Popen(["sleep", "1000"], env=env, start_new_session=new).pid
                for env in (None, {}) for new in (False, True)] + [int(own)]

async def main():
    async with zc.init(ADDRESS):
        actor = await Starter.options(lifetime="detached", name="starter").spawn()
        tell(pids=await actor.started())
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [("agent", "zygote"), ("zygote", "agent"), ("keeper", "agent"), ("keeper", "zygote")])
def test_what_actors_have_started_ends_though_two_of_a_node_are_killed(hosts: Hosts, order: tuple[str, str]) -> None:
    node = hosts.start()
    with hosts.program(LEAVING_BEHIND, node.record.address) as program:
        pids = program.told("pids")
        assert program.status() == 0
    found = {text.partition(":")[0]: pid for pid, text in hosts.processes().items()}
    by_role = {"agent": beside(node).process.pid, "zygote": found["zc zygote"], "keeper": found["zc keeper"]}
    assert all(map(alive, pids))
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that neither sees the other end
        for role in order:
            os.kill(by_role[role], number)
    until(lambda: not any(map(alive, pids)), "what the actor has started ends")
    beside(node).process.wait()
    until(lambda: [*hosts.processes()] == [node.process.pid], "all of the node ends, and the head goes on")
    assert stop(hosts) == ended(node)[:1]
    node.process.wait()


FREEZING_A_NODE = (
    HELPERS
    + """
async def main():
    async with zc.init(ADDRESS):
        head, member = [node.node_id for node in await zc.nodes()]
        blocked = await Busy.options(node=head).spawn()
        patient = blocked.block()
        phoenix = await Busy.options(node="spread", max_restarts=1, name="phoenix").spawn()
        waiting = phoenix.wait()
        tell(ready=await phoenix.pid())
        try:
            await waiting
        except zc.ActorUnavailable as error:
            tell(ended=[str(error), error.maybe_executed])
        while True:
            try:
                pid = await phoenix.pid()
                break
            except zc.ActorUnavailable:
                await asyncio.sleep(0.05)
        tell(again=[pid, await (await zc.get_actor("phoenix")).pid()])
        tell(patient=patient.done())
zc.run(main())
"""
)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_all_of_a_host_is_frozen(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("b", head)
    with hosts.program(FREEZING_A_NODE, head.record.address) as program:
        pid = program.told("ready")
        frozen = hosts.processes_of("b")
        assert pid in frozen
        assert member.process.pid in frozen
        for each in frozen:
            os.kill(each, signal.SIGSTOP)
        text, maybe_executed = program.told("ended", 40.0)  # eight seconds are promised
        assert "its host is silent" in text
        assert maybe_executed
        new, again = program.told("again", 80.0)
        assert new == again
        assert new not in frozen
        assert program.told("patient") is False, "a loop that is blocked on a host that lives is waited for"
        for each in frozen:
            with contextlib.suppress(ProcessLookupError):  # the agent ends its workers as soon as it goes on
                os.kill(each, signal.SIGCONT)
        assert program.status() == 0
    until(lambda: not alive(pid), "what has been given up to end")
    member.process.wait(20)
    assert stop(hosts) == ended(head)
    head.process.wait()


@pytest.mark.slow
def test_a_member_is_stopped(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("b", head)
    with hosts.program(LOSING_A_NODE, head.record.address, host="b") as program:
        program.told("ready")
        assert stop(hosts, "b") == [(member.record, True)]
        member.process.wait()
        assert program.told("died")
        assert program.told("restarted_at") == beside(head).record.node
        assert program.status() == 0
    assert list_nodes(hosts.run_directories("a")) == records(head)
    assert stop(hosts) == ended(head)
    head.process.wait()
    hosts.assert_clean("a", "b")


@pytest.mark.slow
def test_a_member_on_the_heads_host(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("a", head)
    assert list_nodes(hosts.run_directories("a")) == records(head, member)
    (directory,) = hosts.run_directories("a").iterdir()
    assert {path.name for path in directory.glob("node-*")} == {
        f"node-{record.node}.json" for record in records(head, member)
    }
    assert stop(hosts) == ended(head, member)
    for node in (head, member):
        node.process.wait()
    hosts.assert_clean("a")


@pytest.mark.slow
def test_a_member_that_ends_with_its_head_is_told_of(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    head = hosts.start()
    member = hosts.start("a", head)
    send = signal.pidfd_send_signal

    def and_wait(pidfd: int, number: int) -> None:
        send(pidfd, number)
        member.process.wait()

    monkeypatch.setattr(signal, "pidfd_send_signal", and_wait)
    assert stop(hosts) == ended(head, member)
    head.process.wait()
    hosts.assert_clean("a")


PRINTING = """
zc.actor(Busy)

async def main():
    async with zc.init(ADDRESS):
        actor = await Busy.options(node=(await zc.nodes())[1].node_id, lifetime="detached", name="x").spawn()
        await actor.say("for the program")
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        tell(pid=await actor.pid())
        await heard.wait()
zc.run(main())
"""


@pytest.mark.slow
def test_what_actors_print_comes_to_their_program(hosts: Hosts) -> None:
    head = hosts.start()
    hosts.start("b", head)
    with hosts.program(PRINTING, head.record.address) as program:
        pid = program.told("pid")
        line = f"(Busy x pid={pid}) for the program"
        if line not in program.text():
            program.said(line)
        os.kill(program.pid, signal.SIGUSR1)
        assert program.status() == 0
    assert os.path.exists(f"/proc/{pid}")
    assert "for the program" not in "".join(log.read_text() for log in hosts.logs())


CLOSING = (
    CLOSING_ACTOR
    + """

async def main():
    async with zc.init(ADDRESS):
        for number, node in enumerate(await zc.nodes()):
            actor = await Closing.options(lifetime="detached", name=str(number), node=node.node_id).spawn(
                PATH + str(number)
            )
            tell(pid=await actor.pid())
zc.run(main())
"""
)


@pytest.mark.slow
def test_idle_actors_are_closed_in_order(hosts: Hosts) -> None:
    head = hosts.start()
    member = hosts.start("b", head)
    closed = hosts.directory / "closed"
    with hosts.program(CLOSING.replace("PATH", repr(str(closed))), head.record.address) as program:
        pids = [program.told("pid"), program.told("pid")]
        assert program.status() == 0
    assert all(map(alive, pids))
    assert stop(hosts) == ended(head)
    for node in (head, member):
        assert node.process.wait(20) == 0
    assert [path.name for path in sorted(hosts.directory.glob("closed*"))] == ["closed0", "closed1"]
    hosts.assert_clean("a", "b")


SLOW = """
class Worker:
    def slow(self):
        tell(running=1)
        hang()

async def main():
    async with zc.init(ADDRESS, config=zc.Config(shutdown_timeout=600.0)):
        worker = await zc.spawn(Worker)
        tell(label=repr(worker)[len("<handle of "):-1])
        await worker.slow()
zc.run(main())
"""


@pytest.mark.slow
def test_ctrl_c_says_for_what_it_waits_and_once_more_ends_it(hosts: Hosts) -> None:
    head = hosts.start()
    with hosts.program(SLOW, head.record.address) as program:
        label = program.told("label")
        program.told("running")
        os.kill(program.pid, signal.SIGINT)
        line = f"waiting up to 600 s for Worker.slow in {label}; Ctrl-C again ends it at once"
        until(lambda: line in program.stderr().splitlines(), f"{line!r} in {program.stderr()!r}")
        os.kill(program.pid, signal.SIGINT)
        assert program.status() in (-signal.SIGINT, 130)


MOVING = (
    KEEPER
    + """
failed = 0

async def again(call):
    global failed  # calls that are lost with a process are made again
    while True:
        try:
            return await call()
        except zc.ActorUnavailable:
            failed += 1
            await asyncio.sleep(0.01)

async def main():
    async with zc.init(ADDRESS):
        kept = await Keeper.options(max_restarts=1).spawn()  # beside this program
        tell(ready=await kept.pid())
        while not os.path.exists(GATE):
            await again(kept.add)
        pid = await again(kept.pid)
        (actor,) = await zc.actors()
        tell(now=[pid, actor.restarts, actor.node_id, failed])
    tell(done=True)
zc.run(main())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("moves", [True, False])
def test_sigterm_has_the_actors_of_a_node_move_and_stop_does_not(hosts: Hosts, moves: bool) -> None:
    head = hosts.start("a")
    member = hosts.start("b", head)
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{MOVING}", head.record.address, host="b") as program:
        pid = program.told("ready")
        if moves:
            member.process.send_signal(signal.SIGTERM)
        else:
            assert stop(hosts, "b") == ended(member)
        assert member.process.wait(20) == 0
        gate.touch()
        now, restarts, node, failed = program.told("now")
        assert now != pid
        assert restarts == (0 if moves else 1), "a move is no restart"
        assert not (moves and failed), "calls wait for an actor that moves"
        assert node == beside(head).record.node
        assert program.status() == 0
    assert ("draining node" in Path(head.record.log).read_text()) is moves
    stop(hosts)
    head.process.wait()
    hosts.assert_clean("a", "b")


BUSY = """
zc.actor(Busy)

async def main():
    async with zc.init(ADDRESS):
        actor = await Busy.options(max_restarts=1).spawn()  # beside this program
        call = actor.wait()
        tell(ready=True)
        try:
            await call
        except zc.ActorUnavailable:
            tell(lost=True)
        tell(nodes=len(await zc.nodes()))
    tell(done=True)
zc.run(main())
"""


@pytest.mark.slow
def test_a_second_sigterm_ends_a_node_at_once(hosts: Hosts) -> None:
    head = hosts.start("a")
    member = hosts.start("b", head, shutdown_timeout=1000.0)
    with hosts.program(BUSY, head.record.address, host="b") as program:
        assert program.told("ready")
        assert program.told("waiting")
        member.process.send_signal(signal.SIGTERM)
        until(lambda: "draining node" in Path(head.record.log).read_text(), "a drain")
        member.process.send_signal(signal.SIGTERM)
        assert member.process.wait(20) == 0
        assert program.told("lost")
        assert program.told("nodes") == 1
        assert program.status() == 0
    stop(hosts)
    head.process.wait()
    hosts.assert_clean("a", "b")
