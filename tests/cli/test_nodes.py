"""``zcactor start``, ``stop``, ``status`` and ``token`` as users run them, and the mistakes that they refuse."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cluster.hosts import CLOSING_ACTOR, Hosts
from tests.driver.programs import alive, until
from zcactor.cli import nodes
from zcactor.cli.main import app
from zcactor.cli.status import show_cluster
from zcactor.cluster.daemon import DEFAULT_PORT
from zcactor.cluster.records import list_nodes
from zcactor.errors import ConnectionLost
from zcactor.process.loops import chosen_loop
from zcactor.token import read_token_file
from zcactor.transport.stream import handshake_io

READY = re.compile(
    r"zcactor: (head|member) ready at (\S+) "
    r"\((?:node|cluster) ([0-9a-f]{8}), pid (\d+)(?:, log ([^\s,]+))?(?:, state (\S+))?\)"
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def invoke(hosts: Hosts, *arguments: str, host: str = "a", environ: Mapping[str, str] | None = None) -> Result:
    """Run a command in this process: for commands that end before they start a process."""
    with hosts.on(host, environ):
        result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(hosts: Hosts, *arguments: str, status: int = 1, environ: Mapping[str, str] | None = None) -> str:
    """The one line of standard error of a command that ends with `status` and leaves nothing behind."""
    done = invoke(hosts, *arguments, environ=environ)
    assert (done.exit_code, done.stdout) == (status, "")
    hosts.assert_clean("a", "b")
    (line,) = done.stderr.splitlines()
    assert line.startswith("zcactor: ")
    return line


def ready(done: subprocess.CompletedProcess[str]) -> tuple[str, str, str, int, str]:
    """Role, address, node, process id and log of the node, or the head, that the command has started."""
    return all_ready(done)[0]


def all_ready(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str, int, str]]:
    """The same of a head and of the node beside it."""
    assert (done.returncode, done.stderr) == (0, "")
    found = [READY.match(line) for line in done.stdout.splitlines() if " ready at " in line]
    assert found, done.stdout
    return [(each[1], each[2], each[3], int(each[4]), each[5]) for each in found if each is not None]


def make_token(hosts: Hosts, mode: int = 0o600) -> str:
    token = secrets.token_hex(32)
    hosts.token_file.parent.mkdir(parents=True, exist_ok=True)
    hosts.token_file.touch(mode)
    hosts.token_file.write_text(token)
    hosts.token_file.chmod(mode)
    return token


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# ---- from the first node to the last


@pytest.mark.slow
def test_a_cluster_from_the_command_line(hosts: Hosts) -> None:
    port = unused_port()
    done = hosts.zcactor("start", "--head", "--port", str(port), "--num-cpus", "2", "--num-gpus", "0")
    (role, address, cluster, pid, log), (beside, beside_address, node, beside_pid, beside_log) = all_ready(done)
    assert (role, address, beside) == ("head", f"127.0.0.1:{port}", "member")
    assert pid != beside_pid
    assert stat.S_IMODE(Path(log).stat().st_mode) == 0o600
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[:4] == [
        f'programs       zc.init("{address}")',
        f"more nodes     zcactor start --address {address}",
        f"token          {hosts.token_file}",
        "to end it      zcactor stop",
    ]
    token = read_token_file(hosts.token_file).hex()

    done = hosts.zcactor(
        "start", "--address", address, "--num-cpus", "1", "--num-gpus", "4", "--resources", '{"tape": 1.5}',
        "--store-capacity", str(1 << 26), host="b",
    )  # fmt: skip
    role, member_address, member, member_pid, member_log = ready(done)
    assert role == "member"
    assert len(done.stdout.splitlines()) == 1
    assert stat.S_IMODE(Path(member_log).stat().st_mode) == 0o600
    assert alive(pid) and alive(beside_pid) and alive(member_pid)

    text = hosts.zcactor("status")
    assert (text.returncode, text.stderr) == (0, "")
    for shown in (node, member, address, beside_address, member_address):
        assert shown in text.stdout
    for shown in ("CPU 2", "CPU 1, tape 1.5, GPU 4", "no actors"):
        assert shown in text.stdout
    for shown in ("CPU: 3 of 3 free", "GPU: 4 of 4 free", "tape: 1.5 of 1.5 free"):
        assert shown in text.stdout

    with hosts.program(
        """
