"""Exceptions in parts that can be pickled, with any signature of their constructors."""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = ["native_state", "put_together", "take_apart"]

_HEAP_TYPE = 1 << 9
"""Bit of ``type.__flags__`` that marks a class made at run time, unlike Python's own."""
_REDUCTIONS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_NOT_CARRIED = frozenset({"args", "obj", "characters_written"})
"""Fields that are set in another way, refer to the object that lacked an attribute, or exist in some instances only."""


def _own_bases(cls: type) -> list[type]:
    """The base classes of `cls` that are Python's own exceptions, nearest first."""
    return [base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE and issubclass(base, BaseException)]


def native_state(error: BaseException) -> dict[str, Any]:
    """The fields that Python's own exceptions keep outside ``__dict__``, such as ``errno``, ``reason`` and
    ``lineno``."""
    return {
        name: value
        for base in _own_bases(type(error))
        if base not in (BaseException, Exception)
        for name, field in vars(base).items()
        if isinstance(field, MemberDescriptorType | GetSetDescriptorType) and name not in _NOT_CARRIED
        if (value := getattr(error, name, None)) is not None
    }


def take_apart(error: BaseException) -> Any:
    """Take `error` apart into a form that can be pickled, with any signature of its constructor.

    Returns:
        Its class, arguments and state; or `error` itself when its class defines how it is pickled.
    """
    cls = type(error)
    if any(name in vars(base) for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE for name in _REDUCTIONS):
        return error
    return cls, error.args, native_state(error), error.__dict__


def put_together(parts: Any) -> BaseException:
    """Rebuild an exception from the result of `take_apart`. Neither ``__init__`` nor a ``__new__`` of its class runs.

    Raises:
        TypeError: `parts` has another form, or none of Python's own constructors accepts the class.
    """
    if isinstance(parts, BaseException):
        return parts
    cls, args, native, state = parts
    for base in _own_bases(cls):
        try:
            error: BaseException = base.__new__(cls, *args)
        except TypeError:  # another base decides the layout
            continue
        BaseException.__setattr__(error, "args", args)
        for name, value in native.items():
            try:
                BaseException.__setattr__(error, name, value)  # its own __setattr__ may refuse
            except (AttributeError, TypeError):  # read-only, and then given by args; or not set
                continue
        error.__dict__.update(state)
        return error
    raise TypeError(f"{cls!r} cannot be built from its parts")
