"""Handing over write access: `zc.move(x)`."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from zcactor.marshal.arrays import innermost, is_shareable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NOT_OURS",
    "OTHER_VIEWS",
    "UNUSABLE",
    "Move",
    "has_other_views",
    "is_held_elsewhere",
    "is_moved",
    "move",
    "retire",
]

T = TypeVar("T")
Array = npt.NDArray[Any]

UNUSABLE: Final = "this array was handed over by zc.move; only its receiver may use it, here it is unusable"
NOT_OURS: Final = (
    "zc.move: the array is read-only here (it was shared before, or received without write access), so there is no "
    "write access to hand over; pass x.copy() or share it as it is"
)
OTHER_VIEWS: Final = (
    "zc.move: other views of this array's memory exist here; delete them first, or share the array (pass it without "
    "zc.move) or pass x.copy()"
)


class Move(Generic[T]):
    """A mark around an array that is about to be handed over; made by `move`."""

    __slots__ = ("array",)

    def __init__(self, array: T) -> None:
        self.array = array


def move(x: T) -> T:
    """Give the receiver of array `x` write access to it, and leave `x` unusable here.

    Use it around an argument or a result: ``await actor.fill(zc.move(x))``. Nothing is copied when `x` lies in the
    store. The hand-over happens when the call is sent or the result is returned; until then `x` is untouched. From then
    on every use of the elements of `x` raises ``ValueError``.

    Whether other views of `x` exist is known of NumPy's own only. Another library's object over the same memory (a
    tensor, an Arrow buffer, a memoryview) cannot be seen: it stays valid, and sees what the receiver writes.

    Args:
        x: an ndarray whose memory nobody else refers to: no other view of it exists, and it was not shared before.

    Returns:
        A mark that only zcactor understands, typed as `x` so that signatures stay exact.

    Raises:
        TypeError: `x` is not an ndarray of plain bytes.
        ValueError: it was moved before. The other reasons why it cannot be moved (it is read-only or shared, or other
            views of it exist) are raised by the call that it is passed to, which then sends nothing.
    """
    if type(x) is not np.ndarray:
        hint = "pass x.view(np.ndarray)" if isinstance(x, np.ndarray) else "pass other values as they are"
        raise TypeError(f"zc.move takes a numpy array, not {type(x).__name__}; {hint}")
    array: Array = np.asarray(x)
    if is_moved(array):
        raise ValueError("zc.move: this array was moved before; only its receiver may use it")
    if not is_shareable(array.dtype):
        raise TypeError(
            f"zc.move: dtype {array.dtype} is not plain bytes, whose memory could be handed over; pass a copy"
        )
    return Move(x)  # type: ignore[return-value]


class _Moved:
    """Element of a moved array: every use of it raises."""

    __slots__ = ()

    def _used(self, *_: object) -> NoReturn:
        raise ValueError(UNUSABLE)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _used
    __divmod__ = __rdivmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _used
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __round__ = __trunc__ = __floor__ = __ceil__ = _used
    __neg__ = __pos__ = __abs__ = __invert__ = __float__ = __int__ = __complex__ = __bool__ = __index__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __str__ = __format__ = _used  # no __len__: NumPy would take it for a sequence
    __eq__ = __ne__ = __hash__ = _used

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        # NumPy's functions look for a method of their name on elements that are objects: np.sqrt for `sqrt`.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._used

    def __repr__(self) -> str:
        return "<moved>"

    def __reduce__(self) -> NoReturn:
        self._used()


_MOVED: Final = _Moved()


def is_moved(array: Array) -> bool:
    """Whether `retire` was applied to `array`."""
    return array.dtype == object and array.shape == (2,) and array[0] is _MOVED


def _references(move: Move[Any]) -> int:
    array = move.array
    return sys.getrefcount(array)


_OWN_REFERENCES: Final = _references(Move(np.empty(0)))


def is_held_elsewhere(move: Move[Any]) -> bool:
    """Whether more than one reference to the array exists outside of `move`: one is the user's variable; any further
    one may be a second name for it, or something that looks at its memory."""
    return _references(move) > _OWN_REFERENCES + 1


def _root_references(array: Array) -> int:
    root = innermost(array)
    return sys.getrefcount(root)


_OWN_ROOT_REFERENCES: Final = _root_references(np.ndarray(1, np.uint8, np.asarray(memoryview(bytearray(1)))))


def has_other_views(array: Array) -> bool:
    """Whether other arrays hold the root of `array`, which lies in the store: they would see what a receiver writes."""
    return innermost(array) is not array and _root_references(array) > _OWN_ROOT_REFERENCES


def retire(move: Move[Any]) -> None:
    """Make the moved array let go of its memory and raise ``ValueError`` from whatever is done with its elements.

    NumPy has no notion of an invalid array, so it becomes two read-only elements that refuse every operation.
    ``ndarray.__setstate__`` replaces memory, dtype and shape of an existing array; it gives the memory back at once.
    When something else may look at that memory, the memory is kept for as long as the dead array is.
    """
    held = is_held_elsewhere(move)  # before there is a name for it here
    array = move.array
    if held:
        _exchange(array)
    else:
        array.__setstate__((1, (2,), np.dtype(object), False, [_MOVED, _MOVED]))
    array.setflags(write=False)


_kept: Final[dict[int, tuple[ref[Array], Array]]] = {}
"""By id of a dead array: what has its memory now."""
_HEAD: Final = object.__basicsize__
_FIELDS: Final = 56
"""Bytes of data, nd, dimensions, strides, base, descr and flags in ``PyArrayObject_fields`` (numpy/ndarraytypes.h)."""
_HANDLER: Final = _HEAD + _FIELDS + 16
"""Offset of ``mem_handler``, behind the weak references and the buffer's description, which stay where they are."""
_LAYOUT_IS_KNOWN: Final = (_HEAD, np.ndarray.__basicsize__) == (16, _HANDLER + 8)


def _exchange(array: Array) -> None:
    """Give the memory of `array` to another array, which lives as long as `array`.

    Nothing that NumPy offers lets an array that owns its memory part with it without freeing it, and views would read
    freed memory then. The two arrays swap the fields that say what they own; both stay whole.
    """
    if not _LAYOUT_IS_KNOWN:  # a build of CPython or NumPy of another shape: still read-only, at least
        return
    other = np.empty(2, object)
    other[:] = _MOVED
    for offset, nbytes in ((_HEAD, _FIELDS), (_HANDLER, 8)):
        ours = ctypes.string_at(id(array) + offset, nbytes)
        ctypes.memmove(id(array) + offset, id(other) + offset, nbytes)
        ctypes.memmove(id(other) + offset, ours, nbytes)
    key = id(array)
    _kept[key] = ref(array, lambda _: _kept.pop(key, None)), other
