"""A stream connection on a plain socket pair: cuts, dribbles, threads that die, forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.conformance.connection import Recorder, put, send, turns
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.frames import PeerInfo
from zcactor.transport.stream import record_layer
from zcactor.transport.stream.connection import StreamConnection
from zcactor.transport.stream.record_layer import Exporter, Integrity, Opener, SealedSocket, Sealer, Seals

PEER = PeerInfo(bytes(16), 4242, os.getuid(), 0)


def connection_on(
    sock: socket.socket, kind: type[StreamConnection] = StreamConnection, **settings: Any
) -> StreamConnection:
    sock.setblocking(False)
    return kind(sock, PEER, recv_depth=10, eager_limit=1000, **settings)


@pytest.fixture
async def wired() -> AsyncIterator[tuple[StreamConnection, Recorder, socket.socket]]:
    """A started connection, its recorder, and the bare socket at the other end."""
    near, far = socket.socketpair()
    connection, recorder = connection_on(near), Recorder()
    connection.start(recorder)
    with far:
        yield connection, recorder, far
    connection.abort()
    await turns()


Wired = tuple[StreamConnection, Recorder, socket.socket]
FRAME = struct.pack("<I", 20) + bytes(range(20))


@pytest.mark.parametrize("sealed", [True, False])
async def test_both_ends_speak_to_each_other(sealed: bool) -> None:
    await speak_to_each_other(sealed=sealed, together=200)


@pytest.mark.parametrize("together", [1, 2, 7])
async def test_both_take_new_keys_in_both_directions_at_once(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 29 records in each direction, where full sockets join no more of them, and a new key after three."""
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    taken: list[record_layer.KeyChain] = []
    really = record_layer.KeyChain.take

    def take(keys: record_layer.KeyChain) -> bytes:
        taken.append(keys)
        return really(keys)

    monkeypatch.setattr(record_layer.KeyChain, "take", take)
    await speak_to_each_other(sealed=True, together=together)
    assert len(set(taken)) == 4
    assert all(taken.count(keys) >= 8 for keys in taken)


def sealed_pair() -> list[SealedSocket]:
    """Both ends of a socket pair, encrypted."""
    keys = bytes(range(32)), bytes(range(32, 64))
    return [
        SealedSocket(sock, Seals(Sealer(own), Opener(other), Exporter(bytes(32)), Integrity.AUTO))
        for sock, own, other in zip(socket.socketpair(), keys, reversed(keys), strict=True)
    ]


