"""Registered types and NumPy scalars."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.marshal.wire import Wire
from zcactor.errors import ProtocolError
from zcactor.marshal import register
from zcactor.marshal.values import NotPlain, decode_small, encode, pack_scalar, registered, unpack_scalar, unpackers


class Marked:
    """A type that is registered for one test."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_registered_type_travels_as_its_extension(wire: Wire) -> None:
    register(Marked, 100, lambda _, marked: encode(marked.value), lambda _, data: Marked(decode_small(data)))
    try:
        # By itself, in a container, and inside a value that has to be pickled.
        for got in (wire.send(Marked(7)), wire.send([Marked(7)])[0], wire.send({"s": {1}, "m": Marked(7)})["m"]):
            assert type(got) is Marked
            assert got.value == 7
    finally:
        del registered[Marked], unpackers[100]


def test_scalar_that_cannot_travel_is_not_plain() -> None:
    class Mine(np.float64):
        pass

    with pytest.raises(NotPlain):
        pack_scalar(Mine(1))


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [1, 2],
        ["<i4", b"abc"],
        ["<i4", "abcd"],
        ["<U1", b"\xff" * 4],
        ["|O", b"a" * 8],
        [["sub", "<i4", [2]], b"a" * 8],
    ],
    ids=repr,
)
def test_malformed_scalar_is_a_protocol_error(content: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_scalar(memoryview(msgspec.msgpack.encode(content)))
