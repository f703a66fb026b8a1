"""NumPy, imported where it is first used: ``from zcactor.lazy_numpy import np``.

NumPy takes longer to import than this package does. A head, the agent of a node and most commands never touch an array,
so they do without it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _NdArray:
        """The class of arrays where nobody has imported NumPy, so that there are none: ``isinstance`` is False for all
        values. Calling it makes an array."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return import_module("numpy").ndarray(*args, **kwargs)

    class _Generic:
        """The class of NumPy's scalars, likewise."""

    _WITHOUT: Final = {"ndarray": _NdArray, "generic": _Generic}

    class _NumPy:
        """The module NumPy. Each name is looked up there once, and is an attribute like any other from then on.

        To ask whether a value is an array, or a scalar, does not import it.
        """

        def __getattr__(self, name: str) -> Any:
            if name in _WITHOUT and "numpy" not in sys.modules:
                return _WITHOUT[name]
            value = getattr(import_module("numpy"), name)
            setattr(self, name, value)
            return value

    np = _NumPy()
