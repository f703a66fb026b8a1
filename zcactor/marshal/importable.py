"""Importability: whether another process of the program can import a module by its name.

Workers search the same path as the driver, but do not share what the driver has in ``sys.modules``: a module that
pytest loaded from a file under a made-up name, or that a script put there itself, is found by nobody else. Classes and
functions of such modules travel by value, as those of ``__main__`` do.
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
"""Modules that were looked for already, by name. Weak, as a module of that name may be replaced by another."""
_path: list[str] | None = None


def search_here(path: Sequence[str]) -> None:
    """Modules count as importable when they are found in `path`: the driver's ``sys.path`` as the workers got it.

    Without this, ``sys.path`` as it is at the time. A worker's does not change behind its back.
    """
    global _path
    _path = list(path)
    _checked.clear()


def by_value_if_needed(value: Any) -> None:
    """Have cloudpickle take the classes and functions of `value`'s module by value when others cannot import it."""
    name = getattr(value, "__module__", None)
    if not isinstance(name, str) or name == "__main__":
        return
    module = sys.modules.get(name)
    if module is None:
        if isinstance(value, type) and _locate(name) is not None:
            # A class that is at home in a module that nobody imported yet, as np.recarray is in numpy.rec: cloudpickle
            # would take it for a class made on the fly, and the receiver would get a copy of it.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        return
    known = _checked.get(name)
    if known is not None and known() is module:
        return
    try:
        _checked[name] = ref(module)
    except TypeError:  # something else was put in the module's place; cloudpickle will judge
        return
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and file.endswith(_SOURCES) and not is_importable(name, file):
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)


def is_importable(name: str, file: str) -> bool:
    """Whether importing module `name` from scratch would load `file`. Imports nothing."""
    origin = _locate(name)
    return origin is not None and (origin == file or os.path.realpath(origin) == os.path.realpath(file))


def _locate(name: str) -> str | None:
    """The file that importing `name` would load.

    Looks at the directories of the search path first, then asks the other finders there are (those of editable
    installations); each package on the way down says where its modules are.
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
            path += [each for each in getattr(package, "__path__", ()) if each not in path]  # changed by the package
    return None


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None:
        return spec
    for finder in sys.meta_path:
        if isinstance(finder, type) and finder.__module__ == "_frozen_importlib_external":
            continue  # the path itself, asked above
        find = getattr(finder, "find_spec", None)
        found = find(name, path, None) if find is not None else None
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None
