"""The site of the documentation, as ``make docs`` builds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import zcactor
from tests.tools.trees import Change
from tools.docs import absent, broken, build, inventory

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "install": "Install",
    "who/README": "When to use it, and when not",
    "how-to/map": "Map a function over parameters",
    "how-to/scripts": "Use it from a plain script",
    "performance": "Beside what you use now",
    "tutorial/2-arrays": "What you pass is closed",
    "reference/errors": "Errors",
    "how-to/arrays-of-libraries": "How to pass a pandas frame without a copy",
    "how-to/supervision": "What maybe_executed means",
    "how-to/rdma": "Turn on RDMA",
    "explanation/security": "What a token holder can do",
    "how-to/test-your-actors": "Test your actors",
    "explanation/costs": "What an idle actor costs",
}
"""Pages that answer the first questions of most people, and the headings above the answers."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    out = tmp_path_factory.mktemp("site") / "html"
    assert build(ROOT / "docs", out) == []
    return out


def test_links_lead_somewhere(site: Path) -> None:
    assert broken(site) == []


def test_every_public_name_is_there(site: Path) -> None:
    assert absent(site, (f"zcactor.{name}" for name in zcactor.__all__)) == []
    assert {address.partition("#")[0] for address in inventory(site).values()} == {
        "reference/api.html",
        "reference/testing.html",
    }


def test_each_page_has_style_and_icon_and_no_index_of_names_is_beside_the_search(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "search.html"]
    assert [page for page in pages if "_static/site.css" not in page.read_text("utf-8")] == []
    assert [page for page in pages if "_static/icon.svg" not in page.read_text("utf-8")] == []
    assert (site / "_static" / "site.css").exists() and (site / "_static" / "icon.svg").exists()
    assert not (site / "genindex.html").exists() and not (site / "py-modindex.html").exists()


UNSEARCHED = {"adding-a-transport", "budgets", "changelog", "contributing", "explanation/walks"}
"""Pages for developers of zcactor, beside the decisions, which the search of a user leaves out."""


def test_the_search_finds_what_users_ask_and_leaves_out_what_developers_read(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", text, re.DOTALL)[1])  # type: ignore[index]
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix(""))
        for page in ROOT.glob("docs/**/*.[im]*")
        if page.suffix in {".ipynb", ".md"}
    }
    assert {page for page in pages if not page.startswith("_build")} == set(index["docnames"])
    titles = [(index["docnames"][place[0]], title) for title, places in index["alltitles"].items() for place in places]
    assert set(QUESTIONS.items()) <= set(titles)
    left_out = {page for page in index["docnames"] if page not in {page for page, title in titles if title}}
    assert left_out == UNSEARCHED | {page for page in pages if page.startswith("explanation/decisions/")}


def test_the_first_questions_are_one_click_from_the_first_page(site: Path) -> None:
    targets = re.findall(r'href="([^"]+)"', (site / "index.html").read_text())
    for page in QUESTIONS:
        assert any(target.startswith(f"{page}.html") for target in targets), page


@pytest.fixture
def small(tree: Path) -> Path:
    """The place for the small tree's site."""
    return tree / "docs" / "_build" / "html"


def test_the_small_site(tree: Path, small: Path) -> None:
    assert build(tree / "docs", small) == []
    assert broken(small) == []
    assert absent(small, ["small.work"]) == []
    assert inventory(small) == {"small.work": "index.html#small.work"}


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("docs/page.md", "index.md", "indices.md", "indices.md"),
        ("docs/page.md", "(#numbers)", "(#letters)", "letters"),
        ("docs/index.md", ":py:func:`small.work`", ":py:func:`small.play`", "small.play"),
        ("docs/index.md", "```{toctree}\npage\n```", "", "toctree"),
    ],
)
def test_a_warning_is_an_error(
    tree: Path, small: Path, change: Change, name: str, old: str, new: str, told: str
) -> None:
    change(name, old, new)
    assert told in "\n".join(build(tree / "docs", small))


def test_broken_links_and_absent_names(tree: Path, small: Path, change: Change) -> None:
    change("docs/index.md", "[The page](page.md)", '<a href="pages.html">x</a> <a href="page.html#letters">y</a>')
    assert build(tree / "docs", small) == []
    assert broken(small) == [
        "index.html: page.html#letters leads nowhere: the page has no such anchor",
        "index.html: pages.html leads nowhere: there is no such file in the site",
    ]
    assert absent(small, ["small.work", "small.play"]) == [
        "small.play is not in objects.inv: give it a place in tools/tables.py"
    ]
