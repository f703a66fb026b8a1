"""Runs under a real Slurm, whose nodes are virtual ones of this machine. `make test-engines` installs it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.engines.launching import PATIENCE, RUN, User
from tests.engines.slurm_cluster import missing, slurm
from zcactor.token import default_file, make_token_file

pytestmark = pytest.mark.slow

NODES = 4
SRUN = ("srun", f"-N{NODES}", "--ntasks-per-node=1", "--no-kill")


@pytest.fixture
def user() -> Iterator[User]:
    """A user of a cluster of four nodes, which are idle."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm(NODES) as made:
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


SUBMITTED = """
import asyncio, os, stat, sys
import numpy as np
import zcactor as zc
from zcactor.cluster import submit

@zc.actor
class Sum:
    def __init__(self, path): self.path = path
    def of(self, x): return float(x.sum())
    def close(self): open(self.path, "w").close()

async def refused(nodes=1, time="10", **arguments):
    try:
        async with submit(nodes, time, **{"timeout": 300.0, **arguments}): print("not refused")
    except (zc.ZcactorError, ValueError) as error:
        print(type(error).__name__, error)

"""


def submitted(user: User, source: str) -> str:
    """The output of a program that submits jobs."""
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed: make test-engines does that")
    (user.folder / "submitting.py").write_text(SUBMITTED + source)
    status, text = user.done(sys.executable, "submitting.py", PYTHONUNBUFFERED="1")
    assert status == 0, text
    return text


def test_a_job_from_a_program(user: User) -> None:
    text = submitted(
        user,
        """
async def main():
    async with submit(4, "00:10:00", timeout=300.0, slurm={"comment": "ours"}) as cluster:
        nodes = await zc.nodes()
        print("nodes", cluster.nodes, len(nodes))
        actors = [await Sum.options(node=node.node_id).spawn(f"closed-{i}") for i, node in enumerate(nodes)]
        print("sums", sum([await actor.of(np.ones(100_000)) for actor in actors]))
        modes = [stat.S_IMODE(os.stat(f"slurm/{name}").st_mode) for name in os.listdir("slurm") if len(name) == 32]
        print("modes", *map(oct, modes))
        print("job", cluster.job_id)
    print("left", [name for name in os.listdir("slurm") if len(name) == 32])

zc.run(main())
""",
    )
    assert "nodes 4 4" in text
    assert "sums 400000.0" in text
    assert "modes 0o600\n" in text
    assert "left []" in text
    assert user.closed() == [f"closed-{number}" for number in range(NODES)]
    job = text.partition("job ")[2].split()[0]
    _, shown = user.done_beside("scontrol", "show", "job", "-o", job)
    assert "JobState=CANCELLED" in shown
    assert "Comment=ours" in shown
    user.ended({"SLURM_JOB_ID": job})


def test_jobs_that_come_to_nothing(user: User) -> None:
    text = submitted(
        user,
        """
async def wait(job):
    async with submit(1, "10", slurm=job): print("not cancelled")

async def jobs():
    process = await asyncio.create_subprocess_exec("squeue", "-h", "-o", "%A", stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].split()

async def main():
    await refused(slurm={"setup": ["echo the reason >&2", "exit 3"]})
    await refused(partition="nowhere")
    await refused(nodes=100)
    held = {"additional_parameters": {"hold": True}}
    await refused(slurm=held, timeout=0.5)
    await refused(slurm={"no_such": 1})
    task = asyncio.create_task(wait(held))
    while not await jobs(): await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    print("cancelled", task.cancelled(), await jobs())

zc.run(main())
""",
    )
    assert re.search(r"ConnectionLost Slurm's job \d+ ended as FAILED \(NonZeroExitCode\); the .*:\nthe reason", text)
    assert re.search(r"ConnectionLost Slurm has refused the job: .*invalid partition", text)
    assert re.search(r"InsufficientResources .*(never begins: it is PENDING|Node count|node configuration)", text)
    assert re.search(r"Insu.* job \d+ has not begun within 0.5 s: it is PENDING \(JobHeldUser\); it is cancelled", text)
    assert re.search(r"ValueError Unavailable parameter.*no_such", text)
    assert "cancelled True []" in text
