"""Python blocks of pages: their info strings, their syntax, and what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.trees import Change
from tools import blocks
from tools.blocks import main, pages, run

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocks_of_the_small_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [str(page) for page in pages(tree)]
    assert main(chosen) == 0
    assert capsys.readouterr().out == "4 blocks on 3 pages: all is well\n"
    (found,) = (block for block in blocks.blocks(tree / "docs" / "page.md") if block.reason is not None)
    assert (found.line, found.reason) == (20, "it needs a second machine")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("number = 1", "number = = 1", "page.md:8: the block is not valid Python"),
        ('raise SystemExit("this does not run")', "raise SystemExit(", "page.md:20: the block is not valid Python"),
        ("no-run it needs a second machine", "no-run", "page.md:20: no-run needs a reason"),
        ("no-run it needs a second machine", "no-run why not", "page.md:20: no-run needs a reason"),
        ("no-run it needs", "skip it needs", "page.md:20: the info string is 'python skip it needs a second machine'"),
        (
            "asyncio.run(asyncio.sleep(0))",
            "await asyncio.sleep(0)",
            "page.md:15: the block is not valid Python: 'await' outside",
        ),
        ("```python no-run", "```py no-run", "page.md:20: the language is 'py'; write python"),
    ],
)
def test_a_block_that_is_wrong_before_it_runs(
    tree: Path, change: Change, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    path = change("docs/page.md", old, new)
    assert main([str(path)]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_blocks_of_a_page_run_in_one_namespace(tree: Path) -> None:
    assert run(tree / "docs" / "page.md") == ""
    assert run(tree / "README.md") == ""


@pytest.mark.slow
def test_a_block_that_fails_is_told_with_page_line_and_output(
    change: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    path = change("docs/page.md", "assert number == 1", 'print("before")\nassert number == 2')
    assert main(["--run", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: exit status 1")
    assert "before" in out and "AssertionError" in out and 'page.md", line 17' in out


@pytest.mark.slow
def test_a_page_of_scripts_has_no_runtime(tree: Path, change: Change) -> None:
    path = change("README.md", "print(1 + 1)", "import zcactor as zc\nzc.put(1)")
    assert "NotInitialized" in run(path)


@pytest.mark.slow
def test_a_block_that_does_not_end(tree: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SECONDS", 3)
    path = change("README.md", "print(1 + 1)", "import time\ntime.sleep(600)")
    assert "did not end within 3 s" in run(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in pages(ROOT) if any(block.reason is None for block in blocks.blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)  # fmt: skip
def test_a_page_of_the_documentation(page: Path) -> None:
    assert run(page) == ""
