"""Handing over write access: `zc.move(x)`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from zcactor.marshal.arrays import innermost, is_shareable
from zcactor.objectstore.fields import LAYOUT_IS_KNOWN, exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "NOT_OURS",
    "OTHER_VIEWS",
    "UNUSABLE",
    "Move",
    "has_other_views",
    "is_held_elsewhere",
    "is_moved",
    "move",
    "restore",
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
    store. The hand-over happens when the method is called or the result is returned; until then `x` is untouched. From
    then on every use of the elements of `x` raises ``ValueError``. The bytes are free when the receiver has dropped
    them and the last name of `x` is gone here. A call that certainly did not run gives `x` back: it raises from the
    call itself, ends with ``maybe_executed=False``, or is cancelled before it is sent. A call with retries hands over
    copies, which are counted ("moved argument of a retried call"), because each run must find what the caller passed.
    Where an actor has ``max_restarts``, its process makes such copies of what was moved to its constructor.

    Whether other views of `x` exist is known of arrays of `zcactor.empty` and its relatives, and of received ones. An
    array that NumPy allocated has no list of its views: where more than one reference to it exists, the receiver gets a
    copy (counted as "moved array outside the store"); where a view has the only one, because the name of `x` is gone,
    it cannot be told from a name. Neither can another library's object over the memory (a tensor, an Arrow buffer, a
    memoryview). Such a view or object stays valid; where nothing was copied it sees what the receiver writes, and the
    receiver sees what is written through it.

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


_kept: Final[dict[int, tuple[ref[Array], Array]]] = {}
"""By id of a dead array: what has its memory."""


def retire(array: Array) -> None:
    """Make a moved array let go of its memory and raise ``ValueError`` from whatever is done with its elements.

    NumPy has no notion of an invalid array, so it becomes two read-only elements that refuse every operation. The
    memory goes to another array, which lives as long as the dead one. A view, a buffer and another library's object
    over the memory all hold the array itself, and nobody can tell them from the user's variable by counting: so none of
    them ever looks at freed memory, and the bytes come back with the last name of the dead array.
    """
    if LAYOUT_IS_KNOWN:
        other = np.empty(2, object)
        other[:] = _MOVED
        exchange(array, other)
        key = id(array)
        _kept[key] = ref(array, lambda _: _kept.pop(key, None)), other
    array.setflags(write=False)  # all there is in a build of CPython or NumPy of another shape


def restore(arrays: Sequence[Array]) -> None:
    """Undo `retire`: what was to carry them was never sent."""
    for array in arrays:
        kept = _kept.pop(id(array), None)
        if kept is not None:
            exchange(array, kept[1])
