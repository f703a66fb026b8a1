"""Each example runs to its end as users run it: as a program of its own, with the sizes made small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str, logged: str = "") -> str:
    """What the example prints. It must succeed, and log no more than what the pattern `logged` says."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.fullmatch(logged, done.stderr), done.stderr
    return done.stdout


def test_all_examples_are_run_here() -> None:
    source = Path(__file__).read_text()
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'run("{path.stem}"' not in source] == []


def test_quickstart_copies_nothing() -> None:
    output = run("quickstart", "--size", "8MiB")
    assert output.count("same checksum") == 2
    assert "pickle through a pipe" in output
    assert re.search(r"bytes_copied, driver and three actors together: 0$", output, re.MULTILINE)


def test_quickstart_refuses_sizes_that_do_not_fit() -> None:
    command: list[str | Path] = [sys.executable, EXAMPLES / "quickstart.py", "--size", "1000000GiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert re.search(r"need about .* of free memory.* Try --size \d+MiB", done.stderr)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parameter_server_reaches_its_accuracy_without_copies(mode: str) -> None:
    pytest.importorskip("sklearn")
    output = run("parameter_server", "--mode", mode, "--workers", "2", "--epochs", "8", "--rate", "0.2")
    found = re.search(r"accuracy ([\d.]+)%", output)
    assert found is not None
    assert float(found[1]) >= 93
    assert re.search(r"bytes copied by zcactor +0 +0$", output, re.MULTILINE)
    moved = re.search(r"bytes moved, pull and push +([\d,]+) +([\d,]+)", output)
    assert moved is not None
    model, measured = (int(number.replace(",", "")) for number in moved.groups())
    assert model <= measured <= model * 1.02  # above the arrays come only the frames' own payloads


def test_parameter_server_fails_below_its_accuracy() -> None:
    pytest.importorskip("sklearn")
    program = EXAMPLES / "parameter_server.py"
    arguments = ["--mode", "async", "--workers", "1", "--servers", "1", "--epochs", "1", "--rate", "0.0001"]
    done = subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "the accuracy is below 93%" in done.stderr


def test_streaming_stops_the_producer() -> None:
    output = run("streaming", "--frames", "40")
    found = re.search(r"left the loop at frame 40; the camera was closed after (\d+)$", output, re.MULTILINE)
    assert found is not None
    assert 40 <= int(found[1]) <= 40 + 2 * 25  # two streams in a row, each at most a window and a half ahead
    assert "bytes copied: 0" in output


def test_pipeline_keeps_the_driver_out() -> None:
    output = run("pipeline", "--images", "3")
    assert output.count("standard deviation") == 3
    assert "bytes mapped by the stages: 50,331,648; by this process: 0" in output
    assert "bytes copied: 0" in output


def test_supervision_tells_what_may_have_run() -> None:
    output = run("supervision", logged=r"Counter\(\w+\): .*SIGKILL.*; it is being restarted, after a pause of 0.1 s\n")
    assert re.search(r"^lost: .*SIGKILL.*restarted, after a pause of 0.1 s; maybe_executed=True$", output, re.MULTILINE)
    assert "after the restart: 10" in output
    assert "restarts: [1]" in output
    assert re.search(r"^died: .*SIGKILL.*; maybe_executed=True$", output, re.MULTILINE)
    assert "called when it was dead: maybe_executed=False" in output
    assert "raised in the actor: TypeError, also a RemoteError: True" in output
    assert "and it lives on: 1" in output


def test_resources_queue_and_names_are_found() -> None:
    output = run("resources")
    assert "the same actor: True" in output
    assert len(re.findall(r"^job \d ran, [01] CPUs were free$", output, re.MULTILINE)) == 6
    assert "64 CPU were asked for, but this node has 2 in all" in output
    assert "taken: an actor named 'ledger' lives in namespace 'default' already" in output
