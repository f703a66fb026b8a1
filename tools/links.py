"""Find links of Markdown pages that lead nowhere: to files that are not there, and to headings that no page has.

A path of a source file in backticks counts as a link, as from the repository's top or from the package. So does the
dotted name of a package, or of one of its folders, with what is in it: ``zcactor.rpc.call.Call``, ``rpc.call``. The
README of a package's folder names the files of that folder, also by their bare names.

::

    python tools/links.py [FOLDER]     # this repository by default

The pages are those at the top of the repository, under ``docs``, and in the folders of packages. Addresses with a
scheme are not asked for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["anchors", "dead", "main", "pages"]

_LINK: Final = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_FENCE: Final = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]+`")
_HEADING: Final = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_SOURCE: Final = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|fbs))\b[^`\n]*`")
_BARE: Final = re.compile(r"`(\w+\.(?:py|c|h))`")
_DOTTED: Final = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`\n]*\))?`")
_CLASS: Final = re.compile(r"[a-z_]+(\.[a-z_]+)+\.[A-Z]\w*")
_OTHERS: Final = ("docutils", "torch", "zc")
"""Packages with classes in modules of theirs that pages name."""
_SUFFIXES: Final = ("c", "fbs", "h", "md", "py", "toml")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")
_INCLUDED: Final = re.compile(r"^```\{include\} (\S+)", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """The pages of a repository."""
    site = sorted(page for page in root.glob("docs/**/*.md") if "_build" not in page.parts)
    rooms = sorted(page for top in root.glob("*/__init__.py") for page in top.parent.glob("*/README.md"))
    return [*sorted(root.glob("*.md")), *site, *rooms]


def _slug(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page: one for each heading, numbered from the second of the same name on."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text("utf-8"))):
        slug, number = _slug(heading), 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def _is_there(name: str, packages: list[Path]) -> bool:
    """Whether a dotted name names something: a folder, a module, or a word of the module that it leads to. Names that
    begin with no package, and with no folder of one, are somebody else's, unless they look like a class of a folder
    that is gone."""
    first, *parts = name.split(".")
    if parts[-1] in _SUFFIXES:
        return True
    for package in packages:
        at = package if first == package.name else package / first
        if not at.is_dir():
            continue
        while parts and (at / parts[0]).is_dir():
            at /= parts.pop(0)
        module = at / f"{parts[0]}.py" if parts else at
        if module.is_file():
            parts.pop(0)
        else:
            module, parts = at / "__init__.py", parts[:1]
        text = module.read_text("utf-8") if module.is_file() else ""
        return all(re.search(rf"\b{part}\b", text) for part in parts)
    return not packages or first in _OTHERS or not _CLASS.fullmatch(name)


def dead(page: Path, root: Path) -> Iterator[str]:
    """The links of a page that lead nowhere, each as a line with the page, the link and what is missing.

    Args:
        page: the page.
        root: the top of the repository.
    """
    text = page.read_text("utf-8")
    packages = [*(module.parent for module in root.glob("*/__init__.py")), root / "tests"]
    places = [root, *packages]
    if page.parent.parent in packages:
        places.append(page.parent)
        for name in _BARE.findall(text):
            if not (page.parent / name).exists():
                yield f"{page}: there is no file {name} beside it"
    for name in _DOTTED.findall(_FENCE.sub("", text)):
        if not _is_there(name, packages):
            yield f"{page}: there is no {name}"
    for name in _SOURCE.findall(_FENCE.sub("", text)):
        if not any((place / name).exists() for place in places):
            yield f"{page}: there is no source file {name}"
    for name in _INCLUDED.findall(text):
        if not (page.parent / name).is_file():
            yield f"{page}: it includes {name}, which is not there"
    for target in _LINK.findall(_CODE.sub("", _FENCE.sub("", text))):
        if _SCHEME.match(target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists():
            yield f"{page}: the link {target} leads nowhere: there is no {name}"
        elif anchor and to.suffix == ".md" and not anchor.startswith("zcactor.") and anchor not in anchors(to):
            yield f"{page}: the link {target} leads nowhere: {name or page.name} has no heading {anchor!r}"


def main(arguments: list[str] | None = None) -> int:
    """Look for dead links and print them. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    root = Path(given[0]) if given else Path(__file__).resolve().parents[1]
    chosen = pages(root)
    if not chosen:
        print(f"{root}: there is no page", file=sys.stderr)
        return 2
    found = [problem for page in chosen for problem in dead(page, root)]
    print("\n".join(found) or f"{len(chosen)} pages: all links lead somewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
