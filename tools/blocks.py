"""Check and run the Python blocks of Markdown pages.

::

    python tools/blocks.py              # look at the blocks of README.md and docs/**/*.md, run nothing
    python tools/blocks.py --run        # run them, each page in a process of its own
    python tools/blocks.py --run PAGE   # those of one page

The blocks of a page run as one script, as readers paste them into a file: none awaits anything outside of a function. A
block that cannot run says why in its info string: ``python no-run <reason>``. It has to be valid Python all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Block", "blocks", "main", "pages", "problems", "run", "run_all"]

ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = 60
"""Seconds that one page may take: a watchdog, many times what the slowest takes."""
_FENCE: Final = re.compile(r"^( *)(```+|~~~+)([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_LEAST_WORDS: Final = 3
"""The least words of a reason."""


class Block(NamedTuple):
    """A Python block of a page."""

    page: Path
    line: int
    """The number of its first line, from 1."""
    text: str
    reason: str | None
    """The reason for which it does not run; None where it runs."""
    problem: str
    """The mistake in its info string; empty where there is none."""


def pages(root: Path) -> list[Path]:
    """The pages of a repository: its README and what lies under ``docs``, without what was built."""
    found = sorted(path for path in root.glob("docs/**/*.md") if "_build" not in path.parts)
    return [root / "README.md", *found]


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language, _, rest = fence[3].strip().partition(" ")
        if language not in {"python", "py", "python3"}:
            continue
        how, _, reason = rest.strip().partition(" ")
        problem = ""
        if language != "python":
            problem = f"the language is {language!r}; write python"
        elif how not in {"", "no-run"}:
            problem = f"the info string is {fence[3].strip()!r}; there is 'python' and 'python no-run <reason>'"
        elif how and len(reason.split()) < _LEAST_WORDS:
            problem = (
                f"no-run needs a reason of {_LEAST_WORDS} words or more, as in: python no-run torch is not installed"
            )
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page, line, textwrap.dedent(fence[4]), reason if how else None, problem))
    return found


def _compiled(block: Block) -> CodeType:
    """The code of a block, whose lines are numbered as the page's are."""
    text = "\n" * (block.line - 1) + block.text
    return compile(text, str(block.page), "exec", dont_inherit=True)


def problems(page: Path) -> list[str]:
    """The mistakes in the blocks of a page, found before any of them runs."""
    found = []
    for block in blocks(page):
        if block.problem:
            found.append(f"{page}:{block.line}: {block.problem}")
        try:
            _compiled(block)
        except SyntaxError as error:
            found.append(f"{page}:{error.lineno}: the block is not valid Python: {error.msg}")
    return found


def _play(page: Path) -> None:
    """Run the blocks of a page in this process, as its main module."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    for block in blocks(page):
        if block.reason is None:
            exec(_compiled(block), vars(module))


def run(page: Path) -> str:
    """Run the blocks of a page in a process of its own, in an empty folder.

    Returns:
        Its output where it failed, led by the page's name; empty where all went well or nothing is to run.
    """
    if all(block.reason is not None for block in blocks(page)):
        return ""
    command = [sys.executable, str(Path(__file__).resolve()), "--play", str(page.resolve())]
    with tempfile.TemporaryDirectory(prefix="page") as folder:
        own = {"XDG_CONFIG_HOME": folder, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        try:
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return f"{page}: did not end within {SECONDS} s\n{error.output or ''}"
    return "" if done.returncode == 0 else f"{page}: exit status {done.returncode}\n{done.stdout}"


def run_all(chosen: Iterable[Path]) -> list[str]:
    """Run the blocks of pages, as many at a time as there are processors. Returns the output of those that failed."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [told for told in pool.map(run, chosen) if told]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or run the blocks of pages. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/blocks.py", description="Check or run Python blocks of pages.")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: README.md and docs/**/*.md")
    parser.add_argument("--run", action="store_true", help="run them")
    parser.add_argument("--play", action="store_true", help="run those of one page in this process")
    given = parser.parse_args(arguments)
    if given.play:
        _play(given.pages[0])
        return 0
    chosen: list[Path] = given.pages or pages(ROOT)
    found = [problem for page in chosen for problem in problems(page)]
    if given.run and not found:
        found = run_all(chosen)
    print("\n".join(found) or f"{sum(len(blocks(page)) for page in chosen)} blocks on {len(chosen)} pages: all is well")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
