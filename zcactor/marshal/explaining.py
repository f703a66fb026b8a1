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
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.errors import ZcactorError
from zcactor.exception_pickling import (
    bare,
    class_name,
    fields_of,
    hides,
    is_any,
    module_name,
    mro_of,
    namespace_of,
    shown,
    text_of,
    type_name,
)
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import is_shareable, plain_of
from zcactor.marshal.exceptions import Exceptions
from zcactor.marshal.move import Move, is_moved
from zcactor.marshal.pickling import pickler_class
from zcactor.marshal.values import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

__tracebackhide__ = hides
__all__ = ["explain", "name_result"]

_DEPTH: Final = 32
"""Steps of a path, at most: every step pickles what is below it once more."""
_LOOKS: Final = 2 * _DEPTH
"""Parts that are looked into, at most: functions that name each other have as many ways through them as they like."""
_KEY_LENGTH: Final = 50
"""Characters of a key in a path."""
_REFUSED: Final = " cannot be sent: "
_PLAIN = (TypeError, pickle.PicklingError, AttributeError, RecursionError, ValueError)
"""Types of errors that pickle raises itself."""
_LIBRARIES: Final = frozenset({"torch", "jax", "jaxlib", "pyarrow", "cupy", "numba"})
"""Libraries with arrays of their own."""
_BY_PROCESS = (
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
    threading.Barrier, threading.Thread, threading.local, contextvars.ContextVar,
)  # fmt: skip
_GLOBAL: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
"""Operations by which a function names a global: those by which cloudpickle finds what travels with it."""
_FIELDS = (GetSetDescriptorType, MemberDescriptorType)
"""Types of the descriptor of a ``__dict__``. That of `types.SimpleNamespace` has the second."""


def explain(error: BaseException, values: list[tuple[str, Any]]) -> None:
    """Say which part of some values cannot be pickled, in the place of `error` or in a note of it.

    Args:
        error: the error of pickling them.
        values: the values, with their names.

    Raises:
        Exception: an error of the type of `error` that names the part, where that is a type that pickle itself raises.
    """
    found = _explained(error, values)
    try:
        if found is not None:
            raise found from None
    finally:
        del found  # its traceback leads to this frame, and to the values


def name_result(error: BaseException, what: str) -> None:
    """Say which value it is that cannot be sent, where `explain` has raised `error` for one called ``value``.

    Args:
        error: any error of packing the value.
        what: the method that has made the value, and how.
    """
    text = text_of(error)
    if is_any(type(error), _PLAIN) and text.startswith("value") and _REFUSED in text:
        error.args = (f"{what}: {text}",)


def _explained(error: BaseException, values: list[tuple[str, Any]]) -> BaseException | None:
    if not issubclass(type(error), Exception) or issubclass(type(error), ZcactorError):
        return None
    for path, value in values:
        reason = _probe(value)
        if reason is None:
            continue
        path, value, reason, holder = _followed(_Step(path, value, reason, ""))
        if type(reason) is not type(error) or text_of(reason) != text_of(error):
            return None
        kind = "an open file" if _is_file(type(value)) else "of type"
        why = f"it is {kind} {type_name(type(value))} ({text_of(reason)})"
        told = f"{path}{_REFUSED}{why}; {_advice(value, holder)}"
        if is_any(type(error), _PLAIN):
            bare(error, None)  # it becomes the context, and its frames would keep the values
            return type(error)(told)
        notes = dict.setdefault(fields_of(error), "__notes__", [])
        if type(notes) is list:
            notes.append(told)
        return None
    return None


class _Step(NamedTuple):
    """A value on the way to the part that cannot be pickled."""

    path: str
    value: Any
    reason: BaseException
    """The error of pickling it."""
    holder: str
    """The outermost class or function on the way to it that travels by value, as messages name it; empty without
    one."""


def _followed(begin: _Step) -> _Step:
    """The innermost part that cannot be pickled, on a way from `begin` that meets no part twice.

    A class may name a function that names the class again. Both cannot be pickled then, and neither need be the reason:
    from where all ways lead back, the search goes on a step before.
    """
    way = [begin._replace(holder=_name(begin.value) if _is_code(begin.value) else "")]
    met = {id(begin.value): begin.value}
    back: _Step | None = None
    for _ in range(_LOOKS):
        at = way[-1]
        parts = list(_parts(at.value))
        others = [(step, part) for step, part in parts if id(part) not in met]
        below = _first(others) if len(way) <= _DEPTH else None
        if below is not None:
            step, value = below
            holder = at.holder or (_name(value) if _is_code(value) else "")
            reason = _probe(value)
            way.append(_Step(at.path + step, value, at.reason if reason is None else reason, holder))
            met[id(value)] = value
        elif len(others) == len(parts) or len(way) > _DEPTH:
            return at
        else:
            back = back or at
            way.pop()
            if not way:
                return back
    return back or at


