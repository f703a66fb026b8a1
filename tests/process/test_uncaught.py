"""The error that ends a program, as its reader sees it; the table in `tests/mistakes` has the usual mistakes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.process import context, uncaught
from zcactor.process.loops import run


async def raising(error: BaseException) -> None:
    raise error


async def not_initialized() -> None:
    context.current()


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def ended_by(main: Any, error: type[BaseException] = Exception) -> BaseException:
    with pytest.raises(error) as caught:
        run(main)
    return caught.value


def test_the_program_has_the_first_and_the_last_frame() -> None:
    assert frames(ended_by(raising(ValueError("mine")))) == ["ended_by", "raising"]
    assert frames(ended_by(not_initialized())) == ["ended_by", "not_initialized"]


def test_a_group_of_errors() -> None:
    async def several() -> None:
        raise BaseExceptionGroup("two", [ended_by(not_initialized()), KeyError("key")])

    group = ended_by(several(), BaseExceptionGroup)
    assert isinstance(group, BaseExceptionGroup)
    assert frames(group) == ["ended_by", "several"]


def test_frames_stay_where_an_operation_of_the_package_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Any:
        known: dict[str, int] = {}
        return known["missing"]

    monkeypatch.setattr(uncaught, "_OTHERS", (*uncaught._OTHERS, __file__))
    program: dict[str, Any] = {"failing": failing}
    exec(compile("async def main():\n    failing()\n", "program.py", "exec"), program)
    assert frames(ended_by(program["main"](), KeyError))[-2:] == ["main", "failing"]


def test_all_frames_stay_in_development_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flags:
        dev_mode = True

    monkeypatch.setattr("zcactor.process.uncaught.sys.flags", Flags)
    assert frames(ended_by(not_initialized()))[-1] == "current"


class Plain:
    def add(self, a: int, b: int) -> int:
        return a + b


@zc.actor
class Shop(Plain): ...


async def awaits_a_plain_value() -> None:
    shop: Any = Shop()
    await shop.add(1, 2)


async def awaits_a_value_of_no_actor() -> None:
    plain: Any = Plain()
    await plain.add(1, 2)


async def spawns_a_plain_class() -> None:
    plain: Any = Plain
    await plain.spawn()


async def writes() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    array[0] = 1


NOTES: dict[Callable[[], Any], str] = {
    awaits_a_plain_value: "'shop' is an object of this process, made by Shop(...): 'await Shop.spawn(...)' makes",
    spawns_a_plain_class: "Plain is no actor class: write @zc.actor above it, or 'await zc.spawn(Plain, ...)'",
    writes: "an array that was passed is read-only for all who hold it: write to x.copy(), or pass zc.move(x)",
}


@pytest.mark.parametrize("mistake", NOTES)
def test_a_note_says_what_to_write(mistake: Callable[[], Any]) -> None:
    (note,) = ended_by(mistake()).__notes__
    assert note.startswith(NOTES[mistake])


def test_other_errors_get_no_note() -> None:
    for main in (
        awaits_a_value_of_no_actor(),
        raising(ValueError("read-only disk")),
        raising(TypeError("f() missing")),
    ):
        assert not hasattr(ended_by(main), "__notes__")


def test_the_note_on_arrays_is_added_once() -> None:
    error = ValueError("output array is read-only")
    for _ in range(2):
        uncaught.note_read_only(error)
    assert len(error.__notes__) == 1
    odd = ValueError("output array is read-only")
    odd.__dict__["__notes__"] = 3
    uncaught.note_read_only(odd)
    assert odd.__dict__ == {"__notes__": 3}


PYTEST = """
import zcactor as zc

class Shop:
    def fail(self):
        raise ValueError("no money")

async def test_calls(zc_runtime):
    shop = await zc.spawn(Shop)
    await shop.fail()

async def test_uses_a_reference(zc_runtime):
    zc.put(1) + 1

async def test_without_a_runtime():
    await zc.spawn(Shop)
"""


def test_pytest_shows_the_lines_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PYTEST)
    pytester.makeini("[pytest]\nasyncio_mode = auto\n")
    result = pytester.runpytest_subprocess("-q", "--tb=short", "-p", "zcactor.testing.plugin")
    result.assert_outcomes(failed=3)
    text = result.stdout.str()
    assert "await shop.fail()" in text and "await zc.spawn(Shop)" in text and "zc.put(1) + 1" in text
    assert "zcactor/" not in text.replace("zcactor/testing", "")


class Silent(type):
    """A class of classes that do not tell their names."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise AssertionError("the report has asked the class")


class Nameless(metaclass=Silent):
    """A class that does not tell its name."""


class Classless:
    """An object that does not tell its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("the report has asked the object")


class Unlike(str):
    """A name that cannot be compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("the report has asked the name")


class Closed(ExceptionGroup[Exception]):
    """A group that does not tell its errors."""

    @property
    def exceptions(self) -> Any:
        """Nothing."""
        raise AssertionError("the report has asked the group")


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (AttributeError("none", name="spawn", obj=Classless()), ""),
        (AttributeError("none", name="spawn", obj=Nameless), "Nameless is no actor class"),
        (AttributeError("none", name=Unlike("spawn"), obj=int), ""),
        (Closed("closed", [ValueError("inner")]), ""),
    ],
    ids=["object", "class", "name", "group"],
)
def test_no_code_of_the_programs_classes_replaces_its_error(error: Exception, note: str) -> None:
    assert ended_by(raising(error)) is error
    assert note in "".join(getattr(error, "__notes__", []))
