"""The types of methods exist for type checkers; at run time they refuse to be used. `tests/typing` tries the types."""

from __future__ import annotations

import pytest

import zcactor as zc
from zcactor.api import typed


def test_they_are_not_for_use_at_run_time() -> None:
    method: typed.Method[object, [], int] = typed.Method()
    stream: typed.StreamMethod[object, [], int] = typed.StreamMethod()
    remote: typed.TypedMethod[[], int] = typed.TypedMethod()
    remote_stream: typed.TypedStream[[], int] = typed.TypedStream()
    for use in (
        lambda: method.__get__(None, object),
        lambda: stream.__get__(None, object),
        lambda: remote(),
        lambda: remote.options(),
        lambda: remote_stream(),
        lambda: remote_stream.options(),
    ):
        with pytest.raises(TypeError, match="for type checkers"):
            use()


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    def function(self: object, n: int) -> int:
        return n

    marked: object = zc.method(function)
    assert marked is function
    with_options: object = zc.method(timeout=3)(function)
    assert with_options is function
