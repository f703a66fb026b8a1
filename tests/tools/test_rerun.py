"""Failed tests that are run once more, by real runs of pytest in a folder of a few tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.rerun import MOST, failed, main

FLAKY = """
from pathlib import Path

def test_the_first_time_only():
    seen = Path(__file__).with_name("seen")
    before, _ = seen.exists(), seen.touch()
    assert before

def test_passes():
    with Path(__file__).with_name("passes").open("a") as file:
        file.write("x")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, text: str, *arguments: str) -> int:
    (folder / "test_few.py").write_text(text)
    return main(["-q", *arguments])


@pytest.mark.slow
def test_a_test_that_passes_the_second_time_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, FLAKY) == 0
    assert (folder / "passes").read_text() == "x"  # a test that has passed is not run again
    printed = capfd.readouterr().out
    assert "1 failed beside other tests" in printed
    assert printed.splitlines()[-1].endswith("test_few.py::test_the_first_time_only")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "again"), [(1, True), (MOST, True), (MOST + 1, False)])
def test_a_test_that_fails_twice_fails(
    folder: Path, capfd: pytest.CaptureFixture[str], count: int, again: bool
) -> None:
    text = f"import pytest\n\n@pytest.mark.parametrize('n', range({count}))\ndef test_fails(n):\n    assert n < 0\n"
    assert run(folder, text) == 1
    printed = capfd.readouterr().out
    assert ("run once more alone" in printed) is again
    assert "passed alone" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "status"), [(("-k", "passes"), 0), (("-k", "nothing"), 5), (("--bogus",), 4)])
def test_another_status_is_passed_on(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int
) -> None:
    assert run(folder, FLAKY, *arguments) == status
    assert "once more" not in capfd.readouterr().out


def test_a_cache_without_failures(tmp_path: Path) -> None:
    assert failed(tmp_path) == []
