"""The pages for people with a task: each program is saved under its name, run, and prints what its page shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "who").glob("*.md") if path.stem != "README"}
PACKAGES = {"frame": ("pandas",), "model": ("fastapi", "httpx")}
"""Packages that programs need, by the names of their pages."""
LINES = 40
"""The most lines of a program, where blank ones do not count."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, tmp_path: Path) -> None:
    text = PAGES[name]
    (program,) = re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert f"Save this as `{name}.py`" in text
    assert len(re.findall(r"^.*\S", program, re.MULTILINE)) <= LINES
    for package in PACKAGES.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    (tmp_path / f"{name}.py").write_text(program)
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    # Seconds are those of the machine, and pickles of other versions of a library are a little longer or shorter.
    seconds = re.sub(r"\d+\\\.\d+\\ s\b", r"\\d+\\.\\d+ s", re.escape(shown))
    assert re.fullmatch(re.sub(r"[\d,]{5,}\\ bytes\\ pickled", r"[\\d,]{5,} bytes pickled", seconds), done.stdout)
