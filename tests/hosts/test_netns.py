"""The hosts that other tests run programs on: the things that they have of their own, and their removal."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hosts import netns
from tests.hosts.lossy import Lot
from tests.hosts.netns import Host, Network, has_rules, missing

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def reaches(host: Host, other: Host, patience: float = 10) -> bool:
    """Whether a packet comes back from the other host within that time: a refusal, because no process listens there."""
    script = f"import socket; socket.create_connection(({other.address!r}, 1), {patience})"
    done = subprocess.run([*host.entering("net"), "python3", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode
    return "refused" in done.stderr


@pytest.mark.slow
def test_hosts_have_their_own_network_processes_name_and_directory() -> None:
    with Network(3) as hosts, Network(2) as others:
        assert [host.address for host in hosts[:2]] == [host.address for host in others]
        a, b, c = hosts
        assert reaches(a, b) and reaches(a, c) and reaches(c, b)
        with b.start("sh", "-c", "hostname; echo $$ $XDG_RUNTIME_DIR; ls /proc", stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            name, pid, directory, *seen = process.stdout.read().decode().split()
        assert (name, directory) == ("b", str(b.directory / "run"))
        assert int(pid) < 100 and len([entry for entry in seen if entry.isdigit()]) < 6
        directories = [host.directory for host in hosts + others]
        pids = [host.pid for host in hosts + others]
    assert not any(path.exists() for path in directories)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_a_host_runs_ends_with_it() -> None:
    with Network(2) as (a, _):
        process = a.start("sh", "-c", "setsid sleep 1000 & echo; setsid sleep 1000", stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ZeroDivisionError), Network(2) as (other, _):
            other.start("setsid", "sleep", "1000")
            1 / 0
        assert len(a.pids()) >= 2
        pids = list(a.pids().values())
        a.kill_all()
        assert process.wait(10) != 0
        process.stdout.close()
        survivor = a.start("setsid", "sleep", "1000")
    assert survivor.wait(10) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_nothing_outlives_a_program_that_is_killed() -> None:
    source = """
import signal
from tests.hosts.netns import Network
with Network(2) as (a, b):
    print(a.pid, b.pid, a.directory, b.directory, flush=True)
    signal.pause()
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        ["python3", "-c", source], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as process:
        assert process.stdout is not None
        *pids, left, right = process.stdout.readline().split()
        handles = [os.pidfd_open(int(pid)) for pid in pids]
        process.kill()
    for handle in handles:
        assert select.select([handle], [], [], 10)[0]
        os.close(handle)
    for directory in (left, right):
        shutil.rmtree(directory)


@pytest.mark.slow
def test_faults_come_and_go() -> None:
    with Network(3) as (a, b, c):
        for fault in (a.down(), b.down(), a.dropping("in"), b.dropping("out", other=a)):
            with fault:
                assert not reaches(a, b, 0.1)
            assert reaches(a, b)
        with a.dropping("in", other=c):
            assert reaches(a, b) and not reaches(a, c, 0.1)
        with a.dropping("in", 10), a.dropping("out", 10), a.limited(10), pytest.raises(OSError, match="failed"):
            a.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf")
        assert "tbf" not in a.command("tc", "qdisc", "show", "dev", "eth0")
        if has_rules():
            assert a.command("nft", "list", "ruleset") == ""


@pytest.mark.slow
def test_faults_come_and_go_without_nftables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "has_rules", lambda: False)
    with Network(3) as (a, b, c):
        for fault in (a.dropping("in"), a.dropping("out"), b.dropping("out", other=a), b.dropping("in", other=a)):
            with fault:
                assert not reaches(a, b, 0.1)
                assert reaches(b, c)
            assert reaches(a, b)
        with a.dropping("in", other=c), b.dropping("out", other=a), a.dropping("in"):
            assert not reaches(a, c, 0.1)
        assert reaches(a, c) and reaches(a, b)
        with a.apart(b):
            assert reaches(a, c) and reaches(b, c)
            assert not reaches(a, b, 0.1) and not reaches(b, a, 0.1)
        assert reaches(a, b) and reaches(b, a)
        with a.dropping("in", 10, regular=True), a.dropping("out", 10), b.dropping("in", 5):
            assert reaches(a, b) and reaches(b, a) and reaches(c, a)
        assert reaches(a, b) and reaches(c, a)
        assert a.command("ip", "neigh", "show", "nud", "permanent") == ""


def test_each_tenth_packet_is_lost_or_a_tenth_of_them() -> None:
    packet, other = bytes(22) + b"\x08\x00" + bytes(40), bytes(22) + b"\x08\x06" + bytes(40)
    regular, chance, again = Lot(10, regular=True), Lot(10, regular=False), Lot(10, regular=False)
    lost = [index for index in range(100) if regular.falls_on(packet)]
    assert lost == list(range(9, 100, 10))
    drawn = [chance.falls_on(packet) for _ in range(10_000)]
    assert drawn == [again.falls_on(packet) for _ in range(10_000)]
    assert 800 < sum(drawn) < 1200
    assert not any(regular.falls_on(other) for _ in range(100))


@pytest.mark.slow
def test_two_hosts_on_one_cable() -> None:
    with Network(2, direct=True, offload=False) as (a, b):
        assert reaches(a, b) and reaches(b, a)
        assert "gso_max_segs 1 " in a.command("ip", "-d", "link", "show", "eth0")
    with pytest.raises(ValueError, match="not 3"):
        Network(3, direct=True)


def test_a_program_that_does_not_answer_says_why() -> None:
    with Network(2) as (a, _):
        with a.python("-c", "import sys; sys.exit('no way')") as program, pytest.raises(OSError, match="no way"):
            program.ask("anything")
        with a.python("-c", "input(); input()") as program, pytest.raises(TimeoutError):
            program.answer(program.send("anything"), patience=0.01)
