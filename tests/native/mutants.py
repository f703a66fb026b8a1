"""Frames with random changes, fed to the native part.

    python -m tests.native.mutants [SECONDS] [SEED]

It uses the processor for that long, and prints the seed, which repeats the run as long as nothing else is changed.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from typing import Any

import msgspec
import numpy as np

from tests.native.ends import MAX_FRAME, PEER, End, Waiting
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import known_dtypes
from zcactor.native import hot
from zcactor.objectstore.ref import Region
from zcactor.rpc.codec import encode_into, frame_size
from zcactor.rpc.messages import Kind

__all__ = ["Feeder"]

ARENA_NBYTES = 1 << 20
CALL_IDS = (1, 2, 3)
KEY = 1 << 32 | 5
BYTES = (0, 1, 0x7F, 0x80, 0xC7, 0xFF)
"""Bytes at the borders of encodings."""


def extension(code: int, body: bytes) -> bytes:
    return (
        bytes([0xC8]) + len(body).to_bytes(2, "big") + bytes([code]) + body
        if code == 4
        else (bytes([0xC7, len(body), code]) + body)
    )


def reference(index: int, count: int) -> bytes:
    """A reference to an array of that many doubles in the frame's region number `index`."""
    return extension(3, bytes([0x93, index, 0xA3]) + b"<f8" + bytes([0x91, 0xCF]) + count.to_bytes(8, "big"))


def inline(array: Any) -> bytes:
    return extension(4, msgspec.msgpack.encode([array.tobytes(), array.dtype.str, array.shape, False]))


def pool() -> list[bytes]:
    """Correct frames of every kind that the native part takes in by itself, and of some that it leaves to Python."""
    arrays = [inline(np.arange(5.0)), inline(np.zeros((0, 3))), inline(np.arange(6, dtype="<i4").reshape(2, 3))]
    payloads = [msgspec.msgpack.encode(v) for v in (None, 1, -5, 2.5, "abc", b"x" * 300, 1 << 40, [1], {"a": 1})]
    regions = [Region(0, PEER, 9 + i, 4096 * i, 64, 0) for i in range(3)]
    frames = []
    for kind in (Kind.CALL, Kind.RESPONSE, Kind.RELEASE, Kind.CREDIT, Kind.CANCEL):
        for releases in ((), ((3, 1),), ((3, 1), (3, 1), (4, 1))):
            for number, some in enumerate(([], regions[:1], regions)):
                values = [reference(i, 8) for i in range(len(some))] + arrays[:number] + payloads[number : number + 4]
                payload = bytes([0x90 | len(values)]) + b"".join(values)
                if kind == Kind.RESPONSE:
                    payload = values[number % len(values)]
                if kind > Kind.RESPONSE:
                    payload = b""
                buffer = bytearray(frame_size(len(some), len(releases), len(payload)))
                encode_into(buffer, 0, kind, 0, 0, 0, 2, CALL_IDS[number], 0, some, releases, payload)
                frames += [bytes(buffer)] * (3 if kind <= Kind.RESPONSE else 1)
    return frames + chain_frames()


def promise(index: int, label: bytes = b"Adder.add") -> bytes:
    """A promise that is announced by the frame's region number `index`."""
    return extension(10, bytes([0x93, index, 0xA0 | len(label)]) + label + b"\xc2")


def chain_frames() -> list[bytes]:
    """Correct frames of chains of calls: announced promises, FORWARD, PUSH, and answers that say what was pushed."""
    regions = [Region(2, PEER, 9, KEY, 0, 0), Region(0, PEER, 10, 4096, 64, 0), Region(2, PEER, 11, KEY + 1, 0, 0)]
    values = [promise(0), reference(1, 8), promise(2), b"\x07"]
    wanted = [
        (Kind.CALL, 0, 3, regions, bytes([0x94]) + b"".join(values)),
        (Kind.CALL, 0, 3, regions[:1], bytes([0x92]) + promise(0) + b"\x07"),
        (Kind.FORWARD, 0, KEY, (), b"t" * 16),
        (Kind.FORWARD, 1, KEY, (), b"t" * 16),
        (Kind.PUSH, 0, 5, (), b"\x07"),
        (Kind.PUSH, 0, 5, regions[1:2], reference(0, 8)),
        (Kind.RESPONSE, 0, 1, (), b"\x07"),
    ]
    frames = []
    for kind, code, extra, some, payload in wanted:
        for releases in ((), ((3, 1),)):
            buffer = bytearray(frame_size(len(some), len(releases), len(payload)))
            encode_into(buffer, 0, kind, 0, code, 0, 2, CALL_IDS[0], extra, some, releases, payload)
            frames += 2 * [bytes(buffer)]
    return frames


