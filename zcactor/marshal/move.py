"""Handing over write access: `zc.move(x)`."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Move", "is_moved", "move", "retire"]

T = TypeVar("T")


class Move(Generic[T]):
    """A mark around an array that is about to be handed over; made by `move`."""

    __slots__ = ("array",)

    def __init__(self, array: T) -> None:
        self.array = array


def move(x: T) -> T:
    """Give the receiver of array `x` write access to it, and leave `x` unusable here.

    Use it around an argument or a result: ``await actor.fill(zc.move(x))``. Nothing is copied when `x` lies in the
    store. The hand-over happens when the call is sent or the result is returned; until then `x` is untouched.

    Args:
        x: an ndarray whose memory nobody else refers to: no other view of it exists, and it was not shared before.

    Returns:
        A mark that only zcactor understands, typed as `x` so that signatures stay exact.

    Raises:
        TypeError: `x` is not an ndarray of plain bytes.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"zc.move takes a numpy array, not {type(x).__name__}; pass other values as they are")
    if is_moved(x):
        raise ValueError("zc.move: this array was moved before; only its receiver may use it")
    if x.dtype.hasobject:
        raise TypeError(f"zc.move: dtype {x.dtype} holds Python objects, whose memory cannot be handed over; pass a copy")
    return Move(x)  # type: ignore[return-value]


class _Moved:
    """Element of a moved array: every use of it raises."""

    __slots__ = ()

    def _used(self, *_: object) -> NoReturn:
        raise ValueError("this array was handed over by zc.move; only its receiver may use it, here it is unusable")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _used
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = _used
    __neg__ = __pos__ = __abs__ = __invert__ = __float__ = __int__ = __complex__ = __bool__ = __index__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = __getitem__ = _used
    __eq__ = __ne__ = _used  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<moved>"

    def __reduce__(self) -> NoReturn:
        self._used()


_MOVED = _Moved()


def is_moved(array: npt.NDArray[Any]) -> bool:
    """Whether `retire` was applied to `array`."""
    return array.dtype == object and array.shape == (2,) and array[0] is _MOVED


def retire(array: npt.NDArray[Any]) -> None:
    """Make `array` let go of its memory and raise ``ValueError`` from whatever is done with its elements.

    NumPy has no notion of an invalid array. ``ndarray.__setstate__`` replaces memory, dtype and shape of an existing
    object, so the array becomes two read-only elements that refuse every operation.
    """
    array.setflags(write=True) if array.flags.owndata else None
    array.__setstate__((1, (2,), np.dtype(object), False, [_MOVED, _MOVED]))
    array.setflags(write=False)
