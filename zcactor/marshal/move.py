"""Transfer of write access: `zc.move(x)`."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar
from weakref import ref

from zcactor.exception_pickling import shown_class
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import innermost, is_shareable, plain_of
from zcactor.marshal.on_gpu import is_on_gpu
from zcactor.objectstore.fields import exchange, layout_is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

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
    """A mark around an array that is about to be handed over; `move` makes it."""

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
    copies, which are counted ("moved argument of a retried call"), because each run must find the arrays that the
    caller passed. Where an actor has ``max_restarts``, its process makes such copies of arrays that were moved to its
    constructor.

    Where anything else holds `x` (a second name, a memoryview, a tensor), the receiver gets a copy, which is counted:
    "piece of an open array", or "moved array outside the store" of one that does not lie there. Views of an array of
    `zcactor.empty` and its relatives, and of a received array, are found, and the move is refused; views of an array
    that NumPy allocated hold it like a second name. A view that holds the only reference, because the name of `x` is
    gone, cannot be distinguished from a name, and neither can a memoryview: it stays valid, shows the receiver's
    writes, and the receiver sees writes through it.

    An array on a GPU is handed over, too, by a copy on the GPU that the receiver makes and counts ("moved array on a
    GPU"), as peers map memory of GPUs without write access. A `DeviceArray` is unusable here then; an array of another
    library shows nothing of that, and must not be written to until the receiver has it.

    Args:
        x: an ndarray of plain bytes, or an array on a GPU, that has no other view and was not shared before.

    Returns:
        A mark that only zcactor understands, typed as `x` so that signatures stay exact.

    Raises:
        TypeError: `x` is no such array.
        ValueError: `x` was moved before. The call that `x` is passed to raises it for the other causes (`x` is
            read-only or shared, or has other views), and then sends nothing.
    """
    if is_on_gpu(x):
        return Move(x)  # type: ignore[return-value]
    if type(x) is not np.ndarray:
        hint = "pass x.view(np.ndarray)" if isinstance(x, np.ndarray) else "pass other values as they are"
        raise TypeError(f"zc.move takes a numpy array, not {shown_class(type(x))}; {hint}")
    array: Array = np.asarray(x)
    if is_moved(array):
        raise ValueError("zc.move: this array was moved before; only its receiver may use it")
    if not is_shareable(array.dtype):
        raise TypeError(
            f"zc.move: dtype {array.dtype} is not plain bytes, whose memory could be handed over; pass a copy"
        )
    return Move(x)  # type: ignore[return-value]


class _Moved:
    """The element of a moved array: every use of it raises ``ValueError``."""

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
        # NumPy's functions look for a method of their own name on elements that are objects: np.sqrt calls `sqrt`.
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
    plain = plain_of(array)
    return plain.dtype == object and plain.shape == (2,) and plain[0] is _MOVED


def _references(move: Move[Any]) -> int:
    array = move.array
    return sys.getrefcount(array)


@cache
def _own_references() -> int:
    return _references(Move(np.empty(0)))


def is_held_elsewhere(move: Move[Any]) -> bool:
    """Whether more than one reference to the array exists outside of `move`. The user's variable is one; any further
    reference may be a second name for the array, or an object that looks at its memory."""
    return _references(move) > _own_references() + 1


def _root_references(array: Array) -> int:
    root = innermost(array)
    return sys.getrefcount(root)


@cache
def _own_root_references() -> int:
    return _root_references(np.ndarray(1, np.uint8, np.asarray(memoryview(bytearray(1)))))


def has_other_views(array: Array) -> bool:
    """Whether other arrays hold the root of `array`, which lies in the store: they would see the receiver's writes."""
    return innermost(array) is not array and _root_references(array) > _own_root_references()


_kept: Final[dict[int, tuple[ref[Array], Array]]] = {}
"""The array that holds a dead array's memory, by the id of the dead array."""


def retire(array: Any) -> None:
    """Make a moved array release its memory, and raise ``ValueError`` from every use of its elements.

    NumPy has no notion of an invalid array, so it becomes two read-only elements that refuse every operation. The
    memory goes to another array, which lives as long as the dead one. A view, a buffer and another library's object
    over the memory all hold the array itself, and counting references cannot distinguish them from the user's variable.
    So they never look at freed memory, and the bytes are freed with the last reference to the dead array.
    """
    if not isinstance(array, np.ndarray):
        if hasattr(array, "hand_over"):  # an array on a GPU that is no other library's
            array.hand_over()
        return
    if layout_is_known():
        other = np.empty(2, object)
        other[:] = _MOVED
        exchange(array, other)
        key = id(array)
        _kept[key] = ref(array, lambda _: _kept.pop(key, None)), other
    array.setflags(write=False)  # the only measure in a build of CPython or NumPy whose layout is unknown


def restore(arrays: Sequence[Any]) -> None:
    """Undo `retire`: the message that was to carry the arrays was never sent."""
    for array in arrays:
        if hasattr(array, "take_back"):
            array.take_back()
        kept = _kept.pop(id(array), None)
        if kept is not None:
            exchange(array, kept[1])
