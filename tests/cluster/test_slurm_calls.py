"""Missing software, refused jobs and logs, with a few functions in submitit's place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from zcactor.cluster import slurm_job
from zcactor.cluster.slurm_job import SlurmCalls
from zcactor.cluster.submitted import begin


class FailedJobError(Exception):
    """The exception of submitit for a command that fails."""


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module called submitit, and Slurm's commands."""
    module: Any = ModuleType("submitit")
    module.core = SimpleNamespace(utils=SimpleNamespace(FailedJobError=FailedJobError))
    monkeypatch.setitem(sys.modules, "submitit", module)
    monkeypatch.setattr("zcactor.cluster.slurm_job.shutil.which", lambda name: f"/bin/{name}")
    return module


class Executor:
    """submitit's ``SlurmExecutor``; submitting raises `error` where it is set."""

    error: Exception | None = None
    log: list[Any]

    def __init__(self, folder: Path) -> None:
        self.log = [folder]
        Executor.log = self.log

    def update_parameters(self, **parameters: Any) -> None:
        self.log.append(parameters)

    def submit(self, function: Any, *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.log.append((function, arguments))
        return SimpleNamespace(job_id=7, cancel=lambda check: self.log.append(f"cancel {check}"))


def test_without_submitit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"^zcactor.cluster.submit needs submitit: pip install 'zcactor\[slurm\]'$"):
        SlurmCalls("zcactor.cluster.submit", tmp_path)


def test_without_slurm(submitit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcactor.cluster.slurm_job.shutil.which", lambda name: None if name == "srun" else name)
    with pytest.raises(zc.ConnectionLost, match=r"a test needs srun: install Slurm's commands \(slurm-client\)"):
        SlurmCalls("a test", tmp_path)


def test_a_job(submitit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit.SlurmExecutor = Executor
    asked: list[str] = []

    def job_state(job: str, environ: Mapping[str, str]) -> tuple[str, str]:
        asked.append(job)
        return "RUNNING", "None"

    monkeypatch.setattr(slurm_job, "job_state", job_state)
    calls = SlurmCalls("a test", tmp_path)
    assert calls.job_id == ""
    calls.submit({"nodes": 2}, "folder", "key")
    assert calls.job_id == "7"
    assert calls.state() == ("RUNNING", "None")
    assert asked == ["7"]
    calls.cancel()
    assert Executor.log == [tmp_path, {"nodes": 2}, (begin, ("folder", "key")), "cancel False"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sbatch: error: Invalid partition name specified", zc.ConnectionLost),
        ("sbatch: error: Requested node configuration is not available", zc.InsufficientResources),
        ("sbatch: error: Node count specification invalid", zc.InsufficientResources),
    ],
)
def test_a_job_that_is_refused(
    submitit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    monkeypatch.setattr(Executor, "error", FailedJobError(text))
    submitit.SlurmExecutor = Executor
    calls = SlurmCalls("a test", tmp_path)
    with pytest.raises(kind, match=text):
        calls.submit({})
    assert calls.job_id == ""


def test_the_end_of_the_log(submitit: Any, tmp_path: Path) -> None:
    calls = SlurmCalls("a test", tmp_path)
    calls.job_id = "7"
    assert calls.tail() == f"no log in {tmp_path}"
    for name, text in (("70_0_log.err", "another job"), ("7_0_log.err", ""), ("7_0_log.out", "words")):
        (tmp_path / name).write_text(text)
    assert calls.tail() == f"the end of {tmp_path}/7_0_log.out:\nwords"
    (tmp_path / "7_1_log.err").write_text("x" * 5000 + "the reason\n")
    assert calls.tail().endswith("xxx\nthe reason") is False
    assert calls.tail().endswith("xxxthe reason")
    assert len(calls.tail()) < 1200
