"""Pulls over data sockets: sharing them, opening new ones, and holding memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from tests.conformance.connection import PullKeeper, turns
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.tcp import crew
from zcactor.transport.tcp import pull as tcp_pull
from zcactor.transport.tcp.data import REQUEST, Answer, Channel
from zcactor.transport.tcp.flow import take_flows
from zcactor.transport.tcp.pull import ATTEMPTS, STREAMS, DataPuller

CONTENT = os.urandom(1 << 16)
Serve = Callable[[socket.socket], None]


def serve_all(sock: socket.socket) -> None:
    """Answer every request."""
    while serve_one(sock):
        pass


def serve_one(sock: socket.socket) -> bool:
    """Answer one request; return False at the end of the stream."""
    request = sock.recv(REQUEST.size, socket.MSG_WAITALL)
    if not request:
        return False
    _, offset, nbytes = REQUEST.unpack(request)
    sock.sendall(bytes((Answer.OK,)) + CONTENT[offset : offset + nbytes])
    return True


@dataclass
class Owner:
    """The owner behind the data sockets: each of `scripts` serves one socket, and `serve_all` the later ones."""

    scripts: list[Serve] = field(default_factory=list)
    opened: int = 0
    unreachable: int = 0
    """The number of attempts to connect that fail at first."""
    threads: list[threading.Thread] = field(default_factory=list)

    channel: type[Channel] = Channel

    async def connect(self) -> Channel:
        """Connect as the puller's callback."""
        await asyncio.sleep(0)
        if self.unreachable:
            self.unreachable -= 1
            raise ConnectionLost("nobody listens")
        near, far = socket.socketpair()
        script = self.scripts.pop(0) if self.scripts else serve_all
        self.opened += 1

        def run() -> None:
            with far, contextlib.suppress(OSError):  # the puller may have gone
                script(far)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return self.channel(near)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def puller(owner: Owner) -> AsyncIterator[DataPuller]:
    puller = DataPuller("process 4242", owner.connect)
    yield puller
    puller.close()
    for thread in owner.threads:
        await asyncio.to_thread(thread.join)


async def pull(puller: DataPuller, offset: int, nbytes: int, keep: object = None) -> bytes:
    destination = bytearray(nbytes)
    await puller.pull(
        RemoteRegion(1, offset, nbytes), ctypes.addressof(ctypes.c_char.from_buffer(destination)), (destination, keep)
    )
    return bytes(destination)


async def test_one_socket_for_pulls_after_each_other(owner: Owner, puller: DataPuller) -> None:
    for offset in range(0, 50_000, 997):
        assert await pull(puller, offset, 10_000) == CONTENT[offset : offset + 10_000]
    assert owner.opened == 1


async def test_several_at_once_share_a_few(owner: Owner, puller: DataPuller) -> None:
    everybody = threading.Barrier(STREAMS)

    def together(sock: socket.socket) -> None:
        everybody.wait()
        serve_all(sock)

    owner.scripts = [together] * STREAMS
    pulled = await asyncio.gather(*(pull(puller, i, 1000) for i in range(40)))
    assert pulled == [CONTENT[i : i + 1000] for i in range(40)]
    assert owner.opened == STREAMS


async def test_large_object_comes_in_pieces(owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pull, "PARALLEL_NBYTES", 10_000)
    monkeypatch.setattr(tcp_pull, "PIECE_NBYTES", 999)
    assert await pull(puller, 5, 9_999) == CONTENT[5:10_004]
    assert owner.opened == 1
    assert await pull(puller, 5, 60_000) == CONTENT[5:60_005]
    assert 1 < owner.opened <= STREAMS


CUTS: list[Serve] = [
    lambda _: None,
    lambda sock: (sock.recv(100), None)[1],
    lambda sock: (sock.recv(100), sock.send(bytes(1)), None)[2],
    lambda sock: (sock.recv(100), sock.send(bytes(10)), None)[2],
]


@pytest.mark.parametrize("cut", CUTS, ids=["at once", "before the answer", "after the answer", "in the middle"])
async def test_socket_that_breaks(owner: Owner, puller: DataPuller, cut: Serve) -> None:
    owner.scripts = [cut]
    assert await pull(puller, 0, 1000) == CONTENT[:1000]
    assert owner.opened == 2


