"""Check the walks of ``docs/explanation/walks.md``: each step names a function that is there and leads to the next one.

::

    python tools/walks.py [FOLDER] [--counts]     # this repository by default

A walk is a heading with a numbered list. A step is a file, a function and a sentence:
``1. `zcactor/rpc/call.py` `Call.complete`: the call ends.`` The function is looked for in the file, and the body of one
step's function has to name the function of the next step. Where the way is another one, the step begins with it:

``(from 3)``
    The function is called by that of step 3, and not by that of the step before.
``(back)``
    The function has called that of the step before, and goes on with the result.
``(by `slot` of `file` `place`)``
    The function before names the slot: an attribute, a parameter or a queue. The place, a function or a class, fills
    the slot: it names the slot and this step's function. Slots that lead to each other are named in their order.
``(by `name`)``
    Both functions name it: a queue, a future, a field of a message.
``(frame KIND)``
    An earlier function writes frames of that kind, and this one takes them, in another process.
``(request)``
    The function before asks another process for this one, which `zcactor.rpc.services.remote` declares.
``(meanwhile)``
    Another process, which no step leads to, notices something by itself.

Several ways are joined by commas. With ``--counts`` the files and the rooms (folders of ``zcactor``) of each walk are
printed, with those of the places that fill slots.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PAGE", "Step", "Walk", "main", "problems", "walks"]

PAGE: Final = "docs/explanation/walks.md"
_HEADING: Final = re.compile(r"^## +(.+)$")
_STEP: Final = re.compile(r"^(\d+)\. (.*)$")
_PARTS: Final = re.compile(
    r"(?:\((?P<ways>.*?)\) )?`(?P<file>[\w./-]+)` `(?P<function>[\w.]+)`: (?P<text>\S.*)", re.DOTALL
)
_FROM: Final = re.compile(r"from (\d+)")
_SLOT: Final = re.compile(r"by `(\w+)`(?: of `([\w./-]+)` `([\w.]+)`)?")
_FRAME: Final = re.compile(r"frame ([A-Z_]+)")
_C_FUNCTION: Final = re.compile(r"^(?:[\w]+[ *]+)+(\w+)\([^;{}]*\) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_C_ONE_LINE: Final = re.compile(r"^(?:[\w]+[ *]+)+(\w+)\([^;{}]*\) \{ (.*) \}$", re.MULTILINE)
_C_METHOD: Final = re.compile(r'\{"(\w+)",\s*(?:\(PyCFunction\))?(?:\(void \(\*\)\(void\)\))?(\w+),')
_C_TEXT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_REMOTE: Final = re.compile(r"@remote\([^\n]*\)\n(?: *@[^\n]*\n)* *(?:async )?def (\w+)\(")
_WORD: Final = re.compile(r"\w+")


class Step(NamedTuple):
    """One step of a walk."""

    line: int
    ways: str
    """The text in parentheses before the file; empty where the step before calls the function."""
    file: str
    function: str


class Walk(NamedTuple):
    """One walk of the page."""

    name: str
    steps: list[Step]

    @property
    def files(self) -> list[str]:
        """Its files, each once, in their order."""
        found = [[step.file, *(file for _, file, _ in _SLOT.findall(step.ways) if file)] for step in self.steps]
        return list(dict.fromkeys(file for files in found for file in files))

    @property
    def rooms(self) -> list[str]:
        """Its rooms: the folders of the package that its files lie in."""
        return list(dict.fromkeys(file.split("/")[1] for file in self.files))


class Malformed(ValueError):
    """A step of the page cannot be read."""


def walks(text: str) -> Iterator[Walk]:
    """The walks of a page.

    Raises:
        Malformed: a step has another form, or another number than its place.
    """
    name, items = "", list[tuple[int, str]]()
    for number, line in enumerate([*text.splitlines(), "## "], 1):
        if line.startswith("## "):
            if items:
                yield Walk(name, [_step(at, index, item) for index, (at, item) in enumerate(items, 1)])
            found = _HEADING.match(line)
            name, items = "" if found is None else found[1], []
        elif name and _STEP.match(line):
            items.append((number, line))
        elif items and line.startswith("   "):
            items[-1] = items[-1][0], f"{items[-1][1]} {line.strip()}"


def _step(line: int, index: int, item: str) -> Step:
    numbered = _STEP.match(item)
    assert numbered is not None
    found = _PARTS.fullmatch(numbered[2])
    if found is None or int(numbered[1]) != index:
        raise Malformed(f"{line}: step {index} is not of the form '{index}. (way) `file` `function`: sentence': {item}")
    return Step(line, found["ways"] or "", found["file"], found["function"])


@cache
def _source(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def _c_bodies(path: Path) -> dict[str, str]:
    text = _C_TEXT.sub("", _source(path))
    return {name: body for pattern in (_C_ONE_LINE, _C_FUNCTION) for name, body in pattern.findall(text)}


@cache
def _c_methods(folder: Path) -> dict[str, set[str]]:
    """The names by which Python calls the functions of the C files of a folder."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.c")):
        for name, function in _C_METHOD.findall(_source(path)):
            found.setdefault(function, set()).add(name)
    return found


@cache
def _remote(package: Path) -> frozenset[str]:
    """The names of the methods that are declared as remote."""
    return frozenset(name for path in package.rglob("*.py") for name in _REMOTE.findall(_source(path)))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_source(path), filename=str(path))


