"""Calls that the native part shelves until their promise is here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.native.ends import PEER, End
from tests.native.frames import TARGET, Host, announced, call_with, frame
from tests.native.mutants import KEY, promise, reference
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.messages import Kind
from zcactor.rpc.shelf import Shelf

MAKER = b"m" * 16
WORD = int.from_bytes(PEER[:8], "little")
ARGUMENT = (9, KEY, "Adder.add")
"""The argument that Python makes of the announced promise, here."""


class Process:
    """A process with two connections: `caller` brings calls, and `maker` pushes the results that they wait for."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.shelf.open = True
        self.caller = End(shelf=self.shelf)
        self.maker = End(peer=MAKER, shelf=self.shelf)
        self.host = self.caller.hosts[2] = Host()

    def call(self, *frames: bytes) -> None:
        self.caller.wire.feed(b"".join(frames))

    def push(self, value: Any, key: int = KEY, word: int = WORD) -> None:
        self.maker.wire.feed(frame(Kind.PUSH, key, msgspec.msgpack.encode(value), extra=word))

    @property
    def shelved(self) -> bool:
        """Whether the call is shelved, and nobody knows of it yet."""
        if not self.shelf:
            return False
        assert self.shelf == {WORD: self.caller.wire} and not self.host.plain and not self.host.linked
        return True


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.caller.close()
    made.maker.close()


def test_a_call_is_shelved_until_its_promise_is_pushed(process: Process) -> None:
    process.call(call_with(announced()))
    assert process.shelved
    assert process.caller.credits.owed == process.caller.counters.frames_received == 1, "it is booked all the same"
    process.push("a result")
    assert process.host.plain == [(5, 0, 0, ["a result", 7])] and not process.host.linked
    assert process.caller.released == [9], "nothing needs the promise any more"
    assert not process.shelf and not process.maker.pushes
    process.push("again")
    assert process.maker.pushes == [(WORD, KEY, "again")]
    process.call(call_with(announced(KEY + 1)))
    process.caller._release_delayed = True
    process.push(8, KEY + 1)
    assert process.host.plain[1:] == [(5, 0, 0, [8, 7])]
    assert process.caller.released == [9] and process.caller.wire.releases == 1, "a frame takes it along in time"


def test_an_array_takes_the_place_of_the_promise(process: Process) -> None:
    dtype_from_code(dtype_code(np.dtype("f8")))
    process.call(call_with(announced()))
    region = Region(RegionKind.ARRAY, MAKER, 3, 4096, 64, 0)
    process.maker.wire.feed(frame(Kind.PUSH, KEY, reference(0, 8), extra=WORD, regions=[region]))
    [(_, _, _, (array, _))] = process.host.plain
    assert array.shape == (8,) and process.maker.leased == [(3, 4096, 64)]
    gone = weakref.ref(array)
    process.host.plain.clear()
    del array
    assert gone() is None, "nothing else holds it"


def test_forward_frames_of_the_batch_stay_with_the_call(process: Process) -> None:
    forwards = [frame(Kind.FORWARD, 5, TARGET, extra=KEY + number, code=number) for number in range(2)]
    process.call(forwards[0], frame(Kind.CALL, 4, b"\x91\x07"), call_with(announced()), forwards[1])
    assert process.host.plain == [(4, 0, 0, [7])]
    assert process.shelf and process.caller.credits.owed == 4
    process.push(1)
    assert process.host.linked == [(5, 0, 0, [1, 7], [(0, KEY, TARGET), (1, KEY + 1, TARGET)])]
    assert not process.caller.ahead and not process.caller.forwards


def test_a_call_without_a_host_is_refused_at_once(process: Process) -> None:
    process.caller.hosts.clear()
    process.call(call_with(announced()))
    assert process.caller.calls == [(2, 5, 0, 0, [ARGUMENT, 7])] and not process.shelf


def test_a_host_that_goes_while_its_call_is_shelved(process: Process) -> None:
    process.call(call_with(announced()))
    process.caller.hosts.clear()
    process.push(1)
    assert process.caller.calls == [(2, 5, 0, 0, [1, 7])]


def a_deadline() -> bytes:
    return frame(Kind.CALL, 5, b"\x92" + promise(0) + b"\x07", extra=99, regions=[announced()])


def two_promises() -> bytes:
    regions = [announced(), announced(KEY + 1)]
    return frame(Kind.CALL, 5, b"\x92" + promise(0) + promise(1), regions=regions)


def an_array_beside() -> bytes:
    dtype_from_code(dtype_code(np.dtype("f8")))
    regions = [announced(), Region(RegionKind.ARRAY, PEER, 3, 4096, 64, 0)]
    return frame(Kind.CALL, 5, b"\x92" + promise(0) + reference(1, 8), regions=regions)


