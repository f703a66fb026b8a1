"""The layout that readers may rely on: mirrored tests, ``__all__``, documented public names, modules of fair size."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zcactor"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_fbs" not in path.parts)
NAMES = [str(path.relative_to(PACKAGE)) for path in MODULES]

LINES = 700
"""Lines of a module: past that it holds more than one noun, and is to be split."""

TESTED_ELSEWHERE = {
    "mypy_plugin.py": "tests/test_typing.py runs mypy with it",
    "rpc/hub.py": "a protocol without code; tests/runtime/test_process.py has what satisfies it",
    "transport/base.py": "protocols without code; tests/conformance joins every implementation to them",
}
"""Modules without a test file of their own, with the reason."""


def parse(name: str) -> ast.Module:
    """The syntax tree of one module."""
    text = (PACKAGE / name).read_text()
    gc.disable()  # CPython 3.11 raises SystemError where a finalizer formats a traceback while a tree is being built
    try:
        return ast.parse(text, filename=name)
    finally:
        gc.enable()


def is_public(name: str) -> bool:
    """Whether users may rely on a name. Methods with double underscores are documented by Python itself."""
    return not name.startswith("_")


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is an overload, or a property's setter: the implementation, or the getter, has the docstring."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name in {"overload", "typing.overload"} or name.endswith((".setter", ".deleter")) for name in names)


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public methods of one class."""
    found = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [item for item in found if is_public(item.name) and not is_overload(item)]


def contracts() -> set[str]:
    """The methods whose contract a Protocol of the package holds: implementations need not repeat it."""
    found: set[str] = set()
    for name in NAMES:
        for node in ast.walk(parse(name)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                found.update(item.name for item in methods(node) if ast.get_docstring(item))
    return found


CONTRACTS = contracts()


@pytest.mark.parametrize("name", [name for name in NAMES if Path(name).name not in {"__init__.py", "__main__.py"}])
def test_each_module_has_its_tests(name: str) -> None:
    path = ROOT / "tests" / Path(name).parent / f"test_{Path(name).name}"
    if name in TESTED_ELSEWHERE:
        assert not path.exists(), f"{name} has {path.relative_to(ROOT)}: take it out of TESTED_ELSEWHERE"
    else:
        assert path.is_file(), f"{name} has no {path.relative_to(ROOT)}"


def test_exceptions_name_modules_that_exist() -> None:
    assert set(TESTED_ELSEWHERE) <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if is_public(Path(name).stem)])
def test_each_public_module_says_what_it_exports(name: str) -> None:
    targets = [
        ast.unparse(target)
        for node in parse(name).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    assert "__all__" in targets, f"{name} has no __all__"


@pytest.mark.parametrize("name", NAMES)
def test_no_module_is_too_long(name: str) -> None:
    count = len((PACKAGE / name).read_text().splitlines())
    assert count <= LINES, f"{name} has {count} lines, {LINES} are the limit: split it by noun"


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_documented(name: str) -> None:
    tree = parse(name)
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module itself"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name) and not is_overload(node):
            missing += [] if ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            missing += [] if ast.get_docstring(node) else [node.name]
            undocumented = [item for item in methods(node) if not ast.get_docstring(item)]
            missing += [f"{node.name}.{item.name}" for item in undocumented if item.name not in CONTRACTS]
    assert not missing, f"{name}: no docstring: {', '.join(missing)}"