@pytest.mark.parametrize("full", [False, True])
async def test_a_signals_handler_that_raises_while_a_key_is_taken(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller, or the loop where that sends, gets the exception. The key is lost, and the connection with it."""
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 2)

    def interrupted(keys: record_layer.KeyChain) -> bytes:
        raise TimeoutError("the handler of SIGALRM")

    near, far = sealed_pair()
    connection, recorder = connection_on(near), Recorder()
    connection.start(recorder)
    send(connection, [b"first"])
    raised: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: raised.append(context.get("exception")))
    monkeypatch.setattr(record_layer.KeyChain, "take", interrupted)
    if full:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        send(connection, [bytes(connection.max_frame)] * 20)
        send(connection, [b"another record"])
        await turns()
        assert not recorder.lost
        async with asyncio.timeout(20):
            while not recorder.lost:
                with contextlib.suppress(BlockingIOError):
                    far.recv(1 << 20)
                await turns()
    else:
        send(connection, [b"second"])
        with pytest.raises(TimeoutError, match="SIGALRM"):
            send(connection, [b"third"])
    assert "TimeoutError" in str(await recorder.wait_lost())
    assert [str(error) for error in raised] == (["the handler of SIGALRM"] if full else [])
    far.close()


async def speak_to_each_other(*, sealed: bool, together: int) -> None:
    """Have both ends of a connection send 199 frames, so many at a time."""
    sockets = sealed_pair() if sealed else socket.socketpair()
    ends = [connection_on(sock) for sock in sockets]
    recorders = [Recorder(), Recorder()]
    for end, recorder in zip(ends, recorders, strict=True):
        end.start(recorder)
    sent = [bytes((number,)) * (number * 37 % ends[0].max_frame) for number in range(1, 200)]
    for at in range(0, len(sent), together):
        for end in ends:
            send(end, sent[at : at + together])
        await turns(1)
    for recorder in recorders:
        assert await recorder.wait_frames(len(sent)) == sent
    await ends[0].aclose()
    assert isinstance(await recorders[1].wait_lost(), ConnectionLost)


@pytest.mark.parametrize("kept", range(len(FRAME) + 1))
async def test_stream_cut_at_every_byte(wired: Wired, kept: int) -> None:
    _, recorder, far = wired
    far.send(FRAME + FRAME[:kept])
    far.close()
    assert isinstance(await recorder.wait_lost(), ConnectionLost)
    assert recorder.frames == [FRAME[4:]] * (2 if kept == len(FRAME) else 1)
    await turns()
    assert len(recorder.lost) == 1


async def test_one_byte_at_a_time(wired: Wired) -> None:
    _, recorder, far = wired
    for byte in FRAME * 3:
        far.send(bytes((byte,)))
        await turns(2)
    assert await recorder.wait_frames(3) == [FRAME[4:]] * 3


@pytest.mark.parametrize("first", [1, 3, 4, 5, 23])
async def test_partial_frame_before_a_bad_prefix(wired: Wired, first: int) -> None:
    _, recorder, far = wired
    data = FRAME + b"\xff\xff\xff\xff"
    far.send(data[:first])
    await turns()
    far.send(data[first:])
    assert isinstance(await recorder.wait_lost(), ProtocolError)
    assert recorder.frames == [FRAME[4:]]


async def test_whole_frame_beyond_the_limit(wired: Wired) -> None:
    connection, recorder, far = wired
    nbytes = connection.max_frame + 1
    far.send(struct.pack("<I", nbytes) + bytes(nbytes))
    assert isinstance(await recorder.wait_lost(), ProtocolError)
    assert recorder.frames == []


async def test_end_is_noticed_while_nothing_is_read_or_written(wired: Wired) -> None:
    connection, recorder, far = wired
    send(connection, [b"the peer never reads this, so its end leaves an error on the socket"])
    far.send(FRAME * 3)
    far.close()
    assert isinstance(await recorder.wait_lost(), ConnectionLost)
    assert recorder.frames == [FRAME[4:]] * 3


async def test_blocked_sender_hears_of_the_end(wired: Wired) -> None:
    connection, recorder, far = wired
    for _ in range(200):
        put(connection, b"." * connection.max_frame)
    connection.flush()
    closing = asyncio.create_task(connection.aclose())
    await turns()
    assert not closing.done()
    far.close()
    await closing
    assert recorder.lost == [None]


async def test_peer_that_only_stops_reading(wired: Wired) -> None:
    connection, recorder, far = wired
    far.shutdown(socket.SHUT_RD)
    send(connection, [b"refused"])
    cause = await recorder.wait_lost()
    assert isinstance(cause, ConnectionLost)
    assert isinstance(cause.__cause__, BrokenPipeError)


async def test_abort_from_another_thread(wired: Wired) -> None:
    connection, recorder, _ = wired
    await asyncio.to_thread(connection.abort)
    assert await recorder.wait_lost() is None


async def test_other_threads_see_the_peers_end_before_and_after_the_loop_does(wired: Wired) -> None:
    connection, recorder, far = wired
    assert not await asyncio.to_thread(connection.hung_up)
    assert connection.turns_behind() == 0
    far.close()
    assert connection.hung_up() and connection.turns_behind() > 0
    await recorder.wait_lost()
    assert await asyncio.to_thread(connection.hung_up)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_abort_in_a_forked_child_harms_nobody(wired: Wired) -> None:
    connection, recorder, far = wired
    child = os.fork()
    if child == 0:
        connection.abort()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    far.send(FRAME)
    await recorder.wait_frames(1)
    send(connection, [FRAME[4:]])
    assert far.recv(100) == FRAME
    assert recorder.lost == []


async def test_causes_name_the_process(wired: Wired) -> None:
    connection, recorder, far = wired
    assert "4242" in repr(connection)
    far.close()
    assert "process 4242 closed the connection" in str(await recorder.wait_lost())
    with pytest.raises(ConnectionLost, match="4242"):
        connection.reserve(10)


async def test_lets_go_of_descriptors_and_receiver() -> None:
    before = len(os.listdir("/proc/self/fd"))
    near, far = socket.socketpair()
    connection, recorder = connection_on(near), Recorder()
    connection.start(recorder)
    far.close()
    await recorder.wait_lost()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_end_is_not_reported_before_the_fence_is_up() -> None:
    waiting: list[Callable[[], None]] = []

    class Fenced(StreamConnection):
        def _fence(self, then: Callable[[], None]) -> None:
            waiting.append(then)

    near, far = socket.socketpair()
    connection, recorder = connection_on(near, Fenced), Recorder()
    connection.start(recorder)
    far.close()
    while not waiting:
        await asyncio.sleep(0)
    closing = asyncio.create_task(connection.aclose())
    await turns()
    assert recorder.lost == []
    assert not closing.done()
    waiting.pop()()
    await closing
    assert isinstance(recorder.lost[0], ConnectionLost)
    assert (len(recorder.lost), waiting) == (1, [])


async def test_lingers_between_the_last_byte_and_closing() -> None:
    lingering, go_on = asyncio.Event(), asyncio.Event()

    class Lingering(StreamConnection):
        async def _linger(self) -> None:
            lingering.set()
            await go_on.wait()

    near, far = socket.socketpair()
    with far:
        connection = connection_on(near, Lingering)
        put(connection, b"last")
        closing = asyncio.create_task(connection.aclose())
        await lingering.wait()
        assert far.recv(100)[4:] == b"last"
        assert "closing" in repr(connection)
        go_on.set()
        await closing
        assert far.recv(100) == b""


async def test_messages_say_where_the_peer_is() -> None:
    near, far = socket.socketpair()
    with far:
        connection = connection_on(near, where=" at 10.1.2.3")
        connection.abort()
        with pytest.raises(ConnectionLost, match="process 4242 at 10.1.2.3 is closed"):
            connection.reserve(10)
