"""The layout that readers rely on: ``__all__``, and documented public names."""

from __future__ import annotations

import ast
import functools
import gc
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    path for room in ("zcactor", "simulation") for path in (ROOT / room).rglob("*.py") if "_fbs" not in path.parts
)
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]


@functools.cache
def parse(name: str) -> ast.Module:
    """The syntax tree of one module."""
    text = (ROOT / name).read_text()
    gc.disable()  # CPython 3.11 raises SystemError where a finalizer formats a traceback while a syntax tree is built
    try:
        return ast.parse(text, filename=name)
    finally:
        gc.enable()


def is_public(name: str) -> bool:
    """Whether users may rely on a name. Python itself documents methods with double underscores."""
    return not name.startswith("_")


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is an overload or a property's setter: the implementation or the getter has the docstring."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name in {"overload", "typing.overload"} or name.endswith((".setter", ".deleter")) for name in names)


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public methods of one class, without those of a suite that are tests."""
    found = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        item for item in found if is_public(item.name) and not is_overload(item) and not item.name.startswith("test_")
    ]


@functools.cache  # first asked by a test: each process of a run imports this module, and few run its tests
def contracts() -> set[str]:
    """The methods whose contract is in a Protocol of these: implementations need not repeat it."""
    found: set[str] = set()
    for name in NAMES:
        for node in ast.walk(parse(name)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                found.update(item.name for item in methods(node) if ast.get_docstring(item))
    return found


def test_each_public_module_says_what_it_exports() -> None:
    silent: list[str] = []
    for name in NAMES:
        targets = [
            ast.unparse(target)
            for node in parse(name).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        if is_public(Path(name).stem) and "__all__" not in targets:
            silent.append(name)
    assert not silent, f"no __all__: {', '.join(silent)}"


def test_public_names_are_documented() -> None:
    missing: list[str] = []
    for name in NAMES:
        tree = parse(name)
        missing += [] if ast.get_docstring(tree) or not tree.body else [f"{name}: the module itself"]
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not is_public(node.name):
                continue
            overload = not isinstance(node, ast.ClassDef) and is_overload(node)
            missing += [] if overload or ast.get_docstring(node) else [f"{name}: {node.name}"]
            if isinstance(node, ast.ClassDef):
                undocumented = [item.name for item in methods(node) if not ast.get_docstring(item)]
                missing += [f"{name}: {node.name}.{item}" for item in undocumented if item not in contracts()]
    assert not missing, f"no docstring: {', '.join(missing)}"


def test_each_room_has_a_readme_that_names_files_to_read() -> None:
    rooms = sorted(path.parent for path in (ROOT / "zcactor").glob("*/__init__.py"))
    assert [room.name for room in rooms if not (room / "README.md").is_file()] == []
    for room in rooms:
        text = (room / "README.md").read_text()
        assert text.startswith(f"# `{room.name}`\n")
        assert len(text.splitlines()) <= 20, f"{room.name}: a README has at most 20 lines"
        assert len(set(re.findall(r"`[\w/]+\.(?:py|c|h)`", text))) >= 4, (
            f"{room.name}: where to start, then three files"
        )


def test_the_wheel_takes_no_readme_of_a_room() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["include-package-data"] is False
    assert settings["package-data"] == {"*": ["*.pyi", "py.typed"]}