@pytest.mark.parametrize("cut", CUTS, ids=["at once", "before the answer", "after the answer", "in the middle"])
async def test_sockets_that_break_again(owner: Owner, puller: DataPuller, cut: Serve) -> None:
    owner.scripts = [cut] * 2
    with pytest.raises(ConnectionLost, match="process 4242 did not send 1000 bytes"):
        await pull(puller, 0, 1000)
    assert await pull(puller, 0, 1000) == CONTENT[:1000]


async def test_socket_that_was_closed_while_it_lay_idle(owner: Owner, puller: DataPuller) -> None:
    owner.scripts = [lambda sock: (serve_one(sock), sock.recv(1), None)[2]] * 3
    for _ in range(4):
        assert await pull(puller, 7, 100) == CONTENT[7:107]
    assert owner.opened == 4


async def test_owner_that_closes_right_after_the_last_byte_is_not_trusted(owner: Owner, puller: DataPuller) -> None:
    received = threading.Event()

    def fenced(sock: socket.socket) -> None:
        sock.recv(100)
        sock.send(bytes(1) + b"reused")
        sock.shutdown(socket.SHUT_RDWR)
        received.set()

    owner.scripts = [fenced]
    assert await pull(puller, 0, 6) in (CONTENT[:6], b"reused")
    await asyncio.to_thread(received.wait)


async def test_refused(owner: Owner, puller: DataPuller) -> None:
    def refuse(sock: socket.socket) -> None:
        sock.recv(100)
        sock.send(bytes((Answer.REFUSED,)))
        serve_all(sock)

    owner.scripts = [refuse]
    with pytest.raises(ObjectLost, match="process 4242 does not have object 1 "):
        await pull(puller, 0, 1000)
    assert await pull(puller, 0, 1000) == CONTENT[:1000]
    assert owner.opened == 1


