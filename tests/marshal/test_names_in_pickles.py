"""The names of the package's own that pickles carry to other versions. A name that goes takes part in the protocol: it
stays importable as long as versions that send it are served, see `zcactor.transport.version`."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.execution.failure import Failure
from zcactor.marshal import Marshaller, pickling
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCount, CopyCounter
from zcactor.objectstore.store import Store


class Strange(ValueError):
    """An exception with a constructor of its own."""

    def __init__(self, number: int, *, more: str) -> None:
        super().__init__(f"{number} {more}")
        self.number = number


class Own(np.ndarray[Any, Any]):
    """A class of arrays."""


@dataclass
class Record:
    """An object of the program's."""

    values: Any


@zc.actor
class Shop:
    """A class of actors."""

    async def open(self) -> None:
        """A method."""


def _by_value() -> type:
    return type("Local", (), {"__module__": "__main__", "method": lambda self: 1})


ERRORS = {"zcactor.exception_pickling.make", "zcactor.exception_pickling.fill"}
ARRAYS = {"zcactor.marshal.pickling._unpack"}
VALUES: dict[str, tuple[Any, set[str]]] = {
    "exception": (Strange(1, more="a"), ERRORS),
    "failure": (Failure(Strange(1, more="a"), "Shop(a)"), ERRORS),
    "error": (zc.ActorDied("Shop(a)", "it fell", False), {*ERRORS, "zcactor.errors.ActorDied"}),
    "array of a class": (np.arange(5).view(Own), {*ARRAYS, "zcactor.marshal.pickling._subclass"}),
    "masked array": (
        np.ma.masked_array([1, 2, 3], [True, False, False]),
        {*ARRAYS, "zcactor.marshal.pickling._masked"},
    ),
    "record": (Record(np.arange(5)), ARRAYS),
    "class by value": (_by_value(), {"zcactor.marshal.pickling._fill_class"}),
    "options": (Shop.options(name="a"), {"zcactor.api.actor.ActorOptions"}),
    "class": (Shop, set()),
    "count": (CopyCount(1, 2), {"zcactor.objectstore.copies.CopyCount"}),
    "dtype": (np.dtype([("a", "f8")]), set()),
}


@pytest.fixture
def marshaller() -> Iterator[Marshaller]:
    store = Store(1 << 20, bytes(16))
    yield Marshaller(store, CopyCounter(), hot.Counters(), 4096)
    store.close()


def names_in(stream: bytes) -> set[str]:
    """The names of modules and what is taken from them, of this package, in a pickle."""
    texts: list[str] = []
    memo: list[str] = []
    found: set[str] = set()
    value: Any
    for code, value, _ in pickletools.genops(stream):
        if "UNICODE" in code.name:
            texts.append(value)
        elif code.name == "MEMOIZE":
            memo.append(texts[-1] if texts else "")
        elif code.name in ("BINGET", "LONG_BINGET") and value < len(memo):
            texts.append(memo[value])
        elif code.name == "STACK_GLOBAL" and texts[-2].startswith("zcactor"):
            found.add(".".join(texts[-2:]))
    return found


@pytest.mark.parametrize("what", VALUES)
def test_names_of_the_package_in_a_pickle(marshaller: Marshaller, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    found: set[str] = set()
    loads = pickling._loads

    def noted(unpacking: Any, stream: Any, buffers: list[bytes]) -> Any:
        found.update(names_in(bytes(stream)))
        return loads(unpacking, stream, buffers)

    monkeypatch.setattr(pickling, "_loads", noted)
    value, names = VALUES[what]
    payload, parts, flags = marshaller.pack(value)
    marshaller.unpack(payload, parts, flags)
    assert found == names
