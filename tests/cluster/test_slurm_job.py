"""The calls to Slurm and their order, with a fake of it; tests/engines/test_slurm.py has the real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from tests.cluster.fake_slurm import FakeSlurm
from zcactor.cluster.slurm_job import submit


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("zcactor.cluster.slurm_job.SlurmCalls", fake)
    monkeypatch.setenv("ZCACTOR_TOKEN", "ab" * 32)
    monkeypatch.delenv("ZCACTOR_TOKEN_FILE", raising=False)
    return fake


def job(folder: Path, **arguments: Any) -> Any:
    return submit(**{"nodes": 2, "time": "02:00:00", "folder": str(folder), "join": False, **arguments})


async def test_a_job_from_its_beginning_to_its_end(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.address = "10.0.0.1:7433"
    more = {"account": "physics", "srun_args": ["--mpi=none"], "additional_parameters": {"hint": "nomultithread"}}
    async with job(tmp_path, partition="long", cpus_per_task=4, slurm=more, timeout=300) as cluster:
        assert cluster == zc.cluster.EngineCluster("10.0.0.1:7433", 2, "7")
        assert slurm.parameters == {
            "job_name": "zcactor", "partition": "long", "cpus_per_task": 4, "account": "physics", "nodes": 2,
            "ntasks_per_node": 1, "srun_args": ["--no-kill", "--mpi=none"],
            "additional_parameters": {"no_kill": True, "time": "02:00:00", "hint": "nomultithread"},
        }  # fmt: skip
        assert slurm.log == ["submit 2 300"]
    assert slurm.log == ["submit 2 300", "cancel"]
    assert slurm.states == [("CANCELLED", "None")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("states", "kind", "message"),
    [
        (
            [("PENDING", "None"), ("FAILED", "NonZeroExitCode")],
            zc.ConnectionLost,
            "ended as FAILED .NonZeroExitCode.; the",
        ),
        ([("TIMEOUT", "TimeLimit")], zc.ConnectionLost, r"7 ended as TIMEOUT \(TimeLimit\); the end of the log"),
        ([("COMPLETED", "None")], zc.ConnectionLost, "7 ended as COMPLETED; the end of the log"),
        (
            [("PENDING", "PartitionConfig")],
            zc.InsufficientResources,
            r"never begins: it is PENDING \(PartitionConfig\)",
        ),
    ],
)
async def test_a_job_that_ends_or_never_begins(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: Any, kind: Any, message: str
) -> None:
    monkeypatch.setattr("zcactor.cluster.slurm_job._QUESTION", 0.01)
    slurm.states = states
    with pytest.raises(kind, match=message):
        async with job(tmp_path):
            pass
    assert slurm.log == ["submit 2 600", "cancel"]


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (("PENDING", "Resources"), zc.InsufficientResources, r"not begun within 0.01 s: it is PENDING \(Resources\)"),
        (("RUNNING", "None"), zc.ConnectionLost, "is RUNNING, and its nodes have not joined within 0.01 s; the end"),
    ],
)
async def test_a_job_that_is_not_there_in_time(
    slurm: FakeSlurm, tmp_path: Path, state: Any, kind: Any, message: str
) -> None:
    slurm.states = [state]
    with pytest.raises(kind, match=message):
        async with job(tmp_path, timeout=0.01):
            pass
    assert slurm.log[-1] == "cancel"


async def test_a_job_that_is_refused(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.refused = zc.ConnectionLost("Slurm has refused the job")
    with pytest.raises(zc.ConnectionLost, match="refused"):
        async with job(tmp_path):
            pass
    assert slurm.log == []


async def test_cancelled_while_it_waits(slurm: FakeSlurm, tmp_path: Path) -> None:
    async def enter() -> None:
        async with job(tmp_path):
            pass

    task = asyncio.create_task(enter())
    await asyncio.to_thread(slurm.asked.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slurm.log[-1] == "cancel"
    assert slurm.states == [("CANCELLED", "None")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"nodes": 0}, "nodes is 0"), ({"nodes": 1.5}, "nodes is 1.5"), ({"timeout": 0}, "timeout is 0")],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(tmp_path, **arguments)
