"""Check the package's structure, as its sources show it; ``make lint`` runs this program.

::

    python tools/layout.py [FOLDER]     # zcactor by default

No two files import each other, directly or through others. Imports within functions and those for annotations count as
well: readers of a file also have to understand the names in its annotations.

A room is a folder right below the package, or a module there. A room imports only rooms of floors below its own, and
two rooms of one floor do not know each other: see `FLOORS`. Within a room, too, no two folders or modules import each
other, directly or through others: a folder counts as a whole there.

Only the rooms of `ROOT_USERS` import the composition root, `ROOT`: a class that takes a process would take all of its
parts.

Generated code is left out.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from typing import Final

__all__ = ["cycles", "imports", "main", "rooted", "siblings", "upward"]

GENERATED = "_fbs"
"""The folder of code that ``flatc`` has generated."""
FLOORS: Final = (
    "testing",
    "__main__ mypy_plugin",
    "cli",
    "simulation",
    "",  # the package itself: its public names
    "cluster",
    "driver",
    "node",
    "assembly",
    "control",
    "workers",
    "execution",
    "collectives graphs",
    "objects",
    "peers",
    "shuffling topology",
    "api loading",
    "process",
    "marshal",
    "observe",
    "rpc",
    "device",
    "objectstore",
    "transport",
    "interface options",
    "native",
    "buggify later token",
    "config errors hooks ids sizes",
    "apart folders logs machine signals standard",
)
"""The rooms, from the top floor down."""
ROOT: Final = "assembly.process"
ROOT_USERS: Final = frozenset({"assembly", "driver", "node", "simulation", "testing"})


def imports(package: Path) -> dict[str, set[str]]:
    """The modules that each module of a package imports of it, by their dotted names.

    Args:
        package: its folder.
    """
    files = _files(package)
    return {
        name: {other if other in files else module for module, other in _named(tree)}.intersection(files) - {name}
        for name, tree in files.items()
    }


@functools.cache
def _named(tree: ast.Module) -> set[tuple[str, str]]:
    """The imports in a syntax tree, each as a module, and the module that it is where a module's name is imported from
    a package."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.update((node.module, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def _room(name: str) -> str:
    return f"{name}..".split(".")[1]


def upward(graph: dict[str, set[str]]) -> list[str]:
    """The imports from a room of the same floor or of one above, and modules whose room has no floor.

    Args:
        graph: the result of `imports`.
    """
    floors = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split() or [""]}
    found = [f"{name} is in no room of FLOORS" for name in sorted(graph) if _room(name) not in floors]
    return found + [
        f"{name} imports {other}, which is not on a floor below"
        for name in sorted(graph)
        for other in sorted(graph[name])
        if _room(name) != _room(other) and floors.get(_room(name), 0) >= floors.get(_room(other), len(FLOORS))
    ]


def siblings(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of folders and modules of one folder that reach each other, each in alphabetic order. Groups without a
    folder are those of `cycles`, and left out.

    Args:
        graph: the result of `imports`.
    """
    found: list[list[str]] = []
    for folder in sorted({name.rpartition(".")[0] for name in graph} - {""}):
        within: dict[str, set[str]] = {}
        for name, others in graph.items():
            child = _child(folder, name)
            if child is not None:
                within.setdefault(child, set()).update({_child(folder, other) or child for other in others} - {child})
        folders = {child for child in within if child != folder and any(name.startswith(f"{child}.") for name in graph)}
        found += [group for group in cycles(within) if folders.intersection(group)]
    return found


def _child(folder: str, name: str) -> str | None:
    """The folder or module of `folder` that a module is, or is in; `folder` for its own `__init__`, None outside."""
    if name == folder:
        return name
    return f"{folder}.{name.removeprefix(f'{folder}.').split('.')[0]}" if name.startswith(f"{folder}.") else None


def rooted(package: Path, graph: dict[str, set[str]]) -> list[str]:
    """The imports of the composition root by rooms that may not know it.

    Args:
        package: the package's folder.
        graph: the result of `imports`.
    """
    root = f"{package.name}.{ROOT}"
    if root not in graph:
        return [f"the composition root {root} is not there"]
    users = sorted(name for name in graph if root in graph[name] and _room(name) not in ROOT_USERS)
    return [f"{name} imports {root}, which is for {', '.join(sorted(ROOT_USERS))}" for name in users]


def _files(package: Path) -> dict[str, ast.Module]:
    paths = [path for path in sorted(package.rglob("*.py")) if GENERATED not in path.parts]
    return {_name(package, path): _tree(path.read_text("utf-8")) for path in paths}


@functools.cache
def _tree(text: str) -> ast.Module:
    """The syntax tree of a text: each check looks at all files, and copies of a package share most of theirs."""
    return ast.parse(text)


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other, each in alphabetic order (Tarjan, "Depth-First Search and Linear
    Graph Algorithms", SIAM Journal on Computing 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Check a package and print the violations. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    package = Path(given[0]) if given else Path(__file__).resolve().parents[1] / "zcactor"
    graph = imports(package)
    if not graph:
        print(f"{package}: there is no Python file", file=sys.stderr)
        return 2
    told: list[str] = []
    for group in cycles(graph):
        told.append(f"{len(group)} files import each other:")
        told += (f"  {name} imports {', '.join(sorted(graph[name] & set(group)))}" for name in group)
    told += (f"{' and '.join(group)} import each other" for group in siblings(graph))
    told += upward(graph) + rooted(package, graph)
    print("\n".join(told) or f"{len(graph)} files, {sum(map(len, graph.values()))} imports: all rules hold")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
