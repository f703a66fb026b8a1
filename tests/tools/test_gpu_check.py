"""The checks of GPUs: rows, time limits and exit statuses, with the fake GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_check
from tools.gpu_row import Skip

ROOT = Path(__file__).resolve().parents[2]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that were written."""
    return [json.loads(line) for line in (folder / "gpu_check.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_no_row_fails_on_the_fake_gpu(tmp_path: Path) -> None:
    # The others skip there, or write gigabytes.
    only = "facts,fd_pass,readonly_import,event_order,event_owner_dies,dma_buf,move,views,kill_reader,foreign"
    only += ",stream_handles,given_back,standstill,pieces,many_extents,one_queue,contexts,host_copies,pinned_memfd"
    command = [sys.executable, "tools/gpu_check.py", "--driver", "fake", "--out", str(tmp_path), "--only", only]
    done = subprocess.run([*command, "--limit", "300"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("the GPU is the fake one: no figure says anything about a real GPU\n")
    found = rows(tmp_path)
    assert [each["check"] for each in found] == only.split(",")
    assert {each["check"]: each["status"] for each in found if each["status"] != "pass"} == {"foreign": "skip"}
    assert all(set(each) == {"check", "status", "seconds", "detail", "figures"} for each in found)
    assert found[0]["figures"]["exports"] is True
    assert {name: value for name, value in found[-1]["figures"].items() if isinstance(value, str)} == {
        "a copy across an end of pinned memory": "error 1",
        "a copy across two pinned neighbours": "error 1",
        "pinned pages that were replaced: the GPU reads": "the former ones",
    }


@pytest.mark.gpu
@pytest.mark.slow
def test_no_row_fails_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_check.py", "--out", str(tmp_path), "--limit", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reports_of_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(kind: str) -> tuple[str, dict[str, Any]]:
        raise ValueError(f"not on {kind}")

    def skipping(kind: str) -> tuple[str, dict[str, Any]]:
        raise Skip("no room")

    for name, check in (("failing", failing), ("skipping", skipping), ("passing", lambda kind: (kind, {"GB/s": 1}))):
        monkeypatch.setitem(gpu_check.CHECKS, name, check)
    with pytest.raises(ValueError, match="not on fake"):
        gpu_check.child("failing", "fake")
    gpu_check.child("skipping", "fake")
    gpu_check.child("passing", "fake")
    printed = capsys.readouterr().out.splitlines()
    found = [json.loads(line.removeprefix(gpu_check.MARK)) for line in printed]
    assert found[0] == {"status": "skip", "detail": "no room", "figures": {}}
    assert found[1] == {"status": "pass", "detail": "fake", "figures": {"GB/s": 1}}


@pytest.mark.slow
def test_a_check_that_fails() -> None:
    found = gpu_check.row(gpu_check.begin("no such check", "fake"), 300)
    assert found["status"] == "fail" and found["detail"].startswith("ended with 1: ")
    assert "KeyError: 'no such check'" in found["detail"]


def test_a_check_that_takes_too_long() -> None:
    found = gpu_check.row(gpu_check.begin("facts", "fake"), 0.001)
    assert found["status"] == "timeout" and found["detail"].startswith("not done after 0.001 s")


def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, text in (
        (["--driver", "fake"], "--out DIR is needed"),
        (["--driver", "fake", "--out", str(tmp_path), "--only", "facts,nothing"], "unknown checks: nothing; there are"),
    ):
        with pytest.raises(SystemExit) as caught:
            gpu_check.main(arguments)
        assert caught.value.code == 2 and text in capsys.readouterr().err


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu_driver_rows.without", lambda kind: f"no driver for {kind}")
    assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.NO_DEVICE
    assert capsys.readouterr().out == "no GPU: no driver for cuda\n"