def _first(parts: list[tuple[str, Any]]) -> tuple[str, Any] | None:
    """The first part that cannot be pickled, found by halves: a list may have a million elements."""
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        if _probe([part for _, part in parts[low:middle]]) is None:
            low = middle
        elif middle == low + 1:
            return parts[low]
        else:
            high = middle
    return None


def _probe(value: Any) -> BaseException | None:
    """The error of pickling `value` without the arrays in it, and without a message; None when it can be pickled."""
    pickler = _prober_class()(io.BytesIO(), protocol=5, buffer_callback=lambda _: False)
    pickler.exceptions = Exceptions(lambda _: None)  # parts that cannot be pickled are left behind
    try:
        pickler.dump(value)
    except Exception as error:
        return bare(error, None)
    return None


@functools.cache
def _prober_class() -> type[Any]:
    """Make the class of a pickler that takes arrays, handles and references for nothing."""

    class Prober(pickler_class()):  # type: ignore[misc]
        packing: Any = None

        def reducer_override(self, value: Any) -> Any:
            cls = type(value)
            if issubclass(cls, np.ndarray) and (is_shareable(plain_of(value).dtype) or is_moved(value)):
                return tuple, ([each for _, each in _parts_of_array(value)],)
            if cls is Move or cls in registered or module_name(cls).partition(".")[0] in _LIBRARIES:
                return int, ()
            return super().reducer_override(value)

    return Prober


def _is_file(cls: type) -> bool:
    return any(is_any(base, io.IOBase.__bases__) for base in mro_of(cls))


def _is_code(value: Any) -> bool:
    return type(value) is FunctionType or issubclass(type(value), type)


def _name(value: Any) -> str:
    if type(value) is FunctionType:
        return f"the function {value.__qualname__}"
    return f"the class {class_name(value)}"


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
    if _is_file(cls):
        return "open it in the process that uses it, and pass its path"
    if any(is_any(base, _BY_PROCESS) for base in mro_of(cls)):
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
        elements = list.__iter__(value) if issubclass(cls, list) else tuple.__iter__(value)
        yield from ((f"[{place}]", each) for place, each in enumerate(elements))
    elif issubclass(cls, set | frozenset):
        elements = set.__iter__(value) if issubclass(cls, set) else frozenset.__iter__(value)
        yield from ((" an element", each) for each in elements)
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
        yield from ((f" base {class_name(base)}", base) for base in vars(type)["__bases__"].__get__(value))
    elif cls is property or cls is staticmethod or cls is classmethod or cls is functools.cached_property:
        found = value.fget if cls is property else value.func if cls is functools.cached_property else value.__func__
        yield "", found
    elif issubclass(cls, np.ndarray) and (is_shareable(plain_of(value).dtype) or is_moved(value)):
        yield from _parts_of_array(value)
    elif issubclass(cls, BaseException):
        yield from ((f".{name}", each) for name, each in list(fields_of(value).items()))
    else:
        yield from _attributes(value)


def _parts_of_array(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts that travel with the bytes of an array."""
    metadata = plain_of(value).dtype.metadata
    if metadata is not None:
        yield ".dtype.metadata", dict(metadata)
    if type(value) is not np.memmap:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, without asking its class, which may have a ``__dict__`` of its own."""
    fields: Any = None
    for base in mro_of(type(value)):
        own = [
            (name, each)
            for name, each in namespace_of(base).items()
            if issubclass(type(each), _FIELDS) and each.__objclass__ is base
        ]
        for name, each in own:
            if name == "__dict__" and fields is None:
                fields = each.__get__(value)
                if issubclass(type(fields), dict):
                    yield from ((f".{key}", part) for key, part in list(dict.items(fields)))
            elif "__slots__" in namespace_of(base) and type(each) is MemberDescriptorType:
                try:
                    part = each.__get__(value)
                except AttributeError:  # a slot that was not filled
                    continue
                yield f".{name}", part


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
    """The globals that a function or a function within it reads or writes. ``co_names`` has attributes, too."""
    import dis  # for the message only

    codes = [function.__code__]
    names: dict[str, None] = {}
    for code in codes:  # grows: the codes of inner functions
        names.update((each.argval, None) for each in dis.get_instructions(code) if each.opname in _GLOBAL)
        codes += [each for each in code.co_consts if type(each) is type(code)]
    return list(names)


def _shown(key: Any) -> str:
    if type(key) is str:
        return f'"{shown(key, _KEY_LENGTH)}"'
    return repr(key) if is_any(type(key), (int, bool, float)) else "..."
