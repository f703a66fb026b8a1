"""Build the site of the documentation, and prove it: ``make docs``.

::

    python tools/docs.py [--out FOLDER]     # docs/_build/html by default

Warnings of Sphinx are errors, unresolved names among them. Every Python block of the pages and of the README runs
(`tools/blocks.py`), the links of the built pages lead to files and anchors that are there, and every public name is in
``objects.inv``, by which other projects' documentation links to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import blocks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["absent", "broken", "build", "inventory", "main"]


def build(source: Path, out: Path) -> list[str]:
    """Build a site.

    Args:
        source: the folder with ``conf.py`` and the pages.
        out: the folder for the site.

    Returns:
        The lines of Sphinx's warnings and errors.
    """
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html", "-d", f"{out}.trees"]
    done = subprocess.run(
        [*command, str(source), str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode == 0:
        return []
    return done.stdout.splitlines() or [f"Sphinx ended with status {done.returncode} and said nothing"]


class _Page(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `html.parser.HTMLParser`."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif (name == "href" and tag in {"a", "link"}) or (name == "src" and tag in {"img", "script"}):
                self.targets.add(value)


def broken(site: Path) -> list[str]:
    """The references of a site's pages to files and anchors that it has not."""
    read: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        page = read[path.resolve()] = _Page()
        page.feed(path.read_text("utf-8"))
    found = []
    for path, page in read.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = f"{path.relative_to(site.resolve())}: {target}"
            if not to.exists():
                found.append(f"{where} leads nowhere: there is no such file in the site")
            elif parts.fragment and to in read and unquote(parts.fragment) not in read[to].anchors:
                found.append(f"{where} leads nowhere: the page has no such anchor")
    return found


def inventory(site: Path) -> dict[str, str]:
    """The Python names in a site's ``objects.inv``, each with the address of its text in the site."""
    # The format, version 2: four lines of comment, then one line a name in a zlib stream.
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    found = {}
    for line in lines:
        name, kind, _, address, _ = line.split(" ", 4)
        if kind.startswith("py:"):
            found[name] = f"{address[:-1]}{name}" if address.endswith("$") else address
    return found


def absent(site: Path, names: Iterable[str]) -> list[str]:
    """The public names of which a site has no text.

    Args:
        site: its folder.
        names: with the package's name before them.
    """
    found = inventory(site)
    return [f"{name} is not in objects.inv: give it a place in tools/tables.py" for name in names if name not in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site and print what is wrong with it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/docs.py", description="Build the documentation and prove it.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "_build" / "html", metavar="FOLDER")
    given = parser.parse_args(arguments)
    import zcactor

    began = time.monotonic()
    site: Path = given.out
    chosen = blocks.pages(ROOT)
    found = build(ROOT / "docs", site)
    if (site / "objects.inv").exists():
        found += broken(site) + absent(site, (f"zcactor.{name}" for name in zcactor.__all__))
    wrong = [problem for page in chosen for problem in blocks.problems(page)]
    found += wrong or blocks.run_all(chosen)
    count = sum(block.reason is None for page in chosen for block in blocks.blocks(page))
    print("\n".join(found) or f"{site}: all is well, {count} blocks ran; {time.monotonic() - began:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
