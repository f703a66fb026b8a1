"""The ways in which newcomers run the first program work in this environment, as far as their packages are here.

`make dist-check` runs them all from the wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.minutes import PATIENCE, Way, block, ways

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(ROOT), ids=lambda way: way.name)
def test_a_way_answers(tmp_path: Path, way: Way) -> None:
    for package in way.packages:
        pytest.importorskip(package, reason=f"{way.name}: {package} is not installed; make dist-check installs it")
    for name, text in way.files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, *way.words], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "CC": "/bin/false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert way.expected in done.stdout


def test_the_block_of_a_page_is_its_first_one_with_the_text() -> None:
    programs = ("python\nimport a", "python no-run why\nzc.run(main())", "python\nzc.run(other())")
    page = "\n".join(("# A", *(f"```{each}\n```" for each in programs))) + "\n"
    assert block(page, "zc.run(") == "zc.run(main())\n"
    with pytest.raises(ValueError, match=r"no Python block of the page has 'zc.run\('"):
        block("# A\n", "zc.run(")