def _node(path: Path, name: str) -> ast.AST | None:
    """The definition of a function, a class or a method of a Python file."""
    node: ast.AST = _tree(path)
    for part in name.split("."):
        inner = [
            each
            for each in getattr(node, "body", [])
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and each.name == part
        ]
        if not inner:
            return None
        node = inner[-1]  # behind overloads
    return node


@cache
def _names(path: Path, function: str) -> frozenset[str] | None:
    """The names in the body of a function, or of a class; None where there is neither."""
    if not path.is_file():
        return None
    if path.suffix == ".c":
        body = _c_bodies(path).get(function)
        words = None if body is None else set(_WORD.findall(body))
        return None if words is None else frozenset(words | {word.removeprefix("str_") for word in words})
    node = _node(path, function)
    if node is None:
        return None
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.keyword | ast.arg) and each.arg is not None:
            found.add(each.arg)
    return frozenset(found)


def _called(path: Path, function: str) -> set[str]:
    """The names by which a caller may name a function."""
    *owner, last = function.split(".")
    if path.suffix == ".c":
        return {last} | _c_methods(path.parent).get(last, set())
    return {owner[-1]} if owner and last.startswith("__") else {last}


def _bare(names: frozenset[str] | set[str]) -> set[str]:
    """Names as slots have them: without leading underscores, and in lower case, also those of enumerators of C."""
    return {name.lstrip("_").lower() for name in names}


def _kind_in(names: frozenset[str] | None, kind: str) -> bool:
    return names is not None and bool(names & {f"KIND_{kind}", f"_{kind}", kind})


def _names_any(names: frozenset[str] | set[str], wanted: set[str]) -> bool:
    return bool(_bare(names) & _bare(wanted))


def _broken_slots(root: Path, before: Step, step: Step, slots: Sequence[tuple[str, str, str]]) -> str:
    """The reason why slots do not lead from one step to another; empty where they do."""
    named, named_in = _names(root / before.file, before.function) or frozenset(), before.function
    for name, file, place in slots:
        if not _names_any(named, {name}):
            return f"{named_in} does not name {name}"
        at, named_in = (file, place) if file else (step.file, step.function)
        found = _names(root / at, named_in)
        if found is None:
            return f"there is no {named_in} in {at}"
        if not _names_any(found, {name}):
            return f"{named_in} does not name {name}"
        named = found
    called = _called(root / step.file, step.function)
    if slots[-1][1] and not _names_any(named, called):
        return f"{named_in} does not name {' or '.join(sorted(called))}"
    return ""


def _broken_way(root: Path, walk: Walk, index: int) -> str:
    """The reason why a step does not follow; empty where it does."""
    step, before, way = walk.steps[index], walk.steps[index - 1], "call"
    slots: list[tuple[str, str, str]] = []
    for each in filter(None, step.ways.split(", ")):
        if found := _FROM.fullmatch(each):
            if not 0 < int(found[1]) <= index:
                return f"there is no step {found[1]} before it"
            before = walk.steps[int(found[1]) - 1]
        elif found := _SLOT.fullmatch(each):
            slots.append((found[1], found[2] or "", found[3] or ""))
        elif each in ("back", "meanwhile", "request") or _FRAME.fullmatch(each):
            way = each
        else:
            return f"the way {each!r} is not known"
    if slots:
        return _broken_slots(root, before, step, slots)
    if way == "meanwhile":
        return ""
    here = _names(root / step.file, step.function) or frozenset()
    if kind := _FRAME.fullmatch(way):
        if not any(_kind_in(_names(root / each.file, each.function), kind[1]) for each in walk.steps[:index]):
            return f"no step before it writes {kind[1]}"
        return "" if _kind_in(here, kind[1]) else f"{step.function} does not name {kind[1]}"
    caller, callee = (step, before) if way == "back" else (before, step)
    called = _called(root / callee.file, callee.function)
    if not called & (_names(root / caller.file, caller.function) or frozenset()):
        return f"{caller.function} does not name {' or '.join(sorted(called))}"
    if way == "request" and not called & _remote(root / "zcactor"):
        return f"{step.function} is not declared as remote"
    return ""


def problems(root: Path, walk: Walk) -> Iterator[tuple[int, str]]:
    """The steps of a walk that do not hold: the line of each in the page, and the reason."""
    for index, step in enumerate(walk.steps):
        path = root / step.file
        if not path.is_file():
            yield step.line, f"there is no file {step.file}"
        elif _names(path, step.function) is None:
            yield step.line, f"there is no {step.function} in {step.file}"
        elif index and (reason := _broken_way(root, walk, index)):
            yield step.line, f"step {index + 1} of {walk.name!r}: {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the walks and print the steps that do not hold. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Check the walks through the code.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--counts", action="store_true", help="print the files and rooms of each walk")
    given = parser.parse_args(arguments)
    try:
        found = list(walks((given.folder / PAGE).read_text("utf-8")))
    except (Malformed, FileNotFoundError) as error:
        print(f"{PAGE}:{error}", file=sys.stderr)
        return 2
    told = [f"{PAGE}:{line}: {reason}" for walk in found for line, reason in problems(given.folder, walk)]
    if given.counts:
        for walk in found:
            counts = f"{len(walk.steps):2} steps, {len(walk.files):2} files, {len(walk.rooms)} rooms"
            print(f"{counts}  {walk.name} ({', '.join(walk.rooms)})")
    print("\n".join(told) or f"{len(found)} walks: each step leads to the next one")
    return int(bool(told) or not found)


if __name__ == "__main__":
    sys.exit(main())
