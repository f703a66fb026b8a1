"""What the README shows works: its whole program runs as it stands, and every other Python block runs after it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = [block for block in BLOCKS if block.rstrip().endswith("zc.run(main())")]
FRAGMENTS = [block for block in BLOCKS if block not in PROGRAMS]

FRAGMENT_RUNNER = """
import ast, inspect

async def fragments(blocks):
    async with zc.init():
        globals()["shard"] = await Shard.spawn(1 << 20)
        for block in blocks:
            code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code)
            if inspect.isawaitable(result):
                await result

zc.run(fragments({blocks!r}))
"""
"""Runs the blocks one after the other, with the names of the whole program and an actor of it."""


def run(program: str, directory: Path) -> str:
    """What `program`, a file of its own in `directory`, prints."""
    path = directory / "program.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=environment, timeout=50, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def test_there_is_one_whole_program_and_fragments() -> None:
    assert len(PROGRAMS) == 1
    assert len(FRAGMENTS) >= 4


def test_the_whole_program_runs(tmp_path: Path) -> None:
    output = run(PROGRAMS[0], tmp_path)
    assert output.splitlines() == [
        "largest step: 1.0",
        "largest weight: 0.1",
        *["[-0.1 -0.1 -0.1 -0.1]"] * 3,
        "bytes copied: 0",
    ]


def test_the_fragments_run(tmp_path: Path) -> None:
    definitions = PROGRAMS[0].rstrip().removesuffix("zc.run(main())")
    output = run(definitions + FRAGMENT_RUNNER.format(blocks=FRAGMENTS), tmp_path)
    assert "[0.0, 1.0, 2.0, 3.0] 2 2" in output
    assert "local same host" in output


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_the_program_that_prefers_rdma_runs_without_it_too(tmp_path: Path) -> None:
    (block,) = [block for block in FRAGMENTS if "async def by_rdma" in block]
    definitions = PROGRAMS[0].replace("zc.run(main())", "")
    transport, figures = run(f"{definitions}\n{block}\nzc.run(by_rdma())", tmp_path).splitlines()
    read, registered, placed = map(int, figures.split())
    assert transport in ("verbs", "tcp") and placed == 1
    assert (read > 0) == (registered > 0) == (transport == "verbs")
