"""Exceptions of any class, looked at, taken apart and put together without a line of code of their classes.

A class of the user's may refuse attributes, answer for every name, or raise where it is asked. All that is needed of an
exception is therefore taken by the descriptors of `BaseException` and ``type``, which lie below such a class.
"""

from __future__ import annotations

import copyreg
from opcode import opmap
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

__all__ = [
    "bare",
    "cause_of",
    "class_name",
    "context_of",
    "exceptions_of",
    "fields_of",
    "fill",
    "has_own_reduction",
    "hides",
    "is_any",
    "made_of",
    "make",
    "module_name",
    "module_of",
    "mro_of",
    "namespace_of",
    "put_together",
    "shown",
    "shown_class",
    "suppresses_context",
    "take_apart",
    "text_of",
    "traceback_of",
    "type_name",
]

_ERROR: Any = vars(BaseException)
_GROUP: Any = vars(BaseExceptionGroup)
_TYPE: Any = vars(type)
fields_of = _ERROR["__dict__"].__get__
"""The ``__dict__`` of an exception."""
traceback_of = _ERROR["__traceback__"].__get__
cause_of = _ERROR["__cause__"].__get__
context_of = _ERROR["__context__"].__get__
suppresses_context = _ERROR["__suppress_context__"].__get__
exceptions_of = _GROUP["exceptions"].__get__
"""The exceptions of a group."""
_args_of, _set_args = _ERROR["args"].__get__, _ERROR["args"].__set__
mro_of, namespace_of, _flags = _TYPE["__mro__"].__get__, _TYPE["__dict__"].__get__, _TYPE["__flags__"].__get__
_name, _qualname, module_of = (_TYPE[each].__get__ for each in ("__name__", "__qualname__", "__module__"))
bare = BaseException.with_traceback
"""``bare(error, None)`` drops the traceback, whose frames keep objects alive, and returns the exception."""

_HEAP_TYPE: Final = 1 << 9
"""Bit of ``type.__flags__`` that marks a class made at run time, unlike Python's own."""
_REDUCTIONS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_NOT_CARRIED = frozenset({"args", "obj", "characters_written", "__dict__", "__weakref__"})
"""Fields that are set in another way, refer to the object that lacked an attribute, or exist in some instances only."""
_FIELDS = (MemberDescriptorType, GetSetDescriptorType)
_ROOTS = (BaseException, Exception, BaseExceptionGroup, object)


SHOWN_LENGTH: Final = 80
"""Characters of a name that messages show, at most."""


def shown(name: str, length: int = SHOWN_LENGTH) -> str:
    """`name` as messages, prefixes and process titles show it: unprintable characters are escaped, and at most `length`
    characters stay. A class may have any name, and terminals and logs obey control characters."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= length else f"{text[: length - 3]}..."


def shown_class(cls: type) -> str:
    """The name of a class as messages show it; see `shown`."""
    return shown(str.__str__(_name(cls)))


def class_name(cls: type) -> str:
    """The qualified name of a class within its module."""
    return str.__str__(_qualname(cls))


def hides(caught: Any) -> bool:
    """Whether an exception was raised by a ``raise`` and not by a failing operation, so that only its text matters and
    not the frames that lead to it. As ``__tracebackhide__`` of a module this hides the module's frames in pytest.

    Args:
        caught: the exception, or pytest's information about one, which is None before it has it.
    """
    if caught is None:
        return False
    error = caught if issubclass(type(caught), BaseException) else caught.value
    trace = traceback_of(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or issubclass(type(error), AssertionError):
        return False
    last: int = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return last == opmap["RAISE_VARARGS"]


def module_name(cls: type) -> str:
    """The name of a class's module; empty where the class has another object there."""
    module = module_of(cls)
    return module if type(module) is str else ""


def type_name(cls: type) -> str:
    """The qualified name of a class, with its module unless that is ``builtins``."""
    module, name = module_name(cls), class_name(cls)
    return name if module in ("", "builtins") else f"{module}.{name}"


