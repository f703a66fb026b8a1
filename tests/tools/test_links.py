"""Links of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.trees import Change
from tools.links import anchors, main


def test_the_links_of_the_small_tree_lead_somewhere(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    assert capsys.readouterr().out == "4 pages: all links lead somewhere\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("README.md", "docs/page.md#", "docs/pages.md#", "there is no docs/pages.md"),
        ("README.md", "#numbers", "#letters", "docs/page.md has no heading 'letters'"),
        ("docs/page.md", "(#numbers)", "(#number)", "page.md has no heading 'number'"),
        ("docs/page.md", "`small/work.py`", "`small/play.py`", "there is no source file small/play.py"),
        ("docs/page.md", "`small/work.py`", "`small.play`", "there is no small.play"),
        ("docs/page.md", "`small/work.py`", "`small.work.Gone`", "there is no small.work.Gone"),
        ("docs/page.md", "`small/work.py`", "`gone.work.Work`", "there is no gone.work.Work"),
        ("docs/page.md", "`small/work.py`", "`small.gone(1)`", "there is no small.gone"),
        ("docs/page.md", "index.md", "../index.md", "there is no ../index.md"),
        ("docs/page.md", "Back to", "![A picture](picture.svg) Back to", "there is no picture.svg"),
        ("docs/page.md", "Back to", "```{include} ../CHANGES.md\n```\nBack to", "it includes ../CHANGES.md"),
    ],
)
def test_a_dead_link(
    tree: Path, change: Change, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, told: str
) -> None:
    path = change(name, old, new)
    assert main([str(tree)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: ") and told in out


def test_code_and_addresses_are_not_followed(tree: Path, change: Change) -> None:
    change("docs/page.md", "number = 1", "number = 1  # [x](y.md)")
    change("docs/page.md", "The blocks", "`[x](y.md)` [x](https://example.org/y.md) [x](mailto:me@example.org)")
    assert main([str(tree)]) == 0


@pytest.mark.parametrize("name", ["small.work", "small.work.work", "small.toml", "os.path", "numpy.x.y", "zc.a.B"])
def test_dotted_names_that_are_there_or_somebody_elses(tree: Path, change: Change, name: str) -> None:
    change("docs/page.md", "`small/work.py`", f"`{name}`")
    assert main([str(tree)]) == 0


def test_anchors_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What `maybe_executed` means\n\n## A\n\n## A\n\n## [Link](x.md), *and* more!\n\n```\n# no\n```\n")
    assert anchors(page) == {"what-maybe_executed-means", "a", "a-1", "link-and-more"}


def test_a_folder_without_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "there is no page" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "told"), [("deep.py", ""), ("gone.py", "there is no file gone.py beside it")])
def test_files_that_the_readme_of_a_room_names(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    room = tree / "small" / "nested"
    (room / "README.md").write_text(f"# `nested`\n\nStart with `{name}`. The [page](../../docs/page.md) has more.\n")
    assert main([str(tree)]) == bool(told)
    assert (told or "5 pages: all links lead somewhere") in capsys.readouterr().out
