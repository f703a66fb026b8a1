"""Objects that the user passes arrive as they are, or the error names the part that cannot travel."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests import carried, hostile
from tests.marshal.wire import Side
from zcactor.config import Config
from zcactor.marshal import explaining

PATIENCE = 60.0
EAGER = Config().eager_limit


async def _failure(call: Any) -> BaseException:
    try:
        found = await call
    except BaseException as error:
        return error
    raise AssertionError(f"it gave {found!r}")


def described_by(value: Any) -> list[Any]:
    """Arrays and a scalar whose dtypes have the value in their metadata."""
    dtype = np.dtype("f8", metadata={"value": value})
    fields = np.dtype([("a", "i4"), ("b", dtype)])
    return [np.zeros(3, dtype), np.zeros(EAGER, dtype), np.zeros(3, fields), np.zeros(3, fields)[0]]


async def test_errors_of_unpickling_are_told_as_they_are() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        carrier: Any = await carried.Carrier.spawn()
        for name, (make, kind) in carried.RAISING.items():
            quiet = issubclass(kind, Exception)
            for take in (carrier.take, carrier.take_inline, carrier.take_async):
                for value in (make(), [make()], *described_by(make())):
                    error = await _failure(take(value))
                    assert isinstance(error, kind if quiet else zc.RemoteError), (name, error)
                    assert not isinstance(error, zc.ProtocolError)
            # a promise among the arguments: they are unpickled before the method's turn
            error = await _failure(carrier.take(make(), carrier.call(carrier.note, 1)))
            assert isinstance(error, kind if quiet else zc.RemoteError), (name, error)
            error = await _failure(carrier.give(name))
            assert type(error) is kind, (name, error)
            error = await _failure(zc.put(make()))
            assert type(error) is kind, (name, error)
            assert await carrier.take(1) == 1


async def test_a_method_of_a_handle_travels_as_the_handle_does() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        first: Any = await carried.Carrier.spawn()
        second: Any = await carried.Carrier.spawn()
        for number, method in enumerate(
            [first.note, first.note.options(timeout=30), functools.partial(first.note), lambda n: first.note(n)], 1
        ):
            assert await second.call(method, 7) == number
        assert await second.drain(first.numbers, 3) == [0, 1, 2]
        assert await second.echo({"back": first.note}) == {"back": first.note}
        again = await second.echo(first.note.options(timeout=30))
        assert again == first.note.options(timeout=30) != first.note
        assert hash(await second.echo(first.note)) == hash(first.note)
        assert first.note != second.note != 3
        assert copy.copy(first.note) == copy.deepcopy(first.note) == first.note
        assert first.note.__name__ == "note"


def _colours(count: int, colours: Any) -> np.ndarray[Any, Any]:
    return np.zeros(count, np.dtype("i1", metadata=colours))


async def test_metadata_of_dtypes_is_kept() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        carrier: Any = await carried.Carrier.spawn()
        for count in (0, 1, EAGER - 1, EAGER, EAGER + 1):
            await _check_metadata(carrier, count)


async def _check_metadata(carrier: Any, count: int) -> None:
    colours = {"enum": {"RED": 0, "GREEN": 1}}
    plain = np.zeros(count, "i1")
    assert await carrier.metadata(plain) is None
    for metadata in (colours, {"vlen": str}):
        array = _colours(count, metadata)
        assert await carrier.metadata(array) == metadata
        assert await carrier.metadata(array[::-1]) == metadata
        back = await carrier.echo(array)
        assert back.dtype.metadata == metadata and back.tobytes() == array.tobytes()
        nested = await carrier.echo([{"a": array}, plain])
        assert nested[0]["a"].dtype.metadata == metadata and nested[1].dtype.metadata is None
        assert (await zc.put(array)).dtype.metadata == metadata
        handed = await carrier.echo(zc.move(array.copy()))
        assert handed.dtype.metadata == metadata
    inner = np.dtype("i1", metadata=colours)
    record = np.zeros(count, np.dtype([("c", inner), ("d", inner, (2,))], metadata={"kind": "table"}))
    for found in (await carrier.echo(record), await carrier.echo(record.view(np.recarray))):
        assert found.dtype == record.dtype
        assert found.dtype.fields["c"][0].metadata == colours
        assert found.dtype.fields["d"][0].subdtype[0].metadata == colours
    assert (await carrier.echo(record)).dtype.metadata == {"kind": "table"}
    assert await carrier.metadata(plain) is None


async def test_errors_of_pickling_name_the_part_and_what_to_do() -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        carrier: Any = await carried.Carrier.spawn()
        value = {"model": [carried.nothing()], "array": np.ones(EAGER), 3: (1,)}
        next_step = "pass a list of its items, or yield them from a generator method"
        what = r"""cannot be sent: it is of type generator \(cannot pickle 'generator' object\); """ + next_step
        for make, path in (
            (lambda: carrier.take(1, value), r"""Carrier\.take\(\): argument 2\["model"\]\[0\]"""),
            (lambda: carrier.echo(value), r"""Carrier\.echo\(\): argument value\["model"\]\[0\]"""),
            (lambda: carrier.take(1, other=[value]), r"""Carrier\.take\(\): argument other\[0\]\["model"\]\[0\]"""),
            (lambda: zc.put(value), r"""value\["model"\]\[0\]"""),
            (lambda: zc.spawn(carried.Holding, value), r"""Holding\(\): argument value\["model"\]\[0\]"""),
        ):
            with pytest.raises(TypeError, match=f"^{path} {what}$") as caught:
                await make()
            assert caught.value.__suppress_context__ and caught.value.__cause__ is None
        for failing, what in (
            (carrier.generator(), "the result of Carrier.generator(): "),
            (carrier.items().__anext__(), ""),
        ):
            error = await _failure(failing)
            assert isinstance(error, TypeError)
            assert str(error).startswith(f'{what}value["model"][0] cannot be sent: it is of type generator')
            assert "NotPlain" not in str(vars(error)["__notes__"])
        with pytest.raises(TypeError, match=r"""^Carrier.take\(\): argument 1\.held\["log"\] cannot be sent"""):
            await carrier.take(carried.Holder({"log": threading.Lock()}))
        for mode in ("r", "rb"):
            opened = r"""value\["log"\] cannot be sent: it is an open file .*; open it in the process that uses it"""
            with open(__file__, mode) as file, pytest.raises(TypeError, match=opened):
                zc.put({"log": file})
        with pytest.raises(TypeError, match="make one in the process that uses it"):
            await carrier.take([threading.Lock()])
        with pytest.raises(ZeroDivisionError) as kept:
            await carrier.take([carried.Dividing()])
        assert kept.value.__notes__[-1:] == [  # pickle has notes of its own before it, from Python 3.14 on
            "Carrier.take(): argument 1[0] cannot be sent: it is of type tests.carried.Dividing (division by zero); "
            "pass the data that it consists of, or let its class say how it is pickled, by __reduce__"
        ]
        assert await carrier.take(1) == 1
        assert await carrier.take(carried.Unasked()) == 1
        await zc.spawn(carried.Holding, carried.Unasked())


class Noted(np.ndarray[Any, Any]):
    """An array with attributes."""


def test_what_an_array_carries_is_named_where_it_cannot_be_sent(tmp_path: Path) -> None:
    noted: Any = np.zeros(5).view(Noted)
    noted.lock = threading.Lock()
    described = np.zeros(5, np.dtype("i4", metadata={"h": threading.Lock()}))
    for value, path in ((noted, r"argument 1\[0\]\.lock"), (described, r'argument 1\[0\]\.dtype\.metadata\["h"\]')):
        with pytest.raises(TypeError, match=rf"^{path} cannot be sent: it is of type _thread.lock"):
            explaining.explain(TypeError("cannot pickle '_thread.lock' object"), [("argument 1", [value])])
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=5)  # its map travels as bytes
    assert explaining._probe([noted.view(np.ndarray), mapped]) is None


@dataclasses.dataclass(slots=True)
class _Slotted:
    first: Any
    other: Any = dataclasses.field(init=False)


class _Below(_Slotted):
    """A class with attributes beside its slots."""

    __dict__ = _Slotted.first  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (SimpleNamespace(model=SimpleNamespace(lock=threading.Lock())), r"\.model\.lock"),
        (_Slotted([threading.Lock()]), r"\.first\[0\]"),
        (_Below(threading.Lock()), r"\.first"),
    ],
)
def test_an_attribute_is_named_wherever_its_object_keeps_it(value: Any, path: str) -> None:
    one = Side(b"p" * 16).marshaller
    with pytest.raises(TypeError, match=rf"^value\[1\]{path} cannot be sent: it is of type _thread.lock"):
        one.pack([1, value])


def _dividing(self: object) -> None:
    raise ZeroDivisionError


class _Undirected(type):
    __dir__ = _dividing  # type: ignore[assignment]


@pytest.mark.parametrize("fields", [{"__dict__": property(_dividing)}, {"__dict__": 5}, {"__module__": None}, None])
def test_a_part_is_named_without_a_question_to_its_class(fields: dict[str, Any] | None) -> None:
    made: Any = (type if fields else _Undirected)(
        "Odd", (), {"__reduce__": lambda _: (str, (threading.Lock(),)), **(fields or {})}
    )
    with pytest.raises(TypeError, match="argument 1 cannot be sent: it is of type "):
        explaining.explain(TypeError("cannot pickle '_thread.lock' object"), [("argument 1", made())])


@pytest.mark.parametrize("module", [None, 5, ["no", "text"]])
def test_the_module_of_a_class_may_be_no_text(module: Any) -> None:
    odd: Any = type("Odd", (), {"__module__": module, "__reduce__": lambda _: (str, ("sent",))})
    one = Side(b"p" * 16).marshaller
    assert one.unpack(*one.pack(odd())) == "sent"


@dataclasses.dataclass(frozen=True)
class _Frozen(Exception):
    __notes__: Any = None


@pytest.mark.parametrize("notes", [None, "a text"])
def test_an_error_of_the_users_keeps_its_class_where_the_part_is_named(notes: Any) -> None:
    class Refusing:
        def __reduce__(self) -> Any:
            raise error

    error = _Frozen(notes) if notes else type("Plain", (Exception,), {"__setattr__": _dividing})()
    explaining.explain(error, [("argument 1", Refusing())])
    told = vars(error).get("__notes__")
    assert told == notes if notes else "argument 1 cannot be sent" in str(told)


@pytest.mark.parametrize("place", [0, 1, 49_999, 99_998, 99_999])
def test_the_part_among_many_is_found_by_few_tries(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def probe(value: Any) -> BaseException | None:
        tries.append(len(value) if type(value) is list else 1)
        return probed(value)

    probed = explaining._probe
    monkeypatch.setattr(explaining, "_probe", probe)
    values: list[Any] = [0] * 100_000
    values[place] = threading.Lock()
    with pytest.raises(TypeError) as caught:
        pickle.dumps(values)
    with pytest.raises(TypeError, match=rf"^argument 1\[{place}\] cannot be sent"):
        explaining.explain(caught.value, [("argument 1", values)])
    assert len(tries) < 25
    assert sum(tries) < 3 * len(values)


def test_classes_that_refuse_to_be_compared_are_named() -> None:
    one = Side(b"p" * 16).marshaller
    with pytest.raises(hostile.Incomparable) as caught:
        one.pack([hostile.Token()])
    assert "value[0] cannot be sent: it is of type tests.hostile.Token" in caught.value.__notes__[-1]
    lock = threading.Lock()
    holder: Any = hostile.Refusing("Holder", (), {"__reduce__": lambda _: (str, (lock,)), "__module__": __name__})
    for _ in range(2):  # the second time, an abstract class would know it
        with pytest.raises(TypeError, match=r"^value\[0\] cannot be sent: it is of type .*Holder"):
            one.pack([holder()])
    key: Any = hostile.Refusing("Key", (), {"__reduce__": lambda _: (str, ("key",)), "__module__": __name__})
    with pytest.raises(TypeError, match=r"^value\[\.\.\.\] cannot be sent: it is of type _thread.lock"):
        one.pack({key(): lock})


PROGRAM = Path(__file__).with_name("script_of_caches.py")


def test_caches_in_a_script_travel_and_locks_are_named() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[:5] == [
        "Cached [0, 1, 2] True",
        "Property [1]",
        "Recursive 55",
        "Dispatch int list of int",
        "Method int",
    ]
    module = "travels by value, with all that it names, because others cannot import it: put it into a module"
    assert [line.partition(" cannot be sent: it is of type ")[0] for line in lines[5:]] == [
        "__main__.Locked.get global 'LOCK'",
        "__main__.ClassLock.lock",
        "__main__.Variable.get global 'VARIABLE'",
    ]
    assert all(line.endswith(f"the class {line.split('.')[1].split()[0]} {module}") for line in lines[5:])


RINGS = Path(__file__).with_name("script_of_rings.py")


def test_the_lock_is_named_where_a_function_names_its_class_again() -> None:
    done = subprocess.run([sys.executable, RINGS], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" (cannot pickle")[0] for line in done.stdout.splitlines()] == [
        f"__main__.{way} global 'LOCK' cannot be sent: it is of type _thread.lock"
        for way in ("Direct.get global 'helper'", "Indirect.get global 'around'", "Attribute.get")
    ]


SLOTTED = Path(__file__).with_name("script_of_slots.py")


def test_objects_with_slots_travel_between_a_script_and_its_actors() -> None:
    done = subprocess.run([sys.executable, SLOTTED], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all", done.stdout + done.stderr
