"""Python that runs in the middle of a frame: other threads, finalizers, and the objects that the native part calls."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.native.ends import MAX_FRAME, PEER, US, End, Waiting
from tests.native.frames import frame
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_dtypes
from zcactor.native import hot
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Store
from zcactor.rpc.call import CallState
from zcactor.rpc.codec import decode, frame_at
from zcactor.rpc.messages import Kind


def shared_array(store: Store, nbytes: int = 1 << 16) -> Any:
    """An array of `store` that was shared before, with a known dtype."""
    block = store.allocate(nbytes)
    root = np.asarray(block)
    store.seal(block, root)
    store.export(block)
    array = root.view(np.float32)
    array.setflags(write=False)
    dtype_from_code(dtype_code(array.dtype))
    return array


class Slots:
    """A supply of small slots for a native send buffer, which keeps the written ones."""

    NBYTES = 600

    def __init__(self) -> None:
        self.out: Any = hot.SendBuffer(MAX_FRAME + 4, -1, self)
        self.written: list[bytes] = []
        self.lock = threading.Lock()
        self.fulls = 0
        self.view = memoryview(bytearray(self.NBYTES))
        self.out.swap(self.view, 16)

    def full(self) -> None:
        with self.lock:
            self.fulls += 1
            time.sleep(0)  # give up the interpreter's lock, so that other threads run and write
            view, self.view = self.view, memoryview(bytearray(self.NBYTES))
            self.written.append(bytes(view[16 : self.out.swap(self.view, 16)]))

    def flush(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20_000, 300_000])
def test_threads_that_share_a_slot_keep_credits_in_bounds_and_release_once(rounds: int) -> None:
    slots = Slots()
    end = End(out=slots.out, depth=12)
    frames = 0
    released: list[int] = []
    reported = consumed = 0
    lowest = end.credits.window

    def read() -> None:
        """Take in written frames as the peer, and return its credits."""
        nonlocal frames, reported
        with slots.lock:
            written, slots.written[:] = slots.written[:], []
        for data in written:
            at = 0
            while at < len(data):
                start, stop = frame_at(data, at, len(data), MAX_FRAME)
                fields = decode(data, start, stop)
                released.extend(object_id for object_id, count in fields[8] for _ in range(count))
                reported += fields[3]
                frames += 1
                end.credits.returned(1)
                at = stop

    def answer(first: int) -> None:
        nonlocal lowest, consumed
        for number in range(first, rounds, 2):
            end.wire.release(number)
            while not end.wire.answer(number, "x" * (number % 90)):
                slots.full()  # no credit is left: written frames leave, and the peer returns credits
                with reading:
                    read()
            with reading:
                lowest = min(lowest, end.credits.available)
                if end.credits.owed < 4:
                    end.credits.consumed(1)
                    consumed += 1

    reading = threading.Lock()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=answer, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    slots.full()
    read()
    left = end.wire.take_releases(1 << 20)
    assert frames == rounds == end.counters.frames_sent and slots.fulls > rounds // 20
    assert end.credits.available == end.credits.window and lowest >= 0
    assert sorted(released + left) == list(range(rounds)), "each lease goes back once"
    assert reported + end.credits.owed == consumed, "each credit goes back once"
    end.close()


def test_leases_are_granted_before_their_frame_can_be_sent() -> None:
    store = Store(1 << 22, PEER)
    array = shared_array(store)
    end = End(process=PEER, peer=US, store=store)
    seen: list[int] = []

    def another_thread_flushes() -> None:
        seen.append(end.leases.total)
        end.out.flush()
        with pytest.raises(BlockingIOError):
            end.theirs.recv(1)

    end.on_grant = another_thread_flushes
    assert end.call(1, 1, array, array)
    assert seen == [1, 2] and end.out.pending > 0
    end.on_grant = lambda: None
    end.close()


def test_a_frame_whose_leases_cannot_be_granted_is_not_sent() -> None:
    store = Store(1 << 22, PEER)
    arrays = shared_array(store), shared_array(store)
    end = End(process=PEER, peer=US, store=store)

    def none_left() -> None:
        if end.leases.total == 2:
            raise MemoryError

    end.on_grant = none_left
    with pytest.raises(MemoryError):
        end.call(1, 1, *arrays)
    assert end.out.pending == 0 and end.credits.available == end.credits.window
    assert end.pending.keys() == {0} and end.leases.total == 1, "the second was granted by who raised"
    end.on_grant = lambda: end.backlog.append("another thread's frame waits for a credit")
    assert not end.call(1, 1, arrays[0])
    assert end.out.pending == 0 and end.leases.total == 1
    end.close()


def test_a_block_of_another_store_is_memory_outside_ours() -> None:
    ours, other = Store(1 << 22, PEER), Store(1 << 22, PEER)
    end = End(process=PEER, peer=US, store=ours)
    assert end.call(1, 1, shared_array(ours)) and "share" not in end.events
    assert not end.call(1, 1, shared_array(other)) and "share" in end.events
    assert end.leases.total == 1
    end.close()


def test_a_call_whose_connection_ends_while_its_array_is_shared_was_not_sent(end: End) -> None:
    dtype_code(np.dtype("f8"))
    call = Waiting()

    def lost() -> None:
        assert end.pending.pop(1) is call and call.state is not CallState.SENT
        end.out.close("the connection is closed")

    end.on_share = lost
    assert end.wire.call(call, 1, 1, (np.zeros(4096),)), "the end of the connection has the call, and ends it"
    assert end.events == ["share"] and call.state is not CallState.SENT and not end.pending


def test_a_call_that_was_answered_meanwhile_is_not_answered_twice() -> None:
    store = Store(1 << 22, PEER)
    array = shared_array(store)
    end = End(process=PEER, peer=US, store=store)
    end.on_grant = lambda: end.open.pop(5, None)  # another thread has cancelled the call
    assert end.result(5, array)
    assert end.out.pending == 0 and end.leases.total == 0 and end.credits.available == end.credits.window
    end.close()


def test_a_refused_answer_leaves_its_call_open(end: End) -> None:
    payload = msgspec.msgpack.encode("x")
    call = end.pending[5] = Waiting()
    refused = frame(Kind.RESPONSE, 5, payload, credits=60000), frame(Kind.RESPONSE, 5, payload, releases=[(3, 1)])
    for each in refused:
        with pytest.raises(ProtocolError):
            end.wire.feed(each)
        assert end.pending == {5: call} and call.count == 0
    end.wire.feed(frame(Kind.RESPONSE, 5, payload))
    assert not end.pending and (call.count, call.value) == (1, "x")


def array_frame(kind: int, values: int = 1, *, nbytes: int = 32768, **fields: Any) -> bytes:
    """A frame with arrays of float64 in the peer's arena."""
    known_dtypes["<f8"] = np.dtype("<f8")
    payload = bytes([0x90 | values]) if kind == Kind.CALL else b""
    for index in range(values):
        body = bytes([0x93, index, 0xA3]) + b"<f8" + bytes([0x91, 0xCF]) + (nbytes // 8).to_bytes(8, "big")
        payload += bytes([0xC7, len(body), 3]) + body
    regions = [Region(0, PEER, 9 + index, 4096, nbytes, 0) for index in range(values)]
    return frame(kind, 5, payload, regions=regions, **fields)


def test_nothing_is_leased_for_a_frame_that_is_refused(end: End) -> None:
    call = end.pending[5] = Waiting()
    for kind in (Kind.RESPONSE, Kind.CALL):
        with pytest.raises(ProtocolError):
            end.wire.feed(array_frame(kind, credits=60000))
    assert end.leased == [] and end.calls == [] and end.pending == {5: call}


def test_what_is_used_across_python_is_owned(end: End) -> None:
    """The lease of the second array runs Python, which drops the call and the dtypes."""
    call = end.pending[5] = Waiting()
    gone = weakref.ref(call)
    del call

    def drop() -> None:
        end.pending.clear()
        known_dtypes.clear()
        gc.collect()

    end.on_lease = drop
    end.wire.feed(array_frame(Kind.RESPONSE))
    assert gone() is None and end.released == [9], "who has taken the call ends it"
    end.wire.feed(array_frame(Kind.CALL, 2))
    ((*_, (first, second)),) = end.calls
    assert first.dtype == second.dtype == np.float64 and first.shape == (4096,)


def test_a_dtype_is_let_go_of_as_often_as_it_was_found(end: End) -> None:
    counts = []
    for values in (1, 1, 2, 3, 8):
        end.wire.feed(array_frame(Kind.CALL, values, nbytes=16384))
        end.calls.clear()
        counts.append(sys.getrefcount(known_dtypes["<f8"]))
    assert counts == [counts[0]] * len(counts)


@pytest.mark.parametrize("meanwhile", ["written", "taken", "closed"])
def test_what_happens_while_a_frame_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    slots = Slots()
    end = End(out=slots.out)
    assert end.wire.frame(1, 0, 0, 0, 1, 0, bytes(400))
    end.credits.consumed(3)
    for object_id in (7, 8):
        end.wire.release(object_id)
    full = slots.full

    def happens() -> None:
        full()
        if slots.fulls == 1 and meanwhile == "written":
            assert end.wire.frame(2, 0, 0, 0, 2, 0, b"")
        elif meanwhile == "taken":
            assert end.wire.take_releases(1) == [7]
        elif meanwhile == "closed":
            end.out.refuse("closed")

    monkeypatch.setattr(slots, "full", happens)
    written = end.wire.frame(3, 0, 0, 0, 3, 0, bytes(200))
    assert written == (meanwhile != "closed")
    if written:
        full()
    frames = []
    for data in slots.written:
        at = 0
        while at < len(data):
            start, stop = frame_at(data, at, len(data), MAX_FRAME)
            fields = decode(data, start, stop)
            frames.append((fields[5], fields[3], [object_id for object_id, _ in fields[8]]))
            at = stop
    left = {
        "written": [(1, 0, []), (2, 3, [7, 8]), (3, 0, [])],
        "taken": [(1, 0, []), (3, 3, [8])],
        "closed": [(1, 0, [])],
    }
    assert frames == left[meanwhile]
    assert (end.credits.owed, end.wire.releases) == ((0, 0) if written else (3, 2))
    end.close()


def test_a_cycle_through_the_send_buffer_and_the_wire_is_collected() -> None:
    slots = Slots()
    end = End(out=slots.out)
    end.hosts[1] = end, slots
    gone = weakref.ref(slots), weakref.ref(end)
    end.close()
    del slots, end
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("kind", ["Wire", "SendBuffer", "Reader"])
def test_no_object_is_without_its_parts(kind: str) -> None:
    cls = getattr(hot, kind)
    with pytest.raises(TypeError):
        cls.__new__(cls).call(1, 2, 3, ())


def test_a_slot_stays_exported_while_it_is_written_to() -> None:
    first, second = bytearray(600), bytearray(600)
    slots: Any = object()
    out: Any = hot.SendBuffer(512, -1, slots)
    out.swap(first, 16)
    with pytest.raises(BufferError):
        first.clear()
    out.swap(second, 16)
    first.clear()
    out.close("closed here")
    second.clear()
    assert out.swap(bytearray(600), 16) == 0
    with pytest.raises(ConnectionLost, match="closed here"):
        out.commit(8)


@pytest.mark.parametrize("reaches", [False, True])
def test_an_exception_while_slots_are_sent_is_given_to_the_connection_which_may_raise_it_again(
    reaches: bool,
) -> None:
    class Raising(Slots):
        def flush(self) -> None:
            raise OSError("no way")

    end = End(out=Raising().out)
    assert end.call(1, 1, "x")
    if reaches:
        end.on_error = raising
        with pytest.raises(OSError, match="no way"):
            end.wire.flush()
    else:
        end.wire.flush()
    assert end.events[-1] == "OSError" and len(end.events) == 2
    end.close()


def raising(error: BaseException) -> None:
    raise error


def test_a_slot_that_is_left_is_kept_while_the_buffer_is_closed_beside_it() -> None:
    """The collector may run code that closes the buffer, while the view on the slot's frames is made."""
    slots: Any = object()
    out = hot.SendBuffer(100, -1, slots)

    class Closing:
        itself: Any

        def __del__(self) -> None:
            out.close("it is closed")

    frames: deque[memoryview] = deque()
    view = memoryview(bytearray(200))
    before = gc.get_threshold()
    gc.disable()
    try:
        closing = Closing()
        closing.itself = closing
        del closing
        out.swap(memoryview(bytearray(200)), 0)
        buffer, at = out.reserve(5)
        buffer[at : at + 5] = b"frame"
        out.commit(5)
        gc.enable()
        gc.set_threshold(1)
        left = out.leave(view, frames)
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert left == bool(frames) and all(bytes(each) == b"frame" for each in frames)
    gc.collect()
    assert not out.pending
