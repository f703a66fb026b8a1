"""The threads of numeric libraries in a worker, by what the actor's options say.

A worker is a fork of a process that has loaded NumPy. So the variables which bound threads have been read before the
actor's own environment is set, and the loaded libraries are told by a call. Libraries that are loaded later read the
variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["follow_cpus", "follow_environment", "loaded_libraries", "read_too_early"]


class _Library(NamedTuple):
    """A kind of library that has threads of its own."""

    file: re.Pattern[str]
    """The beginning of its file's name."""
    setters: tuple[str, ...]
    """Names of its function that sets the number of threads, of which a file has one."""
    variables: tuple[str, ...]
    """The variables that it reads while it is loaded; the first that is set counts."""


_OPENMP: Final = "OMP_NUM_THREADS"
_LIBRARIES: Final = (
    _Library(
        re.compile(r"lib(scipy_)?openblas"),
        tuple(f"{p}openblas_set_num_threads{s}" for p in ("", "scipy_") for s in ("", "64_", "_64", "64")),
        ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", _OPENMP),
    ),
    _Library(re.compile("libmkl_rt"), ("MKL_Set_Num_Threads",), ("MKL_NUM_THREADS", _OPENMP)),
    _Library(re.compile("libblis"), ("bli_thread_set_num_threads",), ("BLIS_NUM_THREADS", _OPENMP)),
)
_VARIABLES: Final = frozenset(name for library in _LIBRARIES for name in library.variables)
_TOO_EARLY: Final = re.compile(r"(PYTHON|LD_|MALLOC_|GLIBC_|NPY_|OPENBLAS_(?!NUM_THREADS$))")
"""The beginnings of names that interpreter, loader, allocator and NumPy read when a process starts."""


def follow_environment(own: Iterable[str]) -> None:
    """Have the loaded libraries follow the environment.

    Args:
        own: the names of the variables that the actor has set.
    """
    if not _VARIABLES.isdisjoint(own):
        _set_loaded()


def follow_cpus(cpus: float) -> None:
    """Have the libraries use as many threads as an actor has processors, rounded up, where the environment does not
    say how many.

    Args:
        cpus: the processors that the actor has reserved, above 0.
    """
    if not os.environ.get(_OPENMP):
        os.environ[_OPENMP] = str(math.ceil(cpus))
    _set_loaded()


def read_too_early(own: Iterable[str]) -> list[str]:
    """Those of an actor's variables that its process has read before they were set, in alphabetic order."""
    return sorted(name for name in own if _TOO_EARLY.match(name))


def _set_loaded() -> None:
    for library, path in loaded_libraries():
        found = next((value for name in library.variables if (value := os.environ.get(name))), "")
        count = re.match(r"\s*([1-9][0-9]*)", found)  # of OpenMP's "4,2", one number for each level, the first counts
        if count is None:
            continue
        with contextlib.suppress(OSError):  # it was loaded from a place that is gone
            loaded = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            setter = next((name for name in library.setters if hasattr(loaded, name)), None)
            if setter is not None:
                getattr(loaded, setter)(ctypes.c_int(int(count[1])))


@functools.cache
def loaded_libraries() -> list[tuple[_Library, str]]:
    """The libraries with threads that this process has loaded, with their paths. They are looked up once, before a
    worker is forked: its actor's modules load further ones when its environment is set."""
    text = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    paths = dict.fromkeys(re.findall(r"/.*\.so.*$", text, re.MULTILINE))
    return [(each, path) for path in paths for each in _LIBRARIES if each.file.match(os.path.basename(path))]
