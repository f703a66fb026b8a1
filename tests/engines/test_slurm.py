"""Runs under a real Slurm, whose nodes are virtual ones of this machine. `make test-engines` installs it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.driver.programs import until
from tests.engines.launching import PATIENCE, RUN, User, unused_ports
from zcactor.token import default_file, make_token_file

pytestmark = pytest.mark.slow

NODES = 4
SRUN = ("srun", f"-N{NODES}", "--ntasks-per-node=1", "--no-kill")
NEEDED = ("munged", "slurmctld", "slurmd", "srun")
CONF = """
ClusterName=zcactor
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def user() -> Iterator[User]:
    """A user of a cluster of four nodes, which are idle."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-engines does that as root on Debian")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons have to be root")
    with User() as made:
        folder = made.folder
        made.variables.update(PATH=path, SLURM_CONF=str(folder / "slurm.conf"))
        folder.chmod(0o755)  # munged wants a way to its socket for everybody
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        port, *ports = unused_ports(1 + NODES)
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={each} CPUs=2 State=UNKNOWN"
            for number, each in enumerate(ports, 1)
        )
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, port=port, nodes=nodes))
        made.start(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed",
            name="munged",
        )  # fmt: skip
        until((folder / "munge.sock").exists, "munged", PATIENCE)
        made.start("slurmctld", "-D", "-i", name="slurmctld")
        for number in range(1, 1 + NODES):
            (folder / f"spool-n{number}").mkdir()
            made.start("slurmd", "-D", "-N", f"n{number}", name=f"slurmd-{number}")
        until(lambda: made.done_beside("sinfo", "-h", "-o", "%D %T")[1] == f"{NODES} idle\n", "idle nodes", PATIENCE)
        yield made


def test_a_program(user: User) -> None:
    status, text = user.done(*SRUN, *RUN, "--", sys.executable, "sum.py", "a b", "*", "$HOME", STATUS="4")
    assert status == 4
    assert text.count("4 400000.0 ['a b', '*', '$HOME']") == 1, text


def test_a_job_that_is_cancelled(user: User) -> None:
    process = user.start(*SRUN, *RUN, "--", sys.executable, "waiting.py")
    user.says(f"up {NODES}")
    _, job = user.done_beside("squeue", "-h", "-o", "%A")
    user.done_beside("scancel", job.strip())
    assert process.wait(PATIENCE) != 0
    user.ended({"SLURM_JOB_ID": job.strip(), "SLURM_STEP_ID": "0"})
    assert user.closed() == [f"closed-{number}" for number in range(NODES)]


def test_a_node_that_is_lost(user: User) -> None:
    process = user.start(*SRUN, *RUN, "--", sys.executable, "waiting.py")
    user.says(f"up {NODES}")
    for pid in user.having({"SLURM_NODEID": "2"}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    user.says(f"left {NODES - 1}")
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL  # of the lost task; the others have the program's status


def test_a_rank_that_is_missing(user: User) -> None:
    command = f'[ "$SLURM_PROCID" = 1 ] || exec {sys.executable} -m zcactor run --timeout 2 -- true'
    status, text = user.done("srun", "-N2", "--ntasks-per-node=1", "/bin/sh", "-c", command)
    assert status == 1
    assert "rank 1 (n2) did not join in 2 s; joined: 1 of 2" in text


def test_mpirun_within_a_job(user: User) -> None:
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("mpirun.openmpi is not installed")
    make_token_file(default_file(user.variables))  # for several hosts; on one the head makes it
    launcher = (mpirun, "--allow-run-as-root", "-n", "4", "--map-by", "ppr:2:node")
    status, text = user.done(
        "salloc", "-N2", "--ntasks-per-node=2", *launcher, *RUN, "--", sys.executable, "sum.py", STATUS="0"
    )
    assert status == 0, text
    assert "4 400000.0 []" in text
