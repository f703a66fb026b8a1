"""Classes with ``__slots__`` that travel by value, with the layout that they have here.

cloudpickle 3.1.3 makes such a class without slots and sets ``__slots__`` afterwards, as an attribute like others.
Python's own pickling then gives the objects a state that they cannot take.
"""

from __future__ import annotations

import functools
from enum import Enum
from operator import is_
from types import FunctionType, MemberDescriptorType, resolve_bases
from typing import TYPE_CHECKING, Any

from zcactor.apart import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["reduce_slotted"]

_TYPE: Any = vars(type)
_base_of, _bases_of = _TYPE["__base__"].__get__, _TYPE["__bases__"].__get__
_item_nbytes = _TYPE["__itemsize__"].__get__
_OFFSETS: Any = {"__dict__": _TYPE["__dictoffset__"].__get__, "__weakref__": _TYPE["__weakrefoffset__"].__get__}


def reduce_slotted(cls: type) -> Any:
    """The reduction of a class that names its ``__slots__`` and travels by value, by functions that cloudpickle has at
    each receiver; NotImplemented for all others."""
    namespace = namespace_of(cls)
    if "__slots__" not in namespace or issubclass(cls, Enum):  # cloudpickle makes an enumeration in a way of its own
        return NotImplemented
    from cloudpickle import cloudpickle

    if cloudpickle._should_pickle_by_reference(cls):
        return NotImplemented
    constructor, name, bases, keywords, *rest = cloudpickle._class_getnewargs(cls)
    real, resolved = _bases_of(cls), resolve_bases(bases)
    if len(resolved) != len(real) or not all(map(is_, resolved, real)):  # `typing.NamedTuple` gives a class its slots
        return NotImplemented
    slots = _own_slots(cls)
    if slots is not None:
        keywords["__slots__"] = slots
    state, fields = _class_state()(cls)
    declared = namespace["__slots__"]
    if issubclass(type(declared), str | tuple | list | dict):  # an iterator is empty by now
        state["__slots__"] = declared
    arguments = (constructor, name, bases, keywords, *rest)
    return cloudpickle._make_skeleton_class, arguments, (state, fields), None, None, cloudpickle._class_setstate


def _members(cls: type) -> list[str]:
    """The names of a class's own slots, as the attributes are called. A second name of a slot does not count."""
    return [
        name
        for name, each in namespace_of(cls).items()
        if type(each) is MemberDescriptorType and each.__objclass__ is cls and each.__name__ == name
    ]


def _own_slots(cls: type) -> tuple[str, ...] | None:
    """The ``__slots__`` that give a class the layout of `cls`; None where only a class without any has that layout, as
    one that cloudpickle made."""
    given = [
        name for name, offset in _OFFSETS.items() if offset(cls) and not any(offset(base) for base in _bases_of(cls))
    ]
    slots = (*_members(cls), *given)
    return None if slots and _item_nbytes(_base_of(cls)) else slots


@functools.cache
def _class_state() -> Callable[[type], tuple[dict[str, Any], dict[str, Any]]]:
    """cloudpickle's function for the state of a class, without slots. The original takes the names as they are
    written, and fails where a private name is written alone."""
    from cloudpickle import cloudpickle

    extract = cloudpickle._extract_class_dict

    def without_slots(cls: type) -> dict[str, Any]:
        left_out = {"__slots__", "__slotnames__", *_members(cls)}  # `copyreg` finds the second anew
        return {name: each for name, each in extract(cls).items() if name not in left_out}

    original = cloudpickle._class_getstate
    return FunctionType(original.__code__, {**vars(cloudpickle), "_extract_class_dict": without_slots})