def text_of(error: BaseException) -> str:
    """``str()`` of an exception, or what that raised, without lone surrogates, which UTF-8 cannot encode."""
    try:
        text = str.__str__(str(error))
    except BaseException as broken:  # a foreign __str__ may raise anything, and the report must not
        return f"<str() of the exception raised {type_name(type(broken))}>"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def is_any(cls: type, others: tuple[type, ...]) -> bool:
    """Whether a class is one of some others. An ``in`` would ask its metaclass, which may raise."""
    return any(cls is other for other in others)


def _own_bases(cls: type) -> list[type]:
    """The base classes of `cls` that are Python's own exceptions, nearest first."""
    return [base for base in mro_of(cls) if not _flags(base) & _HEAP_TYPE and issubclass(base, BaseException)]


def has_own_reduction(cls: type) -> bool:
    """Whether an exception's class defines how it is pickled."""
    return any(known is cls for known in copyreg.dispatch_table) or any(
        name in namespace_of(base) for base in mro_of(cls) if _flags(base) & _HEAP_TYPE for name in _REDUCTIONS
    )


def _native_fields(cls: type) -> dict[str, Any]:
    """The descriptors of fields outside ``__dict__``, by name: Python's own, such as ``errno``, ``reason`` and
    ``lineno``, and those of ``__slots__``."""
    found: dict[str, Any] = {}
    for base in mro_of(cls):
        if is_any(base, _ROOTS):  # `make` gives a group its message and exceptions
            continue
        kinds = (MemberDescriptorType,) if _flags(base) & _HEAP_TYPE else _FIELDS
        for name, field in namespace_of(base).items():
            if issubclass(type(field), kinds) and name not in _NOT_CARRIED:
                found.setdefault(name, field)
    return found


def take_apart(error: BaseException) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """Take an exception apart into its class, the arguments that it cannot be made without, and its state."""
    cls = type(error)
    native: dict[str, Any] = {}
    for name, field in _native_fields(cls).items():
        try:
            value = field.__get__(error)
        except AttributeError:  # a slot that was not filled
            continue
        if value is not None:
            native[name] = value
    args = _args_of(error)
    state: dict[str, Any] = {"args": args, "native": native, "fields": dict(fields_of(error))}
    linked = {"cause": cause_of(error), "context": context_of(error)}
    state.update((name, each) for name, each in linked.items() if each is not None)
    if suppresses_context(error):
        state["alone"] = True
    return cls, made_of(error), state


def made_of(error: BaseException) -> tuple[Any, ...]:
    """The arguments of ``__new__``: a group has to have them, and keeps its exceptions in no other field."""
    if issubclass(type(error), BaseExceptionGroup):
        return _GROUP["message"].__get__(error), list(exceptions_of(error))
    return ()


def make(cls: Any, parts: tuple[Any, ...] = ()) -> BaseException:
    """Make an exception whose state is filled in by `fill`. Neither ``__init__`` nor a ``__new__`` of its class runs.

    Raises:
        TypeError: `cls` is no exception's class, or none of Python's own constructors accepts it.
    """
    for base in _own_bases(cls):
        try:
            return base.__new__(cls, *parts)  # type: ignore[no-any-return]
        except TypeError:  # another base decides the layout
            continue
    raise TypeError(f"{cls!r} cannot be built from its parts")


def fill(error: BaseException, state: dict[str, Any]) -> BaseException:
    """Give an exception the state that `take_apart` found."""
    _set_args(error, state["args"])
    fields = _native_fields(type(error))
    for name, value in state["native"].items():
        try:
            fields[name].__set__(error, value)
        except (AttributeError, TypeError, KeyError):  # read-only, and then given by the constructor; or not here
            continue
    fields_of(error).update(state["fields"])
    if "context" in state:
        _ERROR["__context__"].__set__(error, state["context"])
    if "cause" in state:
        _ERROR["__cause__"].__set__(error, state["cause"])
    _ERROR["__suppress_context__"].__set__(error, "alone" in state)
    return error


def put_together(cls: Any, parts: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild an exception from the result of `take_apart`. Raises as `make`."""
    return fill(make(cls, parts), state)
