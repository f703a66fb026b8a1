"""Copies of one small tree, for the programs in ``tools/`` to look at."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.trees import FILES, Change


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the small tree."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return root


@pytest.fixture
def change(tree: Path) -> Change:
    """A function that replaces a text in a file of the tree, which has to have it, and returns the file."""

    def replace(name: str, old: str, new: str) -> Path:
        path = tree / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return path

    return replace


@pytest.fixture
def commit(tree: Path) -> Callable[[str], str]:
    """A function that makes a commit with that subject in the tree, and returns its hash."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
        done = subprocess.run(["git", "-C", str(tree), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")

    def make(subject: str) -> str:
        git("commit", "-q", "--allow-empty", "-m", subject)
        return git("rev-parse", "--short", "HEAD")

    return make
