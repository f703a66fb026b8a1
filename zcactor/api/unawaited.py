"""Uses of an object that stands for a later value as if it were that value: each raises an error that says what to
write."""

from __future__ import annotations

import sys
from abc import ABCMeta, abstractmethod
from typing import Any, NoReturn

from zcactor.exception_pickling import hides, shown_class

__tracebackhide__ = hides
__all__ = ["Unawaited", "missing", "refuse"]

_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or",
    "xor",
)  # fmt: skip
_OTHERS = (
    "len", "getitem", "setitem", "delitem", "neg", "pos", "invert", "abs", "int", "float", "complex", "index",
    "round", "trunc", "floor", "ceil", "lt", "le", "gt", "ge", "array",
)  # fmt: skip
"""``__array__`` among them, as NumPy would make an array of the object else, and no ``__iter__``, which would make it
an `Iterable`: iteration ends in ``__getitem__``."""


class Unawaited(metaclass=ABCMeta):
    """The base class of objects that stand for a later value.

    Operators, indexing, iteration, ``len()``, ``bool()``, conversions to numbers and to NumPy arrays raise
    ``TypeError``, and unknown attributes ``AttributeError``. Only the ``bool()`` of asyncio's repr of tasks is
    answered. Equality and hash are those of the object itself. Type checkers see none of these methods, and so still
    refuse such uses.
    """

    __slots__ = ()

    @abstractmethod
    def _advice(self) -> str:
        """The kind of this object, and what to write to have its value."""


def refuse(self: Unawaited, *_: object, **__: object) -> NoReturn:
    """The method of each refused use."""
    raise TypeError(self._advice())


def missing(self: Unawaited, name: str) -> NoReturn:
    """The ``__getattr__`` of objects that stand for a later value."""
    if name.startswith("_"):  # libraries probe for these, also on an object that is only half made
        raise AttributeError(f"{shown_class(type(self))!r} object has no attribute {name!r}", name=name)
    raise AttributeError(f"no attribute {name!r}: {self._advice()}", name=name)


def _bool(self: Unawaited) -> bool:
    # The repr of a task asks for the truth of its coroutine, which may be this object.
    if sys._getframe(1).f_globals.get("__name__") == "asyncio.base_tasks":
        return True
    raise TypeError(self._advice())


def _format(self: Any, spec: str) -> str:
    if spec:
        refuse(self)
    return str(self)


for _name in [*_BINARY, *(f"r{each}" for each in _BINARY), *_OTHERS]:
    setattr(Unawaited, f"__{_name}__", refuse)
setattr(Unawaited, "__getattr__", missing)  # noqa: B010  # mypy would accept all attributes else
setattr(Unawaited, "__bool__", _bool)  # noqa: B010
setattr(Unawaited, "__format__", _format)  # noqa: B010
