"""The choice of modules that other processes can import."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.util
import json.decoder
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tests.marshal.modules import load
from zcactor.marshal.importable import by_value_if_needed, is_importable, search_here

pytestmark = pytest.mark.usefixtures("restored_imports")


def by_value(value: Any) -> bool:
    """Whether cloudpickle would take the module of `value` by value."""
    by_value_if_needed(value)
    return value.__module__ in cloudpickle.list_registry_pickle_by_value()


def test_installed_modules_are_importable() -> None:
    for module in (json.decoder, np, np.linalg, cloudpickle, pytest, enum, importlib.util):
        assert module.__file__ is not None
        assert is_importable(module.__name__, module.__file__)
    for value in (json.JSONDecoder, np.ndarray, np.linalg.norm, Path, int, len, np.recarray, by_value_if_needed):
        assert not by_value(value)


def test_module_nobody_else_finds_goes_by_value(tmp_path: Path) -> None:
    module = load("made_up_name", tmp_path / "made_up_name.py")
    assert not is_importable("made_up_name", str(tmp_path / "made_up_name.py"))
    assert by_value(module.Thing)
    assert by_value(module.work)
    assert by_value(module.work)  # a second time, from the cache


def test_module_on_the_path_goes_by_name(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    search_here(sys.path)
    assert not by_value(load("on_the_path", tmp_path / "on_the_path.py").Thing)
    (tmp_path / "package_on_path").mkdir()
    load("package_on_path", tmp_path / "package_on_path" / "__init__.py", "")
    assert not by_value(load("package_on_path.sub", tmp_path / "package_on_path" / "sub.py").Thing)
    assert not by_value(load("spaced.inner", tmp_path / "spaced" / "inner.py").Thing)  # a namespace package
    assert by_value(load("package_on_path.other", tmp_path / "other.py").Thing)
    assert by_value(load("package_on_path.sub.deeper", tmp_path / "package_on_path" / "deeper.py").Thing)


def test_another_file_of_the_same_name_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "twin.py").write_text("")
    sys.path.append(str(tmp_path / "a"))
    assert by_value(load("twin", tmp_path / "b" / "twin.py").Thing)


def test_symbolic_link_is_the_same_file(tmp_path: Path) -> None:
    load("linked", tmp_path / "real" / "linked.py")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sys.path.append(str(tmp_path / "link"))
    search_here(sys.path)
    assert is_importable("linked", str(tmp_path / "real" / "linked.py"))


def test_path_is_that_of_the_workers(tmp_path: Path) -> None:
    search_here(sys.path)
    sys.path.append(str(tmp_path))  # too late: workers have started
    assert by_value(load("too_late", tmp_path / "too_late.py").Thing)


def test_reloaded_module_is_looked_at_again(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path / "a"))
    search_here(sys.path)
    assert not by_value(load("again", tmp_path / "a" / "again.py").Thing)
    assert by_value(load("again", tmp_path / "b" / "again.py").Thing)


def test_package_that_extends_its_path(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path / "site"))
    search_here(sys.path)
    extended = load("extended", tmp_path / "site" / "extended" / "__init__.py", "")
    extended.__path__ = [str(tmp_path / "elsewhere")]
    assert not by_value(load("extended.part", tmp_path / "elsewhere" / "part.py").Thing)


class Finder(importlib.abc.MetaPathFinder):
    """A finder like those that an editable installation leaves on sys.meta_path."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The spec of the one module that it knows."""
        return importlib.util.spec_from_file_location(name, self.file) if name == "editable" else None


def test_editable_installation(tmp_path: Path) -> None:
    sys.meta_path.append(Finder(tmp_path / "editable.py"))
    assert not by_value(load("editable", tmp_path / "editable.py").Thing)


def test_odd_things_are_left_to_cloudpickle() -> None:
    class Nowhere:
        pass

    for module in ("no.such.module", "__main__", None, 5):
        Nowhere.__module__ = module  # type: ignore[assignment]
        by_value_if_needed(Nowhere)
    sys.modules["odd"] = 5  # type: ignore[assignment]
    Nowhere.__module__ = "odd"
    by_value_if_needed(Nowhere)
    sys.modules["made_here"] = ModuleType("made_here")
    Nowhere.__module__ = "made_here"
    by_value_if_needed(Nowhere)
    assert not {"odd", "made_here"} & cloudpickle.list_registry_pickle_by_value()


@pytest.mark.slow
def test_home_of_a_class_is_imported() -> None:
    program = (
        "import sys, numpy as np; from zcactor.marshal.importable import by_value_if_needed;"
        "assert 'numpy.rec' not in sys.modules; by_value_if_needed(np.recarray); assert 'numpy.rec' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
