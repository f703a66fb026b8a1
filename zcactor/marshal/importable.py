"""Importability: whether another process of the program can import a module by its name.

Workers search the same path as the driver, but do not share the driver's ``sys.modules``: they cannot find a module
that pytest loaded from a file under a made-up name, or that a script entered itself. Classes and functions of such
modules travel by value, like those of ``__main__``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["by_value_if_needed", "is_importable", "search_here"]

_SOURCES: Final = (*importlib.machinery.SOURCE_SUFFIXES, *importlib.machinery.BYTECODE_SUFFIXES)
_checked: Final[dict[str, ref[Any]]] = {}
"""Modules that were looked up already, by name. Weak references, because another module of that name may replace
one."""
_path: list[str] | None = None


def search_here(path: Sequence[str]) -> None:
    """Set the search path on which a module must be found to count as importable: the driver's ``sys.path`` as the
    workers got it.

    By default this is the current ``sys.path``. Nobody else changes the ``sys.path`` of a worker.
    """
    global _path
    _path = list(path)
    _checked.clear()


def by_value_if_needed(value: Any) -> None:
    """Make cloudpickle take the classes and functions of `value`'s module by value where others cannot import the
    module."""
    name = getattr(value, "__module__", None)
    if not isinstance(name, str) or name == "__main__":
        return
    module = sys.modules.get(name)
    if module is None:
        if isinstance(value, type) and _locate(name) is not None:
            # The class belongs to a module that nobody has imported yet, as np.recarray belongs to numpy.rec:
            # cloudpickle would treat it as a class made at run time, and the receiver would get a copy of it.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        return
    known = _checked.get(name)
    if known is not None and known() is module:
        return
    try:
        _checked[name] = ref(module)
    except TypeError:  # another object has the module's place in sys.modules; cloudpickle decides
        return
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and file.endswith(_SOURCES) and not is_importable(name, file):
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)


def is_importable(name: str, file: str) -> bool:
    """Whether importing module `name` anew would load `file`. Nothing is imported."""
    origin = _locate(name)
    return origin is not None and (origin == file or os.path.realpath(origin) == os.path.realpath(file))


def _locate(name: str) -> str | None:
    """Return the file that importing `name` would load, or None.

    The search takes the directories of the path first, then the other finders (those of editable installations). Each
    package on the way down names the directories of its modules.
    """
    path: list[str] | None = _path
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path)
        if spec is None:
            return None
        if depth == len(parts):
            return spec.origin
        if spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
        package = sys.modules.get(spec.name)
        if package is not None and spec.origin is not None and getattr(package, "__file__", None) == spec.origin:
            path += [each for each in getattr(package, "__path__", ()) if each not in path]  # changed by it
    return None


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None:
        return spec
    for finder in sys.meta_path:
        if isinstance(finder, type) and finder.__module__ == "_frozen_importlib_external":
            continue  # the finder of the path itself, which was asked above
        find = getattr(finder, "find_spec", None)
        found = find(name, path, None) if find is not None else None
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None
