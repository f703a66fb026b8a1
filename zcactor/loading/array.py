"""One array, read into the store."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from zcactor.loading.form import Form, check_possible
from zcactor.loading.progress import Progress, Shown
from zcactor.marshal.arrays import innermost

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.loading.source import ArraySource
    from zcactor.objectstore.store import Store

__all__ = ["Array", "claimed_nbytes", "read_array", "read_elements"]

Array = npt.NDArray[Any]


def read_array(store: Store, source: ArraySource, form: Form, progress: Progress) -> Array:
    """Read the array of a file that holds one."""
    nbytes = claimed_nbytes(source, form)
    with Shown(source.what, nbytes, progress) as shown:
        return read_elements(store, source, form, shown.advance)


def claimed_nbytes(source: ArraySource, form: Form) -> int:
    """The size in bytes of an array of that form, which must not be more than the source has."""
    check_possible(source.what, form.shape, form.dtype)
    nbytes = prod(form.shape) * form.dtype.itemsize
    if source.left is not None and nbytes > source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, {source.left:,} were "
            "found; it is truncated or its header is wrong"
        )
    return nbytes


def read_elements(store: Store, source: ArraySource, form: Form, advance: Callable[[int], None]) -> Array:
    """Make an array in the store and read its elements."""
    array = store.empty(*form)
    try:
        with innermost(array).data as memory:
            source.fill(memory, advance)
        source.verify()
    except BaseException:
        del array  # the traceback would keep the array
        raise
    return array