@pytest.mark.parametrize("data", [a_deadline, two_promises, an_array_beside])
def test_every_other_call_goes_to_its_actor_at_once(process: Process, data: Any) -> None:
    process.call(data())
    assert len(process.host.linked) == 1 and not process.shelf


@pytest.mark.parametrize("why", ["closed", "twin", "successor", "ended", "another connection"])
def test_nothing_is_shelved_by_then(process: Process, why: str) -> None:
    if why == "closed":
        process.shelf.open = False
    elif why == "ended":
        process.caller.closed = ConnectionLost("gone")
    elif why == "another connection":
        process.shelf[WORD] = process.maker.wire
    else:
        setattr(process.caller, why, object())
    process.call(call_with(announced()))
    assert process.host.linked == [(5, 0, 0, [ARGUMENT, 7], None)]
    assert process.shelf == ({WORD: process.maker.wire} if why == "another connection" else {})
    process.shelf.clear()


def test_a_call_that_is_not_the_last_of_its_batch_is_not_shelved(process: Process) -> None:
    process.call(call_with(announced()), frame(Kind.CALL, 6, b"\x91\x08"))
    assert process.host.linked == [(5, 0, 0, [ARGUMENT, 7], None)] and process.host.plain == [(6, 0, 0, [8])]
    process.call(call_with(announced(KEY + 1)), frame(Kind.CANCEL, 5))
    assert len(process.host.linked) == 2 and len(process.caller.others) == 1


def test_the_next_batch_finds_no_call_on_the_shelf(process: Process) -> None:
    process.call(call_with(announced()))
    assert process.shelved
    process.call(frame(Kind.CALL, 6, b"\x91\x08"))
    assert process.host.linked == [(5, 0, 0, [ARGUMENT, 7], None)] and process.host.plain == [(6, 0, 0, [8])]
    process.push(1)
    assert process.maker.pushes == [(WORD, KEY, 1)] and not process.caller.released


def test_a_late_forward_frame_finds_its_call_open(process: Process) -> None:
    def receive(session: Any, call_id: int, *_: Any) -> None:
        process.caller.open[call_id] = object()

    process.host.receive_linked = receive  # type: ignore[method-assign]
    process.call(call_with(announced()))
    process.call(frame(Kind.FORWARD, 5, TARGET, extra=KEY))
    assert process.caller.forwards == [(5, KEY, 0, TARGET)]


def test_a_call_that_is_opened_twice_is_refused(process: Process) -> None:
    process.caller.open[5] = object()
    with pytest.raises(ProtocolError, match="opened call 5 twice"):
        process.call(call_with(announced()))
    assert not process.shelf


@pytest.mark.parametrize(("key", "word"), [(KEY + 1, WORD), (KEY, WORD + 1)])
def test_another_push_is_not_for_the_call(process: Process, key: int, word: int) -> None:
    process.call(call_with(announced()))
    process.push(1, key, word)
    assert process.shelved and process.maker.pushes == [(word, key, 1)]


def test_python_takes_the_call_down(process: Process) -> None:
    process.call(call_with(announced()))
    process.shelf.take_down()
    assert process.host.linked == [(5, 0, 0, [ARGUMENT, 7], None)] and not process.shelf
    process.caller.wire.take_down()
    assert len(process.host.linked) == 1, "there is nothing"


@pytest.mark.parametrize("by", ["python", "a push"])
def test_the_end_of_the_connection_drops_the_call(process: Process, by: str) -> None:
    process.call(call_with(announced()))
    process.caller.closed = ConnectionLost("gone")
    if by == "python":
        process.shelf.take_down()
    else:
        process.push(1)
        assert process.maker.pushes == [(WORD, KEY, 1)]
    assert not process.shelf and not process.host.linked and not process.host.plain and not process.caller.released


def test_a_push_finds_a_second_connection_of_the_caller(process: Process) -> None:
    process.call(call_with(announced()))
    process.caller.twin = object()
    process.push(1)
    assert process.host.linked == [(5, 0, 0, [ARGUMENT, 7], None)] and process.maker.pushes == [(WORD, KEY, 1)]


def test_the_error_of_an_argument_ends_the_batch(process: Process) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    process.caller.on_argument = refuse
    process.call(call_with(announced()))
    with pytest.raises(MemoryError):
        process.shelf.take_down()
    assert not process.shelf and not process.host.linked


def test_the_error_of_a_release_leaves_nothing_on_the_shelf(process: Process) -> None:
    def refuse(_: int) -> None:
        raise MemoryError

    process.caller.release_later = refuse  # type: ignore[method-assign, assignment]
    process.call(call_with(announced()))
    with pytest.raises(MemoryError):
        process.push(1)
    assert not process.shelf and not process.host.plain


def test_a_shelved_call_is_freed_with_its_connection() -> None:
    process = Process()
    process.call(call_with(announced()))
    assert process.shelved
    gone = weakref.ref(process.shelf)
    process.caller.close()
    process.maker.close()
    del process
    gc.collect()
    assert gone() is None
