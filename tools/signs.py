"""Count the signs by which readers lose their way in the package.

::

    python tools/signs.py [FOLDER]     # zcactor by default

No sign has a limit. A count that stays high shows where a reader's eye, and an editor's "go to definition", get lost.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["main", "signs"]

ATTRIBUTES: Final = 20
"""A class that sets more of them in its constructor is counted."""
_GENERATED: Final = "_fbs"
_KINDS: Final = frozenset({"local", "loopback", "tcp", "verbs"})


def signs(package: Path) -> dict[str, int]:
    """The counts of a package, by what is counted.

    Args:
        package: its folder.
    """
    trees = {
        _name(package, path): ast.parse(path.read_text("utf-8"))
        for path in sorted(package.rglob("*.py"))
        if _GENERATED not in path.parts
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    makers = [each for node in classes for each in node.body if _is_constructor(each)]
    return {
        "modules": len(trees),
        "modules that one sibling alone imports": _used_by_a_sibling(trees),
        "classes": len(classes),
        "Protocols": sum(any(_ends(base, "Protocol") for base in node.bases) for node in classes),
        f"classes that set more than {ATTRIBUTES} attributes": sum(_attributes(each) > ATTRIBUTES for each in makers),
        "callable parameters of constructors": sum(_callables(each) for each in makers),
        "attributes that begin as a function that does nothing": sum(_late(each) for each in makers),
        "Any outside of marshal": sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for name, tree in trees.items() if ".marshal" not in name
            for node in ast.walk(tree)
        ),
        "comparisons of a transport's kind": sum(isinstance(node, ast.Compare) and _is_of_kind(node) for node in nodes),
    }  # fmt: skip


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _ends(node: ast.expr, name: str) -> bool:
    found = node.value if isinstance(node, ast.Subscript) else node
    return ast.unparse(found).rpartition(".")[2] == name


def _is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _callables(maker: ast.stmt) -> int:
    assert isinstance(maker, ast.FunctionDef)
    given = [*maker.args.posonlyargs, *maker.args.args, *maker.args.kwonlyargs]
    return sum(each.annotation is not None and "Callable[" in ast.unparse(each.annotation) for each in given)


def _set(maker: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """The attributes that a constructor sets, with their values."""
    for node in ast.walk(maker):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if _is_own(each):
                        yield ast.unparse(each), node.value
        elif isinstance(node, ast.AnnAssign) and _is_own(node.target):
            yield ast.unparse(node.target), node.value


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _attributes(maker: ast.stmt) -> int:
    return len({name for name, _ in _set(maker)})


def _late(maker: ast.stmt) -> int:
    return sum(
        value is not None and (isinstance(value, ast.Lambda) or ast.unparse(value) in {"_nothing", "_stays"})
        for _, value in _set(maker)
    )


def _is_of_kind(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    texts = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
    return any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides) and bool(texts & _KINDS)


def _used_by_a_sibling(trees: Mapping[str, ast.Module]) -> int:
    users: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for each in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}:
                    users.setdefault(each, set()).add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    users.setdefault(alias.name, set()).add(name)
    folders = Counter(name.rpartition(".")[0] for name in trees)
    return sum(
        len(found) == 1 and next(iter(found)).rpartition(".")[0] == name.rpartition(".")[0]
        for name in trees if name not in folders
        for found in [users.get(name, set()) - {name}]
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print the counts. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    package = Path(given[0]) if given else Path(__file__).resolve().parents[1] / "zcactor"
    found = signs(package)
    if not found["modules"]:
        print(f"{package}: there is no Python file", file=sys.stderr)
        return 2
    for what, count in found.items():
        print(f"{count:6,}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
