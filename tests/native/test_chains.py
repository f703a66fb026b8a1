"""Frames of chained calls in the native part: announced promises, FORWARD, PUSH, and answers that tell of pushes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.native.ends import MAX_FRAME, PEER, US, End, Ref, Waiting
from tests.native.frames import TARGET, Host, announced, call_with, frame, read
from tests.native.mutants import KEY, promise, reference
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.objectstore.store import Store
from zcactor.rpc.codec import decode, frame_at
from zcactor.rpc.messages import Kind, Status
from zcactor.rpc.parts import Announced


@pytest.fixture
def end(end: End) -> End:
    """An end with an actor."""
    end.hosts[2] = Host()
    return end


def test_an_announced_promise_is_written_as_python_writes_it(end: End) -> None:
    assert end.wire.call(Waiting(), 2, 1, (Announced(9, KEY, "Adder.add"), 7, Announced(11, KEY + 1, "x")))
    end.wire.call(Waiting(), 2, 1, ())  # sent at the end of the turn, as the first
    data = end.sent()
    kind, _, code, _, actor, _, _, regions, _, low, high = decode(data, *frame_at(data, 0, len(data), MAX_FRAME))
    assert (kind, code, actor) == (Kind.CALL, 1, 2)
    assert regions == (announced(KEY, US), Region(RegionKind.REF, US, 11, KEY + 1, 0, 0))
    assert data[low:high] == b"\x93" + promise(0) + b"\x07" + promise(1, b"x")


def test_a_call_that_waits_for_a_promise_wakes_nobody(end: End) -> None:
    assert end.wire.call(Waiting(), 2, 1, (Announced(9, KEY, "x"),))
    assert end.out.pending and end.events == ["schedule"]


def test_a_call_with_a_reference_among_its_arguments_is_left_to_python(end: End) -> None:
    before = end.wire.sent
    assert end.wire.call(Waiting(), 2, 1, (7, Ref())) is None
    assert not end.pending and not end.out.pending and end.wire.sent == before, "nothing was done"


def test_what_is_scheduled_is_sent_at_the_end_of_the_turn(end: End) -> None:
    due: list[Any] = []
    end.on_call_soon = due.append
    assert end.call(2, 1) and end.call(2, 1)
    assert len(due) == 1 and end.wire.flush_scheduled and end.out.pending
    due.pop()()
    assert not end.out.pending and not end.wire.flush_scheduled and not end.events
    assert end.call(2, 1) and len(due) == 1, "scheduled anew"
    end.closed = ConnectionLost("gone")
    due.pop()()
    assert end.out.pending and not end.wire.flush_scheduled, "a session that has ended sends nothing"


def test_a_thread_has_python_schedule(end: End) -> None:
    end.pending[0] = Waiting()
    thread = threading.Thread(target=end.wire.call, args=(Waiting(), 2, 1, ()))
    thread.start()
    thread.join()
    assert end.events == ["schedule from a thread"] and end.out.pending


def test_a_loop_that_is_closed_has_python_end_the_session(end: End) -> None:
    def closed(_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    end.on_call_soon = closed
    assert end.call(2, 1) and end.events == ["schedule from a thread"]


def test_another_error_of_scheduling_is_raised(end: End) -> None:
    def failing(_: Any) -> None:
        raise MemoryError

    end.on_call_soon = failing
    end.pending[0] = Waiting()
    with pytest.raises(MemoryError):
        end.wire.call(Waiting(), 2, 1, ())
    assert not end.wire.flush_scheduled


@pytest.mark.parametrize("label", ["\u00e4", "x" * 201])
def test_a_label_that_python_has_to_write(end: End, label: str) -> None:
    assert not end.wire.call(Waiting(), 2, 1, (Announced(9, KEY, label),))
    assert not end.pending and not end.out.pending


def test_results_that_are_passed_on_have_calls_leave_with_what_follows(end: End) -> None:
    end.wire.patience = 1
    assert end.wire.call(Waiting(), 2, 1, ()) and end.out.pending and end.wire.patience == 0
    end.sent()
    end.pending.clear()
    assert end.wire.call(Waiting(), 2, 1, ()) and not end.out.pending, "at once, as it is alone"


def test_an_announced_promise_becomes_the_argument_that_python_makes(end: End) -> None:
    end.wire.feed(call_with(announced()))
    assert end.hosts[2].linked == [(5, 0, 0, [(9, KEY, "Adder.add"), 7], None)]
    assert not end.hosts[2].plain and not end.others


def test_the_error_of_an_argument_ends_the_batch(end: End) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    end.on_argument = refuse
    with pytest.raises(MemoryError):
        end.wire.feed(call_with(announced()))
    assert not end.hosts[2].linked


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(call_with(announced(0)), id="without a key"),
        pytest.param(call_with(announced(nbytes=8)), id="with bytes"),
        pytest.param(call_with(announced(pin=3)), id="with a pin"),
        pytest.param(call_with(announced(owner=b"x" * 16)), id="of a third process"),
        pytest.param(call_with(announced(kind=RegionKind.ARRAY)), id="over an array"),
        pytest.param(call_with(announced(), promise(1)), id="of a region that is not there"),
        pytest.param(call_with(announced(), promise(0)[:-1] + b"\xc3"), id="of another form"),
        pytest.param(frame(Kind.PUSH, KEY, promise(0), regions=[announced()]), id="in a push"),
        pytest.param(frame(Kind.PUSH, 0, b"\x07"), id="a push without a key"),
        pytest.param(frame(Kind.FORWARD, 5, TARGET), id="a forward without a key"),
        pytest.param(frame(Kind.FORWARD, 5, TARGET, extra=KEY, code=64), id="a forward of too high a number"),
        pytest.param(frame(Kind.FORWARD, 5, TARGET[1:], extra=KEY), id="a forward to nobody"),
    ],
)
def test_frames_that_python_has_to_judge(end: End, data: bytes) -> None:
    end.wire.feed(data)
    assert len(end.others) == 1
    assert not end.hosts[2].linked and not end.hosts[2].plain and not end.pushes and not end.forwards


def test_an_own_promise_is_left_to_python() -> None:
    end = End(process=PEER)
    end.wire.feed(call_with(announced()))
    assert len(end.others) == 1
    end.close()


def test_forward_frames_are_there_when_their_calls_start(end: End) -> None:
    plain = frame(Kind.CALL, 4, b"\x91\x07")
    linked = frame(Kind.CALL, 5, b"\x91\x08")
    forwards = [frame(Kind.FORWARD, 5, TARGET, extra=KEY + number, code=number) for number in range(2)]
    stray = frame(Kind.FORWARD, 6, TARGET, extra=KEY)
    end.wire.feed(forwards[0] + plain + linked + forwards[1] + stray)
    assert end.hosts[2].plain == [(4, 0, 0, [7])]
    assert end.hosts[2].linked == [(5, 0, 0, [8], [(0, KEY, TARGET), (1, KEY + 1, TARGET)])]
    assert end.credits.owed == end.counters.frames_received == 5, "each is counted once, in its turn"
    assert not end.ahead, "a call of the next batch has no FORWARD frames of this one"
    assert not end.forwards
    end.open[7] = object()
    end.wire.feed(frame(Kind.FORWARD, 7, TARGET, extra=KEY))
    assert end.forwards == [(7, KEY, 0, TARGET)] and not end.ahead, "an open call gets its frame at once"


def test_pushes_are_written_and_read(end: End) -> None:
    assert end.wire.push(KEY, 5, "a result")
    data = end.theirs.recv(1 << 16)
    kind, flags, code, _, _, message_id, extra, regions, _, low, high = decode(
        data, *frame_at(data, 0, len(data), MAX_FRAME)
    )
    assert (kind, flags, code, message_id, extra, regions) == (Kind.PUSH, 0, Status.OK, KEY, 5, ())
    assert msgspec.msgpack.decode(data[low:high]) == "a result"
    assert end.counters.pushes == 1
    end.wire.feed(data)
    assert end.pushes == [(5, KEY, "a result")]
    assert not end.wire.push(KEY, 5, []), "Python writes it"
    end.backlog.append("a frame that waits for a credit")
    assert not end.wire.push(KEY, 5, 1), "nothing overtakes it"


def test_a_pushed_array_is_held_by_its_taker_alone(end: End) -> None:
    dtype_from_code(dtype_code(np.dtype("f8")))
    region = Region(RegionKind.ARRAY, PEER, 3, 4096, 64, 0)
    end.wire.feed(frame(Kind.PUSH, KEY, reference(0, 8), extra=5, regions=[region]))
    [(word, key, array)] = end.pushes
    assert (word, key) == (5, KEY) and array.shape == (8,) and end.leased == [(3, 4096, 64)]
    gone = weakref.ref(array)
    end.pushes.clear()
    del array
    assert gone() is None


class Passing:
    """Two connections of one process: by `end` a call has come, and its result is pushed by `to`."""

    def __init__(self) -> None:
        self.store = Store(1 << 22, US)
        self.shared: list[Any] = []
        self.end, self.to = (End(store=self.store, share=self.share) for _ in range(2))
        self.array = np.asarray(self.store.allocate(1 << 16)).view(np.float32)
        dtype_from_code(dtype_code(self.array.dtype))

    def share(self, array: Any, address: int, nbytes: int) -> Any:
        self.shared.append(array)
        block = self.store.block_at(address, address + nbytes)
        assert block is not None
        self.store.seal(block)
        self.store.export(block)
        array.setflags(write=False)
        return block

    def pass_on(self, value: Any) -> Any:
        self.end.open[5] = Waiting()
        return self.end.wire.pass_on(5, value, False, 1, self.to.wire, KEY, 9)


@pytest.fixture
def passing() -> Iterator[Passing]:
    made = Passing()
    yield made
    made.end.close()
    made.to.close()


def test_a_result_is_pushed_and_answered(passing: Passing) -> None:
    assert passing.pass_on("a result") is True
    payload = msgspec.msgpack.encode("a result")
    assert read(passing.to.theirs.recv(1 << 16)) == (Kind.PUSH, Status.OK, KEY, 9, (), payload)
    assert read(passing.end.theirs.recv(1 << 16)) == (Kind.RESPONSE, Status.OK, 5, 1, (), payload)
    assert passing.to.counters.pushes == 1 and not passing.end.open


def test_an_array_is_shared_once_for_push_and_answer(passing: Passing) -> None:
    array = passing.array
    assert passing.pass_on(array) is True
    assert len(passing.shared) == 1 and passing.shared[0] is array
    (push,), (answer,) = (read(each.theirs.recv(1 << 16))[4] for each in (passing.to, passing.end))
    assert push == answer and push.nbytes == array.nbytes
    assert passing.end.leases.total == passing.to.leases.total == 1
    gone = weakref.ref(passing.end.leases.get(answer.id))
    passing.shared.clear()
    for each in (passing.end, passing.to):
        each.leases.release(answer.id, 1)
    del array, passing.array
    assert gone() is None, "nothing else keeps the block"


@pytest.mark.parametrize("change", ["writable", "unsealed"])
def test_an_array_that_changes_in_between_is_shared_anew(passing: Passing, change: str) -> None:
    def meanwhile() -> None:
        if change == "writable":
            passing.array.flags.writeable = True
        else:
            (block,) = passing.to.leases._keeps.values()
            block.sealed = False

    passing.to.on_grant = meanwhile
    assert passing.pass_on(passing.array) is True
    assert len(passing.shared) == 2


def test_a_result_that_python_has_to_push(passing: Passing) -> None:
    assert passing.pass_on([]) is False, "not plain"
    passing.to.backlog.append("a frame that waits for a credit")
    assert passing.pass_on(7) is False
    assert passing.end.open.keys() == {5} and passing.to.counters.pushes == 0
    assert not passing.end.out.pending and not passing.to.out.pending


def test_a_result_that_python_has_to_answer(passing: Passing) -> None:
    passing.end.backlog.append("a frame that waits for a credit")
    assert passing.pass_on(7) is None
    assert passing.end.open.keys() == {5} and passing.to.counters.pushes == 1
    assert not passing.end.out.pending


def test_only_another_native_part_can_push(passing: Passing) -> None:
    for wrong in ((5, 7, False, 1, object(), KEY, 9), (5, 7, False, 1, passing.to.wire, KEY)):
        with pytest.raises(TypeError, match="pass_on"):
            passing.end.wire.pass_on(*wrong)
    with pytest.raises(OverflowError):
        passing.end.wire.pass_on(5, 7, False, 1 << 64, passing.to.wire, KEY, 9)


def test_forwards_are_written(end: End) -> None:
    assert end.wire.forward(3, 1, KEY, TARGET) and end.events == ["schedule"]
    data = end.sent()
    kind, _, code, _, _, message_id, extra, _, _, low, high = decode(data, *frame_at(data, 0, len(data), MAX_FRAME))
    assert (kind, code, message_id, extra, data[low:high]) == (Kind.FORWARD, 1, 3, KEY, TARGET)
    available = end.credits.available
    assert end.wire.forward(3, 2, KEY, TARGET) and end.credits.available == available - 1
    while end.credits.take():
        pass
    assert not end.wire.forward(3, 3, KEY, TARGET), "it waits for a credit"


def test_frames_that_the_caller_flushes(end: End) -> None:
    end.theirs.setblocking(False)
    assert end.wire.push(KEY, 5, 1, None) and end.wire.push(KEY + 1, 5, 2, None)
    with pytest.raises(BlockingIOError):
        end.theirs.recv(1)
    assert "schedule" not in end.events
    end.wire.flush()
    end.wire.feed(end.theirs.recv(1 << 16))
    assert end.pushes == [(5, KEY, 1), (5, KEY + 1, 2)]
    end.wire.flush()  # there is nothing


def test_publications_are_written_and_read(end: End) -> None:
    taken: list[tuple[Any, ...]] = []
    end.takers[5] = lambda *args: taken.append(args)
    largest = np.arange(16384, dtype=np.uint8)  # the eager limit
    dtype_from_code(dtype_code(largest.dtype))  # both ends know it from now on
    assert end.wire.publish(KEY, 5, ("sum", largest, b"x", None), True)
    assert not end.wire.publish(KEY, 5, (np.zeros(20000, np.uint8),), True), "it takes several frames"
    assert not end.wire.publish(KEY, 5, (np.zeros((4, 4))[:, 1],), True), "Python makes bytes of it"
    assert not end.wire.publish(KEY, 5, ([],), True)
    assert "share" not in end.events
    data = end.theirs.recv(1 << 16)
    end.wire.feed(data)
    [(key, values, parts, flags)] = taken
    assert (key, values[0], values[2:], parts, flags) == (KEY, "sum", [b"x", None], (), -1)
    assert np.array_equal(values[1], largest) and values[1].dtype == np.uint8 and not values[1].flags.writeable
    assert end.counters.pushes == 0 and not end.pushes and not end.others
    assert end.wire.push(KEY, 5, "one value"), "of a graph"
    end.wire.feed(end.theirs.recv(1 << 16))
    assert taken[1:] == [(KEY, "one value", (), -1)]
    assert end.wire.publish(KEY, 6, ("sum", b"x"), True)
    end.wire.feed(end.theirs.recv(1 << 16))
    assert len(end.others) == 1, "Python reads lists for others than takers"
    end.backlog.append("a frame that waits for a credit")
    assert not end.wire.publish(KEY, 5, (), True), "nothing overtakes it"


def test_the_error_of_a_taker_ends_the_batch(end: End) -> None:
    def refuse(*_: Any) -> None:
        raise ProtocolError("refused")

    end.takers[5] = refuse
    assert end.wire.publish(KEY, 5, (), True)
    with pytest.raises(ProtocolError, match="refused"):
        end.wire.feed(end.theirs.recv(1 << 16))


@pytest.mark.parametrize(("pushed", "taken"), [(0b11, True), (0b100, False), (1 << 63, False)])
def test_answers_say_what_was_pushed(end: End, pushed: int, taken: bool) -> None:
    call = end.pending[1] = Waiting()
    call.forwarded = 2
    end.wire.feed(frame(Kind.RESPONSE, 1, b"\x07", extra=pushed))
    assert (call.pushed, call.count, len(end.others)) == ((pushed, 1, 0) if taken else (0, 0, 1))


def test_an_answer_is_written_with_what_was_pushed(end: End) -> None:
    end.open[5] = Waiting()
    assert end.wire.respond(5, 7, False, 0b101)
    data = end.theirs.recv(1 << 16)
    assert decode(data, *frame_at(data, 0, len(data), MAX_FRAME))[6] == 0b101


def test_nonsense_is_refused(end: End) -> None:
    for method, arguments in (
        ("push", (KEY, 5)),
        ("forward", (1, 2, 3)),
        ("respond", (1, 2)),
        ("push", ("key", 5, 1)),
        ("publish", (KEY, 5, ())),
        ("publish", (KEY, 5, [], True)),
        ("publish", ("key", 5, (), True)),
    ):
        with pytest.raises(TypeError):
            getattr(end.wire, method)(*arguments)
    with pytest.raises(ProtocolError):
        end.wire.feed(frame(Kind.PUSH, KEY, b"\x07") * 2000)