@zc.actor
class Long:
    def tokens(self): return [name for name, value in os.environ.items() if "TOKEN" in name]
async def main():
    async with zc.init(ADDRESS):
        actor = await Long.options(name="mine", num_cpus=2).spawn()
        tell(tokens=await actor.tokens())
        try:
            while True:
                await zc.nodes()
                await asyncio.sleep(0.05)
        except zc.ConnectionLost as error:
            tell(lost=str(error))
zc.run(main())
""",
        address,
    ) as program:
        assert program.told("tokens") == []
        told = hosts.zcactor("status", "--json", "--address", address, host="b")
        assert (told.returncode, told.stderr) == (0, "")
        report = json.loads(told.stdout)
        assert report["address"] == address
        assert [found["node_id"][:8] for found in report["nodes"]] == [node, member]
        assert [found["workers"] for found in report["nodes"]] == [1, 0]
        assert report["resources"]["CPU"] == {"total": 3.0, "free": 1.0}
        kept = hosts.directory / "state" / "zcactor" / "heads" / f"127.0.0.1-{address.rpartition(':')[2]}" / "log.db"
        assert report["head"] == {
            "address": address, "pid": pid, "epoch": 1, "log": str(kept), "state": "leading", "standbys": [],
        }  # fmt: skip
        (actor,) = report["actors"]
        assert (actor["class_name"], actor["name"], actor["state"]) == ("Long", "mine", "alive")
        assert actor["node_id"][:8] == node
        text = hosts.zcactor("status", host="b")
        assert "mine" in text.stdout and "CPU: 1 of 3 free" in text.stdout
        assert f"head: pid {pid}, leading, epoch 1, log {kept}" in text.stdout

        found = hosts.processes()
        assert {pid, beside_pid, member_pid, program.pid} <= set(found)
        for process in found:
            assert token.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        done = hosts.zcactor("stop", host="b")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"zcactor: the member at {member_address} (node {member}, pid {member_pid}) has ended\n"
        done = hosts.zcactor("stop")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [
            f"zcactor: the head at {address} (cluster {cluster}, pid {pid}) has ended",
            f"zcactor: the member at {beside_address} (node {node}, pid {beside_pid}) has ended",
        ]
        assert set(hosts.processes()) <= {program.pid}
        assert program.told("lost")
        assert program.status() == 0
    hosts.assert_clean("a", "b")
    assert {str(path) for path in hosts.logs()} == {log, beside_log, member_log}
    assert not any(token in path.read_text() for path in hosts.logs())
    done = hosts.zcactor("stop")
    assert (done.returncode, done.stdout) == (0, "zcactor: no node of yours runs on this host\n")


CLOSING = (
    CLOSING_ACTOR
    + """
async def main():
    async with zc.init(ADDRESS):
        actor = await Closing.options(lifetime="detached", name="x").spawn(PATH)
        tell(pid=await actor.pid())
zc.run(main())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground(hosts: Hosts, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "zcactor", "start", "--head", "--port", "0", "--num-gpus", "0", "--block"]
    with hosts.program("", argv=command) as program:
        record = until(lambda: list_nodes(hosts.run_directories("a")), "a head")[0]
        assert record.role == "head"
        program.said("to end it")
        program.process.send_signal(number)
        assert program.status() == 0
        assert READY.search(program.text())
        assert f"pid {record.pid})" in program.text()
        assert "Ctrl-C" in program.text()
        assert program.stderr() == ""
    hosts.assert_clean("a")
    assert hosts.logs() == []


@pytest.mark.slow
def test_the_foreground_ends_when_it_is_killed_or_stopped(hosts: Hosts) -> None:
    command = [sys.executable, "-m", "zcactor", "start", "--head", "--port", "0", "--num-gpus", "0", "--block"]
    for how in ("killed", "stopped"):
        with hosts.program("", argv=command) as program:
            program.said("to end it")  # the head and the node beside it are there
            if how == "killed":
                program.process.kill()
                assert program.status() == -signal.SIGKILL
            else:
                assert hosts.zcactor("stop").stdout.endswith("has ended\n")
                assert program.status() == 0
        hosts.assert_clean("a")


