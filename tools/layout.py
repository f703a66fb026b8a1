"""What holds of the package's structure, read off its sources; ``make lint`` runs it.

::

    python tools/layout.py [FOLDER]     # zcactor by default

No two files import each other, directly or through others. Imports within functions and those for annotations count as
well: what is only named in an annotation has to be understood all the same by those who read the file. Generated code
is left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

__all__ = ["cycles", "imports", "main"]

GENERATED = "_fbs"
"""The folder of what ``flatc`` has made."""


def imports(package: Path) -> dict[str, set[str]]:
    """The modules that each module of a package imports of it, by their dotted names.

    Args:
        package: its folder.
    """
    files = {_name(package, path): path for path in sorted(package.rglob("*.py")) if GENERATED not in path.parts}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path))):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                modules = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                named.update(module if module in files else node.module for module in modules.values())
        found[name] = {each for each in named if each in files} - {name}
    return found


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
    """Look at a package, and say what does not hold."""
    given = sys.argv[1:] if arguments is None else arguments
    package = Path(given[0]) if given else Path(__file__).resolve().parents[1] / "zcactor"
    graph = imports(package)
    if not graph:
        print(f"{package}: there is no Python file", file=sys.stderr)
        return 2
    groups = cycles(graph)
    for group in groups:
        print(f"{len(group)} files import each other:")
        for name in group:
            print(f"  {name} imports {', '.join(sorted(graph[name] & set(group)))}")
    if not groups:
        print(f"{len(graph)} files, {sum(map(len, graph.values()))} imports, no cycle")
    return 1 if groups else 0


if __name__ == "__main__":
    sys.exit(main())