class Feeder:
    """One end, and a peer that writes nonsense to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = pool()
        self.taken = self.refused = self.passed_on = 0
        """Numbers of frames that the native part took in, that ended the connection, and that Python has to read."""
        self._begin()

    def _begin(self) -> None:
        for dtype in ("<f8", "<i4"):
            known_dtypes[dtype] = np.dtype(dtype)
        self.end: Any = End(arena=ARENA_NBYTES, depth=64)
        self.ended: list[BaseException | None] = []
        self.calls: list[Waiting] = []
        self.reader = hot.Reader(
            self.end.ours.fileno(),
            MAX_FRAME + 4,
            MAX_FRAME,
            self.end.wire,
            print,
            lambda error, _: self.ended.append(error),
        )

    def _changed(self) -> bytes:
        choose = self.random
        frame = bytearray(choose.choice(self.pool))
        for _ in range(choose.choice((0, 0, 0, 1, 1, 2, 4))):
            frame[choose.randrange(4, len(frame))] = choose.choice((*BYTES, choose.randrange(256)))
        if choose.random() < 0.1:
            frame = frame[: choose.randrange(4, len(frame))]
            frame[:4] = (len(frame) - 4).to_bytes(4, "little")
        return bytes(frame) if choose.random() < 0.97 else choose.randbytes(choose.randrange(1, 200))

    def turn(self) -> None:
        """Feed a few frames, and check the state of the end."""
        end, choose = self.end, self.random
        for call_id in CALL_IDS:
            if call_id not in end.pending:
                end.pending[call_id] = Waiting()
                end.pending[call_id].forwarded = call_id
                self.calls.append(end.pending[call_id])
        for object_id in (3, 3, 4):
            end.leases.grant(object_id, None)
        end.credits.take_owed()
        before = end.counters.frames_received
        batch = b"".join(self._changed() for _ in range(choose.randrange(1, 4)))
        broken = False
        if choose.random() < 0.5:
            end.theirs.send(batch)
            while self.reader.readable():
                pass
            broken = bool(self.ended)
            assert all(isinstance(error, ProtocolError) for error in self.ended), self.ended
        else:
            try:
                end.wire.feed(batch)
            except ProtocolError:
                broken = True
        self.taken += end.counters.frames_received - before
        self.passed_on += len(end.others)
        self.refused += broken
        self._look()
        if broken:
            self.close()
            self._begin()

    def _look(self) -> None:
        end = self.end
        for call in self.calls:
            assert (call in end.pending.values()) + call.count == 1, "pending, or ended once"
        for _, offset, nbytes in end.leased:
            assert 0 <= offset <= offset + nbytes <= ARENA_NBYTES
        found = [value for *_, arguments in end.calls for value in arguments]
        for value in found + [call.value for call in self.calls]:
            if isinstance(value, np.ndarray):
                assert value.nbytes <= ARENA_NBYTES
                value.tobytes()
        self.calls = [call for call in self.calls if not call.count]
        assert not end.ahead, "until the end of a batch"
        assert all(not call.pushed >> call.forwarded for call in self.calls)
        for each in (end.calls, end.others, end.leased, end.pushes, end.forwards):
            each.clear()
        end.leases.end()

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()
        self.end.close()
        self.end.pending.clear()
        self.end.hosts.clear()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    print(f"frames are changed for {seconds:g} s of CPU; seed {seed}", flush=True)
    feeder = Feeder(seed)
    stop, turns = time.process_time() + seconds, 0  # a busy machine is no reason to change fewer frames
    while time.process_time() < stop:
        feeder.turn()
        turns += 1
    feeder.close()
    print(
        f"{turns} batches: {feeder.taken} frames taken in, {feeder.passed_on} left to Python, {feeder.refused} refused"
    )
    assert feeder.taken > turns // 20
    assert feeder.refused > turns // 100


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
