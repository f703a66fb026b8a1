"""The README is short, its program runs anywhere, and the links of all pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]
LINES, PROGRAM_LINES = 140, 16
"""The most, of the README and of its program, where blank lines do not count."""


def run(program: str, directory: Path) -> str:
    """The output of `program`, a file of its own in `directory`. The package is the installed one."""
    path = directory / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path.name], cwd=directory, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def test_it_is_short_and_has_no_figures_of_benchmarks() -> None:
    assert len(README.splitlines()) <= LINES
    (program,) = BLOCK.findall(README)
    assert len(re.findall(r"^.*\S", program, re.MULTILINE)) <= PROGRAM_LINES
    assert "| Budget |" not in README


def test_the_two_commands_stand_at_its_beginning() -> None:
    early = README.splitlines()[: LINES // 3]
    assert any(line.startswith("make demo ") for line in early)
    assert any(line.startswith("make test ") for line in early)


def test_the_page_on_installing_has_each_extra() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(project["optional-dependencies"])


@pytest.mark.slow
def test_the_program_runs_outside_of_the_checkout(tmp_path: Path) -> None:
    assert not tmp_path.is_relative_to(ROOT)
    (program,) = BLOCK.findall(README)
    printed = run(program, tmp_path)
    assert printed == "30000000.0 with 0 bytes copied\n"
    assert f"It prints `{printed.strip()}`" in README


def test_the_first_page_of_the_site_has_the_same_program() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    assert [re.sub(r"\n+", "\n", text) for text in BLOCK.findall(page)] == [
        re.sub(r"\n+", "\n", text) for text in BLOCK.findall(README)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.slow
def test_the_program_that_prefers_rdma_runs_without_it_too(tmp_path: Path) -> None:
    (program,) = BLOCK.findall((ROOT / "docs" / "how-to" / "rdma.md").read_text())
    path, figures = run(program, tmp_path).splitlines()
    transport, _, why = path.partition(" ")
    read, registered, placed = map(int, figures.split())
    assert transport in ("verbs", "tcp") and placed == 1
    assert (read > 0) == (registered > 0) == (transport == "verbs") == (why == "works")
