"""The one command for a real GPU: its steps, their limits, and its page."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.driver.programs import until
from tools import gpu_card
from tools.gpu_card import Step

PRINTS = [sys.executable, "-c", "print('seen')"]
FAILS = [sys.executable, "-c", "print('said'); raise SystemExit(7)"]
HANGS = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1000)"]


def test_each_step_has_its_verdict_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        Step("prints", 0.5, PRINTS), Step("fails", 0.5, FAILS), Step("hangs", 0.001, HANGS),
        Step("missing", 0.1, ["no-such-program"]), Step("suite", 0.5, PRINTS),
    ]  # fmt: skip
    monkeypatch.setattr(gpu_card, "steps", lambda driver, out: made)
    assert gpu_card.main(["--driver", "fake", "--out", str(tmp_path / "new"), "--seconds", "100"]) == 1
    page = (tmp_path / "new" / "page.md").read_text()
    verdicts = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert verdicts == ["pass", "ended with 7", "not done after 1 s", "missing: no-such-program", "all skipped"]
    assert "## fails\n\n```\nsaid\n```" in page and "driver fake" in page
    assert str(tmp_path / "new" / "page.md") in capsys.readouterr().out


@pytest.mark.parametrize(("driver", "status"), [("fake", 0), ("cuda", 1)])
def test_a_suite_of_which_nothing_ran_is_no_success_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, status: int
) -> None:
    monkeypatch.setattr(gpu_card, "steps", lambda driver, out: [Step("suite", 1, PRINTS)])
    assert gpu_card.main(["--driver", driver, "--out", str(tmp_path)]) == status


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_hangs_is_ended_with_the_run(tmp_path: Path, number: int) -> None:
    """The check is stopped, as one in a driver that hangs."""
    command = [sys.executable, "tools/gpu_check.py", "--driver", "fake", "--out", str(tmp_path), "--only", "one_queue"]
    with subprocess.Popen(command, cwd=gpu_card.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            (child,) = until(lambda: psutil.Process(run.pid).children(), "the check has begun")
            # Before its exec the child has the run's memory and keeps the run in vfork, where no signal reaches it.
            until(lambda: "--child" in child.cmdline(), "the check is started")
            until(lambda: any("numpy" in each.path for each in child.memory_maps()), "the check runs")
            child.suspend()
            run.send_signal(number)
            assert run.wait(60)
        finally:
            run.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the check is ended")


def test_the_steps_are_real(tmp_path: Path) -> None:
    for driver in ("cuda", "fake"):
        for step in gpu_card.steps(driver, tmp_path):
            files = [each for each in step.command if each.endswith(".py")]
            assert all((gpu_card.ROOT / each).is_file() for each in files), step
    assert gpu_card.steps("cuda", tmp_path)[0].name == "nvidia-smi"


def test_the_folders_beside_a_wheel_have_all_that_tests_import() -> None:
    imported = set[str]()
    for path in (path for name in gpu_card.BESIDE for path in (gpu_card.ROOT / name).rglob("*.py")):
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        imported.update(name for name in found if (gpu_card.ROOT / name).is_dir())
    assert imported - {"zcactor"} <= set(gpu_card.BESIDE)


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--out", "a", "--gather", "b"]):
        with pytest.raises(SystemExit) as caught:
            gpu_card.main(arguments)
        assert caught.value.code == 2 and "--out DIR or --gather DIR" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for arguments, text in (
        (["--out", str(tmp_path), "--seconds", "nan"], "must be above 0"),
        (["--out", str(tmp_path), "--seconds", "0"], "must be above 0"),
        (["--out", str(tmp_path / "file")], "File exists"),
    ):
        with pytest.raises(SystemExit) as caught:
            gpu_card.main(arguments)
        assert caught.value.code == 2 and text in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--gather"):
        gpu_card.main(["--out", str(tmp_path), "--wheels", str(tmp_path)])
