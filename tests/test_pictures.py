"""The pictures of the pages are what `docs/pictures.py` makes, are valid, and have colours for light and dark pages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCRIPT, FOLDER = DOCS / "pictures.py", DOCS / "pictures"
PICTURES = sorted(path.name for path in FOLDER.glob("*.svg"))
LEAST_CONTRAST = 3.0
"""WCAG 2.1, 1.4.11: of graphics and of large text with what is behind them."""
LIGHT, DARK = "#ffffff", "#131416"


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=50, check=False)


def luminance(colour: str) -> float:
    """The relative luminance of ``#rrggbb``, as WCAG 2.1 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_committed_pictures_and_tables_are_what_the_script_makes(tmp_path: Path) -> None:
    assert draw("--out", str(tmp_path)).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == PICTURES
    done = draw("--check")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_a_picture_that_was_changed_is_found(tmp_path: Path) -> None:
    draw("--out", str(tmp_path))
    assert draw("--check", "--out", str(tmp_path)).returncode == 0
    with (tmp_path / PICTURES[0]).open("a") as file:
        file.write("\n")
    done = draw("--check", "--out", str(tmp_path))
    assert done.returncode == 1
    assert f"{PICTURES[0]} is not what this script makes" in done.stdout


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_read_on_light_and_on_dark_pages(name: str) -> None:
    text = (FOLDER / name).read_text()
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    colours = set(re.findall(r'(?:fill|stroke)="(#\w+)"', text))
    assert colours
    for colour in colours:
        assert min(contrast(colour, LIGHT), contrast(colour, DARK)) >= LEAST_CONTRAST, colour


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_stands_on_a_page_and_has_a_description(name: str) -> None:
    pages = [page.read_text() for page in DOCS.glob("**/*.md")]
    assert any(re.search(rf"!\[\w[^\]]+\]\((\.\./)?pictures/{name}\)", page) for page in pages)


def test_libraries_that_were_measured_are_drawn_and_have_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("pictures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pictures", pictures)
    spec.loader.exec_module(pictures)
    record = json.loads((DOCS / "figures" / "budgets.jsonl").read_text().splitlines()[0])
    figures = {"call: zcactor": 31.2, "call: Ray": 400.0, "idle worker: zcactor": 20.0}
    lines = [{"item": "peers", "name": name, "value": value, "unit": "us"} for name, value in figures.items()]
    monkeypatch.setattr(pictures, "PEERS", tmp_path / "peers.jsonl")
    pictures.PEERS.write_text("".join(json.dumps(line) + "\n" for line in [record, *lines]))
    assert pictures.tables()["peers"][:4] == [
        "|  | zcactor | Ray |", "| --- | ---: | ---: |", "| call | 31.2 us | 400 us |", "| idle worker | 20 us |  |"
    ]  # fmt: skip
    assert "![Bars: zcactor beside other libraries](pictures/figures-peers.svg)" in pictures.page(
        pictures.PAGE.read_text()
    )
    assert len(ElementTree.fromstring(pictures.svg(pictures.peers())).findall("{http://www.w3.org/2000/svg}rect")) == 3