@pytest.mark.slow
def test_the_foreground_closes_idle_actors(hosts: Hosts) -> None:
    closed = hosts.directory / "closed"
    command = [sys.executable, "-m", "zcactor", "start", "--head", "--port", "0", "--num-gpus", "0", "--block"]
    with hosts.program("", argv=command) as foreground:
        record = until(lambda: list_nodes(hosts.run_directories("a")), "a head")[0]
        with hosts.program(CLOSING.replace("PATH", repr(str(closed))), record.address) as program:
            assert alive(program.told("pid"))
            assert program.status() == 0
        foreground.process.send_signal(signal.SIGINT)
        assert foreground.status() == 0
    assert closed.exists()
    hosts.assert_clean("a")


# ---- mistakes that start refuses


@pytest.mark.parametrize("arguments", [(), ("--head", "--address", "127.0.0.1:7433")])
def test_either_a_head_or_a_member(hosts: Hosts, arguments: tuple[str, ...]) -> None:
    assert "give either --head, to start a cluster, or --address" in refused(hosts, "start", *arguments, status=2)


@pytest.mark.parametrize("arguments", [("--state", "here"), ("--fresh",)])
def test_only_a_head_has_a_log(hosts: Hosts, arguments: tuple[str, ...]) -> None:
    told = refused(hosts, "start", "--address", "127.0.0.1:7433", *arguments, status=2)
    assert "--state and --fresh are for --head" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--address", "127.0.0.1:7433", "--standby"), "--directory and --standby are for --head"),
        (("--address", "127.0.0.1:7433", "--directory", "etcd://h:1"), "--directory and --standby are for --head"),
        (("--head", "--standby"), "--standby goes with --directory"),
        (("--head", "--directory", "etcd://h:1", "--standby", "--fresh"), "a standby takes over what is there"),
        (("--head", "--directory", "etcd://h:1", "--state", "here"), "give either --state"),
        (("--head", "--force"), "--force goes with --head --directory etcd://... --standby"),
        (("--head", "--directory", "etcd://h:1", "--force"), "--force goes with --head --directory"),
    ],
)
def test_a_log_in_etcd_is_for_heads(hosts: Hosts, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(hosts, "start", *arguments, status=2)


def test_a_secret_in_the_url_of_etcd(hosts: Hosts) -> None:
    told = refused(hosts, "start", "--head", "--directory", "etcd://me:secret@h:1", status=1)
    assert "ZCACTOR_ETCD_PASSWORD_FILE" in told and "secret" not in told


def test_an_address_is_for_the_end_of_a_cluster(hosts: Hosts) -> None:
    assert "--address is for --cluster" in refused(hosts, "stop", "--address", "127.0.0.1:7433", status=2)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("{", "--resources is no JSON: "),
        ("tape=1", "--resources is no JSON: "),
        ("", "--resources is no JSON: "),
        ("[1]", "must be a JSON object of amounts >= 0, not [1]"),
        ('"tape"', "must be a JSON object"),
        ('{"tape": -1}', "must be a JSON object of amounts >= 0"),
        ('{"tape": "1"}', "must be a JSON object of amounts >= 0"),
        ('{"tape": true}', "must be a JSON object of amounts >= 0"),
        ('{"tape": null}', "must be a JSON object of amounts >= 0"),
        ('{"tape": NaN}', "must be a JSON object of amounts >= 0"),
        ('{"tape": Infinity}', "must be a JSON object of amounts >= 0"),
        ('{"tape": 1' + "0" * 400 + "}", "must be a JSON object of amounts >= 0"),
        ('{"\\udc80": 1}', "--resources: a key must be a text that UTF-8 can encode, got '\\udc80'"),
        ('{"CPU": 1}', "give CPU by --num-cpus, not in --resources"),
        ('{"GPU": 1}', "give GPU by --num-gpus, not in --resources"),
    ],
)
def test_resources_that_are_none(hosts: Hosts, resources: str, message: str) -> None:
    assert message in refused(hosts, "start", "--head", "--resources", resources, status=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--num-cpus", "-1"), "--num-cpus"),
        (("--num-cpus", "many"), "--num-cpus"),
        (("--port", "65536"), "--port"),
        (("--token", "0" * 64), "--token"),
        (("--host", "localhost"), "host"),
        (("--store-capacity", "1"), "store_capacity"),
    ],
)
def test_options_that_are_none(hosts: Hosts, arguments: tuple[str, ...], named: str) -> None:
    done = invoke(hosts, "start", "--head", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr
    hosts.assert_clean("a")


@pytest.mark.parametrize("address", ["7433", "host:", "::1:80", "host:0"])
def test_an_address_that_is_none(hosts: Hosts, address: str) -> None:
    assert f"{address!r} is no address" in refused(hosts, "start", "--address", address)


def test_nobody_there(hosts: Hosts) -> None:
    make_token(hosts)
    address = f"127.0.0.1:{unused_port()}"
    for command in ("start", "status"):
        line = refused(hosts, command, "--address", address)
        assert address in line
        assert line.endswith("Connection refused")


def test_silence(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(hosts)
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for command in ("start", "status"):
            assert f"{address} did not answer the handshake" in refused(hosts, command, "--address", address)


def test_a_loop_that_cannot_be_imported(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_loop.cache_clear()
    monkeypatch.setitem(sys.modules, "uvloop", None)
    line = refused(hosts, "start", "--head", "--port", "0", environ={"ZCACTOR_LOOP": "uvloop"})
    assert "the setting loop is 'uvloop', which cannot be imported" in line


def test_port_in_use(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(hosts, "start", "--head", "--port", str(port))
    assert f"cannot listen at 127.0.0.1 port {port}: " in line
    assert line.endswith("in use")


@pytest.mark.slow
def test_another_token(hosts: Hosts) -> None:
    head = hosts.start()
    wrong = secrets.token_hex(32)
    for command in ("start", "status"):
        done = invoke(hosts, command, "--address", head.record.address, environ={"ZCACTOR_TOKEN": wrong})
        assert (done.exit_code, done.stdout) == (1, "")
        assert head.record.address in done.stderr
        assert "holds another token" in done.stderr
        assert wrong not in done.stderr


def test_no_token(hosts: Hosts) -> None:
    for command in ("start", "status"):
        line = refused(hosts, command, "--address", "127.0.0.1:7433")
        assert f"copy {hosts.token_file} from the head's host" in line
    assert "make one with 'zcactor token'" in refused(hosts, "start", "--head", "--host", "192.0.2.1")
    assert not hosts.token_file.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_at_once(hosts: Hosts, host: str) -> None:
    for _ in range(2):
        line = refused(hosts, "start", "--head", "--host", host)
        assert f"{host} is no place where others find this host" in line
        assert re.search(r"--host [0-9.]+$", line)
        make_token(hosts)


@pytest.mark.parametrize("arguments", [("start", "--head"), ("start", "--address", "127.0.0.1:1")])
def test_a_token_that_others_can_read(hosts: Hosts, arguments: tuple[str, ...]) -> None:
    token = make_token(hosts, 0o644)
    line = refused(hosts, *arguments)
    assert f"{hosts.token_file} has mode 0644" in line
    assert f"chmod 600 {hosts.token_file}" in line
    assert token[:8] not in line


def test_default_port(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []

    def start_node(*_: object, port: int, **__: object) -> None:
        ports.append(port)
        raise ConnectionLost("not now")

    monkeypatch.setattr(nodes, "start_node", start_node)
    for arguments in (
        ("--head",),
        ("--address", "h:1"),
        ("--head", "--port", "5"),
        ("--address", "h:1", "--port", "6"),
    ):
        assert refused(hosts, "start", *arguments) == "zcactor: not now"
    assert ports == [DEFAULT_PORT, 0, 5, 6]


@pytest.mark.slow
def test_the_node_has_no_token_in_its_environment(hosts: Hosts) -> None:
    secret = "5e" * 32
    done = hosts.zcactor("start", "--head", "--port", "0", environ={"ZCACTOR_TOKEN": secret})
    assert done.returncode == 0, done.stderr
    records = list_nodes(hosts.run_directories("a"))
    assert [record.role for record in records] == ["head", "member"]
    for record in records:
        environment = Path(f"/proc/{record.pid}/environ").read_bytes()
        assert b"XDG_RUNTIME_DIR=" in environment
        assert secret.encode() not in environment
        assert os.getsid(record.pid) == record.pid
        assert {os.readlink(f"/proc/{record.pid}/fd/{fd}") for fd in (1, 2)} == {record.log}
        assert os.readlink(f"/proc/{record.pid}/fd/0") == os.devnull


# ---- status, stop, token


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZCACTOR_NUM_CPUS", "ZCACTOR_NUM_GPUS"])
def test_status_with_settings_that_are_a_nodes(hosts: Hosts, name: str) -> None:
    head = hosts.start()
    done = hosts.zcactor("status", "--json", environ={name: "3"})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["address"] == head.record.address


def test_status_where_nothing_runs(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(hosts.directory))  # programs of other tests have theirs elsewhere
    assert "no node of yours runs on this host; give --address HOST:PORT" in refused(hosts, "status")
    assert "'nowhere' is no address" in refused(hosts, "status", environ={"ZCACTOR_ADDRESS": "nowhere"})


def test_stop_where_nothing_runs(hosts: Hosts) -> None:
    done = invoke(hosts, "stop")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "zcactor: no node of yours runs on this host\n", "")


@pytest.mark.parametrize("arguments", [("start", "--head"), ("status",), ("stop",)])
def test_an_error_in_the_configuration(hosts: Hosts, arguments: tuple[str, ...]) -> None:
    assert "ZCACTOR_NUM_CPUS" in refused(hosts, *arguments, status=2, environ={"ZCACTOR_NUM_CPUS": "many"})


def test_token(hosts: Hosts) -> None:
    done = invoke(hosts, "token")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"a token is in {hosts.token_file}; copy that file" in done.stdout
    assert stat.S_IMODE(hosts.token_file.stat().st_mode) == 0o600
    token = read_token_file(hosts.token_file)
    again = invoke(hosts, "token")
    assert (again.exit_code, again.stderr) == (0, "")
    assert f"there is a token in {hosts.token_file} already" in again.stdout
    assert read_token_file(hosts.token_file) == token
    assert token.hex()[:8] not in done.stdout + again.stdout


def test_token_that_cannot_be_written(hosts: Hosts) -> None:
    (hosts.directory / "config").touch()
    text = refused(hosts, "token")
    assert f"{hosts.token_file} cannot be written: {hosts.directory}/config is a file; set XDG_CONFIG_HOME" in text


@pytest.mark.parametrize("name", ["[/red]", "[bold]x", "[::1]:9", ":bomb:", "[link=x]", "a\x1b[31mb", "plain"])
def test_names_and_addresses_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"node_id": "ab" * 16, "host": name, "address": "x@[fe80::1]:7433", "transports": ["tcp"], "workers": 1}
    actor = {"actor_id": "cd" * 16, "state": "alive", "node_id": "ab" * 16, "pid": 1, "restarts": 0}
    told = {
        "address": "[::1]:7433",
        "nodes": [{**node, "resources": {name: 1.0}}],
        "head": {"pid": 1, "state": "leads", "epoch": 1, "log": "/x/[::1]-7433", "standbys": ["[::1]:7434"]},
        "resources": {name: {"total": 2.0, "free": 1.0}},
        "actors": [{**actor, "class_name": name, "name": name, "activity": None, "store_used": None}],
    }
    show_cluster(told)
    out = capsys.readouterr().out
    assert out.count(name if name.isprintable() else repr(name)[1:-1]) == 5
    for text in ("cluster at [::1]:7433", "[fe80::1]:7433", "log /x/[::1]-7433", "standbys [::1]:7434"):
        assert text in out