async def test_one_piece_refused_ends_the_others(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PARALLEL_NBYTES", 10_000)
    monkeypatch.setattr(tcp_pull, "PIECE_NBYTES", 1000)

    def refuse(sock: socket.socket) -> None:
        sock.recv(REQUEST.size)
        sock.send(bytes((Answer.REFUSED,)))

    owner.scripts = [serve_all, refuse, silent, silent]
    keeper = PullKeeper()
    held = weakref.ref(keeper)
    with pytest.raises(ObjectLost):
        await pull(puller, 0, 60_000, keeper)
    del keeper
    while held() is not None:
        await asyncio.sleep(0)


def silent(sock: socket.socket) -> None:
    """Wait until the puller has gone."""
    while sock.recv(100):
        pass


async def test_owner_that_cannot_be_reached(owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    owner.unreachable = ATTEMPTS
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await pull(puller, 0, 10)
    assert owner.unreachable == owner.opened == 0


async def test_owner_that_cannot_be_reached_for_a_moment(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    owner.unreachable = ATTEMPTS - 1
    assert await pull(puller, 0, 10) == CONTENT[:10]


async def offered_channel(owner: Owner) -> Channel:
    owner.unreachable, kept = 0, owner.unreachable
    channel = await owner.connect()
    owner.unreachable = kept
    return channel


async def test_an_owner_that_cannot_be_dialled_dials(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    owner.unreachable = ATTEMPTS
    asked = asyncio.Event()
    puller.ask = asked.set
    first = asyncio.create_task(pull(puller, 0, 10))
    await asked.wait()
    puller.offered(await offered_channel(owner))
    assert await first == CONTENT[:10]
    assert puller.undialled == "nobody listens" and owner.unreachable == 0
    assert await pull(puller, 1, 10) == CONTENT[1:11]  # by the same socket
    assert owner.opened == 1


async def test_two_pulls_of_an_owner_that_is_known_to_dial(owner: Owner, puller: DataPuller) -> None:
    owner.unreachable = 1 << 30
    asked: list[int] = []
    puller.ask = lambda: asked.append(1)
    puller.undialled = "nobody listens"
    pulls = [asyncio.create_task(pull(puller, at, 10)) for at in (0, 7)]
    while len(asked) < 2:
        await asyncio.sleep(0)
    for _ in pulls:
        puller.offered(await offered_channel(owner))
    assert await asyncio.gather(*pulls) == [CONTENT[:10], CONTENT[7:17]]
    assert owner.unreachable == 1 << 30


async def test_a_cancelled_pull_leaves_its_socket_to_the_next_one(owner: Owner, puller: DataPuller) -> None:
    asked = asyncio.Event()
    puller.ask = asked.set
    puller.undialled = "nobody listens"
    cancelled = asyncio.create_task(pull(puller, 0, 10))
    await asked.wait()
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    puller.offered(await offered_channel(owner))
    assert await pull(puller, 3, 10) == CONTENT[3:13]
    assert owner.opened == 1


async def test_an_owner_that_neither_can_be_dialled_nor_dials(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    monkeypatch.setattr(tcp_pull, "COMES_WITHIN", 0.01)
    puller.ask = lambda: None
    for _ in range(2):
        owner.unreachable = ATTEMPTS
        with pytest.raises(ConnectionLost, match=r"nobody listens; asked .* opened none within 0.01 s"):
            await pull(puller, 0, 10)
    assert await pull(puller, 0, 10) == CONTENT[:10]  # it can be reached now
    assert puller.undialled == ""


async def test_an_owner_that_is_slow_and_comes_nevertheless(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways lead to a socket, and none is lost."""
    monkeypatch.setattr(tcp_pull, "HEADSTART", 0.0)
    asked = asyncio.Event()
    puller.ask = asked.set
    go_on = asyncio.Event()

    async def slowly() -> Channel:
        await go_on.wait()
        return await owner.connect()

    puller._connect = slowly
    first = asyncio.create_task(pull(puller, 0, 10))
    await asked.wait()
    go_on.set()
    assert await first == CONTENT[:10]
    assert puller.undialled == ""
    puller.offered(await offered_channel(owner))
    assert len(puller._idle) == 2


async def test_cancelled_pull_holds_its_memory_until_the_thread_has_ended(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, go_on = threading.Event(), threading.Event()
    really_end = Channel.end

    def end_later(channel: Channel) -> None:
        ended.set()
        threading.Thread(target=lambda: (go_on.wait(), really_end(channel))).start()

    monkeypatch.setattr(Channel, "end", end_later)
    owner.scripts = [silent]
    keeper = PullKeeper()
    held = weakref.ref(keeper)
    task = asyncio.create_task(pull(puller, 0, 1000, keeper))
    del keeper
    while not owner.opened:
        await asyncio.sleep(0)
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert ended.is_set()
    await turns(50)
    assert held() is not None
    assert await pull(puller, 0, 10) == CONTENT[:10]
    go_on.set()
    while held() is not None:
        await asyncio.sleep(0)


async def test_cancelling_one_leaves_the_others(owner: Owner, puller: DataPuller) -> None:
    owner.scripts = [silent]
    stuck = asyncio.create_task(pull(puller, 0, 1000))
    while not owner.opened:
        await asyncio.sleep(0)
    others = [asyncio.create_task(pull(puller, i, 1000)) for i in range(10)]
    await turns()
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    assert await asyncio.gather(*others) == [CONTENT[i : i + 1000] for i in range(10)]


async def test_closing_interrupts_all(owner: Owner, puller: DataPuller) -> None:
    owner.scripts = [silent] * STREAMS
    tasks = [asyncio.create_task(pull(puller, 0, 1000)) for _ in range(2 * STREAMS)]  # half of them wait for a stream
    while owner.opened < STREAMS:
        await asyncio.sleep(0)
    puller.close()
    puller.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, ConnectionLost)
        assert "the connection to process 4242 has ended" in str(outcome)
    with pytest.raises(ConnectionLost, match="has ended"):
        await pull(puller, 0, 10)


async def test_closing_leaves_no_frame_behind(owner: Owner, puller: DataPuller) -> None:
    owner.scripts = [silent]
    kept = list[weakref.ref[threading.Event]]()

    async def work() -> None:
        memory = threading.Event()  # any object that can be referred to weakly
        kept.append(weakref.ref(memory))
        await pull(puller, 0, 1000)

    gc.collect()
    gc.disable()  # objects that only the collector finds stay
    try:
        task = asyncio.create_task(work())
        while not owner.opened:
            await asyncio.sleep(0)
        puller.close()
        await asyncio.wait([task])
        assert isinstance(task.exception(), ConnectionLost)
        del task
        while kept[0]() is not None:  # the thread lets go of the request a moment later
            await asyncio.sleep(0)
    finally:
        gc.enable()


async def test_threads_and_descriptors_end(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "REST", 0.01)
    monkeypatch.setattr(crew, "_crew", crew.Crew())
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    puller = DataPuller("process 4242", owner.connect)
    await asyncio.gather(*(pull(puller, 0, 1000) for _ in range(10)))
    puller.close()
    while set(threading.enumerate()) - threads:
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before


# ---------------------------------------------------------------- flows


async def flowed(puller: DataPuller, nbytes: int = 30_000) -> bytes | None:
    """The bytes of a flow; None where a thread did not take them."""
    flow = await puller.flow(RemoteRegion(1, 7, nbytes))
    if flow is None:
        return None
    into = bytearray(nbytes)

    def take() -> None:
        flow.begin()
        for at in range(0, nbytes, 999):
            flow.take(memoryview(into)[at : at + 999])

    return bytes(into) if await take_flows([flow], take) else None


async def test_a_flow_leaves_its_socket_to_the_next_one(owner: Owner, puller: DataPuller) -> None:
    for nbytes in (1, 30_000, 30_000):
        assert await flowed(puller, nbytes) == CONTENT[7 : 7 + nbytes]
        assert await pull(puller, 3, 10) == CONTENT[3:13]
    assert owner.opened == 1


async def test_a_flow_does_not_wait_for_a_socket(owner: Owner, puller: DataPuller) -> None:
    flows = [await puller.flow(RemoteRegion(1, 0, 10)) for _ in range(STREAMS + 1)]
    assert flows.pop() is None
    assert await flowed(puller) is None
    for flow in flows:
        assert flow is not None
        flow.end()
        flow.left()
    assert await flowed(puller) == CONTENT[7:30_007], "their turns are given back"
    assert owner.opened == STREAMS + 1


async def test_a_flow_from_an_owner_that_cannot_be_reached(
    owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    owner.unreachable = ATTEMPTS
    assert await flowed(puller) is None
    assert await flowed(puller) == CONTENT[7:30_007]


def cut_within(sock: socket.socket) -> None:
    """Answer a part of one request."""
    sock.recv(REQUEST.size, socket.MSG_WAITALL)
    sock.sendall(bytes((Answer.OK,)) + CONTENT[7:5_000])


def refuse(sock: socket.socket) -> None:
    sock.recv(REQUEST.size, socket.MSG_WAITALL)
    sock.sendall(bytes((Answer.REFUSED,)))
    sock.recv(1)


@pytest.mark.parametrize("script", [cut_within, refuse])
async def test_a_flow_that_breaks_ends_its_socket(owner: Owner, puller: DataPuller, script: Serve) -> None:
    owner.scripts.append(script)
    assert await flowed(puller) is None
    assert await flowed(puller) == CONTENT[7:30_007]
    assert owner.opened == 2


class ForgedChannel(Channel):
    """A channel whose answers are not the owner's."""

    def answered(self) -> bool:
        raise ProtocolError("forged")


class CheckedChannel(Channel):
    """A channel whose bytes have to be checked before their use."""

    def is_bare(self, *, authenticate: bool, sealed: bool) -> bool:
        return False


async def test_a_flow_from_an_owner_that_violates_the_protocol(owner: Owner) -> None:
    violations: list[ProtocolError] = []
    owner.channel = ForgedChannel
    puller = DataPuller("process 4242", owner.connect, violations.append)
    assert await flowed(puller) is None
    assert [str(each) for each in violations] == ["forged"]
    puller.close()


async def test_bytes_that_have_to_be_checked_do_not_flow(owner: Owner, puller: DataPuller) -> None:
    owner.channel = CheckedChannel
    for _ in range(STREAMS + 2):
        assert await puller.flow(RemoteRegion(1, 0, 10)) is None
    assert await pull(puller, 3, 10) == CONTENT[3:13]
    assert owner.opened == 1


async def test_closing_ends_flows(owner: Owner, puller: DataPuller) -> None:
    owner.scripts.append(silent)
    flow = await puller.flow(RemoteRegion(1, 0, 10))
    assert flow is not None

    def take() -> None:
        flow.begin()
        flow.take(memoryview(bytearray(10)))

    taking = asyncio.ensure_future(take_flows([flow], take))
    await turns()
    puller.close()
    assert await taking is False
    assert await puller.flow(RemoteRegion(1, 0, 10)) is None


async def test_out_of_threads(owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch) -> None:
    really_start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "zcactor data":
            raise RuntimeError("can't start new thread")
        really_start(thread)

    monkeypatch.setattr(crew, "_crew", crew.Crew())  # a crew without a resting thread
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConnectionLost, match="no thread is left"):
        await pull(puller, 0, 10)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_forked_child_lets_go(owner: Owner, puller: DataPuller) -> None:
    assert await pull(puller, 0, 10) == CONTENT[:10]
    child = os.fork()
    if child == 0:
        puller.abandon()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert await pull(puller, 0, 10) == CONTENT[:10]
    assert owner.opened == 1


# ---- any error in the thread


class Failing(Channel):
    """A channel that raises `error` at one step of a request."""

    step = ""
    error: BaseException

    def _at(self, step: str) -> None:
        if step == type(self).step:
            raise self.error

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Send the request."""
        self._at("send")
        super().send(data, more=more)

    def receive(self, view: memoryview, looking: int = 0) -> bool:
        """Receive the answer, then the bytes."""
        self._at("before the answer" if len(view) == 1 else "before the bytes")
        received = super().receive(view, looking)
        self._at("after the answer" if len(view) == 1 else "after the bytes")
        return received

    def check_alive(self) -> None:
        """Check as the last step."""
        self._at("check")
        super().check_alive()


STEPS = ["send", "before the answer", "after the answer", "before the bytes", "after the bytes", "check"]
ERRORS = [ProtocolError("wrong tag"), MemoryError("no"), ValueError("closed"), SystemError("bad call")]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_is_raised_in_the_thread_reaches_who_waits(owner: Owner, step: str, error: Exception) -> None:
    class FailingNow(Failing):
        """A class for this test alone, because its step is changed."""

    FailingNow.step, FailingNow.error = step, error
    violations: list[Exception] = []
    owner.channel = FailingNow
    puller = DataPuller("process 4242", owner.connect, violations.append)
    keeper = PullKeeper()
    held = weakref.ref(keeper)
    with pytest.raises(type(error)) as raised:
        await pull(puller, 0, 1000, keeper)
    assert raised.value is error
    assert violations == ([error] if isinstance(error, ProtocolError) else [])
    error.__traceback__ = None
    del keeper, raised
    while held() is not None:
        await asyncio.sleep(0)
    for thread in owner.threads:  # the stream was closed, so the owner's thread ends
        await asyncio.to_thread(thread.join)
    FailingNow.step = ""
    pulled = await asyncio.gather(*(pull(puller, i, 1000) for i in range(2 * STREAMS)))  # no turn was lost
    assert pulled == [CONTENT[i : i + 1000] for i in range(2 * STREAMS)]
    puller.close()
    for thread in owner.threads:
        await asyncio.to_thread(thread.join)


async def test_idle_streams_end(owner: Owner, puller: DataPuller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pull, "IDLE", 0.005)
    monkeypatch.setattr(crew, "REST", 0.01)
    monkeypatch.setattr(crew, "_crew", crew.Crew())
    threads = set(threading.enumerate())
    for round_ in range(2):
        pulled = await asyncio.gather(*(pull(puller, i, 1000) for i in range(2 * STREAMS)))
        assert pulled == [CONTENT[i : i + 1000] for i in range(2 * STREAMS)]
        while any(thread.is_alive() for thread in owner.threads):
            await asyncio.sleep(0)
        while puller._streams or puller._look is not None:
            await asyncio.sleep(0)
        assert owner.opened > round_
    while set(threading.enumerate()) - threads:
        await asyncio.sleep(0)


async def test_many_pullers_take_few_threads(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_crew", crew.Crew())
    pullers = [DataPuller("process 4242", owner.connect) for _ in range(50)]
    for puller in pullers:
        assert await pull(puller, 7, 100) == CONTENT[7:107]
    assert len(crew._crew._resting) <= crew.SPARE
    for puller in pullers:
        puller.close()
    for thread in owner.threads:
        await asyncio.to_thread(thread.join)
