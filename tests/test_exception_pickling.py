"""Exceptions that are taken apart and put together again."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tests.test_errors import PLAIN
from zcactor.exception_pickling import hides, put_together, shown_class, take_apart


@pytest.mark.parametrize("error", PLAIN, ids=lambda error: type(error).__name__)
def test_taken_apart_and_put_together(error: Exception) -> None:
    again = put_together(*pickle.loads(pickle.dumps(take_apart(error))))
    assert type(again) is type(error)
    assert repr(again.args) == repr(error.args)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
    for name in (
        "errno",
        "strerror",
        "filename",
        "reason",
        "start",
        "object",
        "lineno",
        "text",
        "name",
        "path",
        "message",
    ):
        assert repr(getattr(again, name, None)) == repr(getattr(error, name, None))


def test_parts_of_something_else() -> None:
    with pytest.raises(TypeError):
        put_together(int, (), {})
    with pytest.raises(TypeError):
        put_together(3, (), {})


def test_only_the_errors_of_a_raise_hide_frames() -> None:
    def raising(error: Exception) -> None:
        raise error

    def failing() -> None:
        [][1]

    cases: list[tuple[Callable[[], None], bool]] = [
        (lambda: raising(ValueError("told")), True),
        (lambda: raising(AssertionError("a defect")), False),
        (failing, False),
    ]
    for action, hidden in cases:
        with pytest.raises((ValueError, AssertionError, IndexError)) as caught:
            action()
        assert hides(caught) is hides(caught.value) is hidden
    assert hides(None) is False and hides(ValueError("not raised")) is False


def test_the_name_of_a_class_is_shown_without_its_code() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise AssertionError("a message has asked the class")

    class Silent(metaclass=Meta):
        pass

    assert shown_class(Silent) == "Silent"
    assert shown_class(type("A\nB\x1b[31m", (), {})) == r"A\nB\x1b[31m"
    assert shown_class(type("x" * 99, (), {})) == "x" * 77 + "..."
