"""The layout of classes with slots that are made anew from their reduction."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cloudpickle
import pytest

from tests.marshal.wire import Wire
from zcactor.marshal.pickling import reduce_slotted

_skeleton = cloudpickle.cloudpickle._make_skeleton_class


_OF_COMPILERS = {"__static_attributes__", "__firstlineno__"}
"""Attributes that Python 3.13 gives to classes that are compiled."""


def _from_others(base: type, slots: Any) -> type:
    """A class as cloudpickle itself makes it of one with slots: they are a mere attribute."""
    made = _skeleton(type, "FromOthers", (base,), {"__module__": "__main__"}, None, None)
    made.__slots__ = slots
    return made  # type: ignore[no-any-return]


def _layout(cls: Any) -> tuple[int, bool, bool]:
    return cls.__basicsize__, bool(cls.__dictoffset__), bool(cls.__weakrefoffset__)


class _Base:
    __slots__ = ("a",)


class _Second:
    __slots__ = ("__dict__",)


class _Renamed(_Base):
    __slots__ = "__b"
    also = _Base.a  # type: ignore[attr-defined]


_Renamed.again = _Renamed._Renamed__b  # type: ignore[attr-defined]


class _Several(_Base, _Second):
    __slots__ = ("c",)


class _Tuple(tuple[int], _Second):
    __slots__ = ()


@pytest.mark.parametrize(
    "cls",
    [
        _Base, _Renamed, _Several, _Tuple, _from_others(object, "b"), _from_others(object, ("b",)),
        _from_others(tuple, ()), _from_others(_Base, ()),
    ],
)  # fmt: skip
def test_a_class_with_slots_is_made_with_the_same_layout(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cls, "__module__", "__main__")
    make, (*arguments, _, extra), state, _, _, fill = reduce_slotted(cls)
    made = make(*arguments, None, extra)
    fill(made, state)
    assert _layout(made) == _layout(cls)
    assert made.__slots__ == cls.__slots__
    assert {*vars(made)} - _OF_COMPILERS == {*vars(cls)} - {"__slotnames__"} - _OF_COMPILERS


class _Pair(NamedTuple):
    first: int


class _Colour(enum.Enum):
    __slots__ = ()
    RED = 1


def test_the_classes_of_others_makers_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reduce_slotted(_Base) is NotImplemented, "it travels by name"
    for cls in (_Pair, _Colour):
        monkeypatch.setattr(cls, "__module__", "__main__")
        assert reduce_slotted(cls) is NotImplemented


def test_a_class_with_slots_is_itself_when_it_comes_back(wire: Wire) -> None:
    class Local:
        __slots__ = "__x"

        def me(self) -> type:
            return Local

    first, second = wire.send([Local(), Local]), wire.send(Local())
    assert type(first[0]) is first[1] is type(second) is second.me() is Local
