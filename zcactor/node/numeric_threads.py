"""The threads of numeric libraries in a worker, by what the actor's options say.

A worker is a fork of a process that has loaded NumPy. So the variables which bound threads have been read before the
actor's own environment is set, and the loaded libraries are told by a call. Libraries that are loaded later read the
variables.
"""

from __future__ import annotations

import functools
import math
import os
import re
from typing import TYPE_CHECKING, Final

from threadpoolctl import ThreadpoolController

from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from threadpoolctl import LibController

__all__ = ["follow_cpus", "follow_environment", "loaded_libraries", "read_too_early"]

_OPENMP: Final = "OMP_NUM_THREADS"
_LIBRARIES: Final = {
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", _OPENMP),
    "mkl": ("MKL_NUM_THREADS", _OPENMP),
    "blis": ("BLIS_NUM_THREADS", _OPENMP),
}
"""The variables that libraries with threads of their own read while they are loaded, by threadpoolctl's names for the
libraries; the first that is set counts. Runtimes of OpenMP keep a number for each thread, so they are not told."""
_VARIABLES: Final = frozenset(name for names in _LIBRARIES.values() for name in names)
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
    for library in loaded_libraries():
        names = _LIBRARIES.get(library.internal_api, ())
        found = next((value for name in names if (value := os.environ.get(name))), "")
        count = re.match(r"\s*([1-9][0-9]*)", found)  # of OpenMP's "4,2", one number for each level, the first counts
        if count is not None:
            library.set_num_threads(int(count[1]))


@functools.cache
def loaded_libraries() -> list[LibController]:
    """The libraries with threads that this process has loaded. They are looked up once, before a worker is forked: its
    actor's modules load further ones when its environment is set."""
    try:
        found: list[LibController] = ThreadpoolController().lib_controllers
    except (OSError, UnicodeError) as error:  # of a library in a folder whose name is no text
        logger.info("threads of numeric libraries do not follow num_cpus: %s", error)
        return []
    return found
