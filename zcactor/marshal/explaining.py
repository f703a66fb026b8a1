"""The part of a value that cannot be pickled, by its path, with what to do about it."""

from __future__ import annotations

import contextvars
import functools
import io
import pickle
import threading
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
)
from typing import TYPE_CHECKING, Any, Final

from zcactor.apart import bare, fields_of, namespace_of, text_of, type_name
from zcactor.errors import ZcactorError
from zcactor.interface import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["explained"]

_DEPTH: Final = 32
"""Steps of a path, at most: every step pickles what is below it once more."""
_KEY_LENGTH: Final = 50
"""Characters of a key in a path."""
_PLAIN = (TypeError, pickle.PicklingError, AttributeError, RecursionError, ValueError)
"""Types of errors that pickle raises itself."""
_BY_PROCESS = (
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    threading.Barrier, threading.Thread, threading.local, contextvars.ContextVar, io.IOBase,
)  # fmt: skip


def explained(
    error: BaseException, values: list[tuple[str, Any]], probe: Callable[[Any], BaseException | None]
) -> BaseException | None:
    """Say which part of some values cannot be pickled.

    Args:
        error: the error of pickling them.
        values: the values, with their names.
        probe: ``probe(value)`` returns the error of pickling a value without its arrays; None when there is none.

    Returns:
        An error of the type of `error` that names the part; None where none of the values causes it, or where it is of
        a type of the user's: a note of it names the part then.
    """
    if not issubclass(type(error), Exception) or issubclass(type(error), ZcactorError):
        return None
    for path, value in values:
        reason = probe(value)
        if reason is None:
            continue
        holder = _name(value) if _is_code(value) else ""
        for _ in range(_DEPTH):
            below = next(((step, part) for step, part in _parts(value) if probe(part) is not None), None)
            if below is None:
                break
            step, value = below
            reason = probe(value) or reason
            path += step
            holder = holder or (_name(value) if _is_code(value) else "")
        if type(reason) is not type(error) or text_of(reason) != text_of(error):
            return None
        why = f"it is of type {type_name(type(value))} ({text_of(reason)})"
        told = f"{path} cannot be sent: {why}; {_advice(value, holder)}"
        if type(error) in _PLAIN:
            bare(error, None)  # it becomes the context, and its frames would keep the values
            return type(error)(told)
        BaseException.add_note(error, told)
        return None
    return None


def _is_code(value: Any) -> bool:
    return type(value) is FunctionType or issubclass(type(value), type)


def _name(value: Any) -> str:
    return f"the {'class' if issubclass(type(value), type) else 'function'} {value.__qualname__}"


def _advice(value: Any, holder: str) -> str:
    """The next step for a value that cannot be pickled; `holder` names the class or function that it belongs to."""
    cls = type(value)
    if cls is GeneratorType or cls is AsyncGeneratorType:
        return "pass a list of its items, or yield them from a generator method"
    if cls is CoroutineType:
        return "await it, and pass its result"
    if holder:
        return (
            f"{holder} travels by value, with all that it names, because others cannot import it: put it into a module"
        )
    if issubclass(cls, _BY_PROCESS):
        return "it belongs to this process: make one in the process that uses it"
    return "pass the data that it consists of, or let its class say how it is pickled, by __reduce__"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, with their steps in a path."""
    cls = type(value)
    if issubclass(cls, dict):
        for key, each in list(dict.items(value)):
            yield " a key", key
            yield f"[{_shown(key)}]", each
    elif issubclass(cls, list | tuple):
        yield from ((f"[{place}]", each) for place, each in enumerate(list(value)))
    elif issubclass(cls, set | frozenset):
        yield from ((" an element", each) for each in list(value))
    elif cls is FunctionType:
        yield from _parts_of_function(value)
    elif cls is MethodType:
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif cls is CellType:
        yield "", value.cell_contents
    elif cls is functools.partial:
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif issubclass(cls, type):
        for name, each in list(namespace_of(value).items()):
            if name not in ("__dict__", "__weakref__") and type(each) is not MemberDescriptorType:
                yield f".{name}", each
        yield from ((f" base {base.__qualname__}", base) for base in value.__bases__)
    elif cls is property or cls is staticmethod or cls is classmethod or cls is functools.cached_property:
        found = value.fget if cls is property else value.func if cls is functools.cached_property else value.__func__
        yield "", found
    elif issubclass(cls, BaseException):
        yield from ((f".{name}", each) for name, each in list(fields_of(value).items()))
    elif hasattr(cls, "__dict__") and "__dict__" in dir(cls):
        yield from ((f".{name}", each) for name, each in list(object.__getattribute__(value, "__dict__").items()))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" name {name!r}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in _globals_of(function):
        if name in function.__globals__:
            yield f" global {name!r}", function.__globals__[name]
    yield " defaults", function.__defaults__
    yield " defaults", function.__kwdefaults__
    yield from ((f".{name}", each) for name, each in list(function.__dict__.items()))


def _globals_of(function: FunctionType) -> list[str]:
    codes = [function.__code__]
    names: list[str] = []
    for code in codes:  # grows: the codes of inner functions
        names += code.co_names
        codes += [each for each in code.co_consts if type(each) is type(code)]
    return names


def _shown(key: Any) -> str:
    if type(key) is str:
        return f'"{shown(key, _KEY_LENGTH)}"'
    return repr(key) if type(key) in (int, bool, float) else "..."
