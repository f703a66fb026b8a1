"""The pictures of the pages are what `docs/pictures.py` makes, are valid, and have colours for light and dark pages."""

from __future__ import annotations

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


def test_what_is_committed_is_what_the_script_makes(tmp_path: Path) -> None:
    assert draw("--out", str(tmp_path)).returncode == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        name: (FOLDER / name).read_bytes() for name in PICTURES
    }


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
    pages = [page.read_text() for page in DOCS.glob("*/*.md")]
    assert any(re.search(rf"!\[\w[^\]]+\]\(\.\./pictures/{name}\)", page) for page in pages)
