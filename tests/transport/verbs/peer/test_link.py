"""`Link`: messages over a socket with any cuts, a full socket, and every way to end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from tests.conformance.connection import turns
from zcactor.errors import ProtocolError
from zcactor.transport.verbs.peer.bootstrap import (
    MAX_MESSAGE,
    Ask,
    Exported,
    Message,
    PathVerdict,
    Rebuild,
    Resume,
    encode,
)
from zcactor.transport.verbs.peer.link import Link

MESSAGES: list[Message] = [
    Ask(1, 2, 3, 4), Exported(1, ((2, 3),), 3), Exported(2, reason="é" * 300), Rebuild(1, 2), Resume(1), PathVerdict(),
]  # fmt: skip
STREAM = b"".join(map(encode, MESSAGES))
GARBAGE = b"\x01\x00\x00\x00\xc1"


def noting(note: Callable[[int], None], do: Callable[..., object]) -> Callable[..., None]:
    """Call `note` with a descriptor, and then `do` with all arguments."""

    def both(fd: int, *call: Callable[[], None]) -> None:
        note(fd)
        do(fd, *call)

    return both


class Watches:
    """A loop as a link sees it, which records the descriptors to watch; uvloop itself does not tell them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.readers: set[int] = set()
        self.writers: set[int] = set()
        self.add_reader = noting(self.readers.add, loop.add_reader)
        self.remove_reader = noting(self.readers.discard, loop.remove_reader)
        self.add_writer = noting(self.writers.add, loop.add_writer)
        self.remove_writer = noting(self.writers.discard, loop.remove_writer)
        self.call_later = loop.call_later


class End:
    """A link, and its callbacks' records."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.watches = Watches(loop)
        self.taken: list[Message] = []
        self.failures: list[ProtocolError] = []
        self.ends: list[str] = []
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_end: Callable[[], None] = lambda: None
        self.link = Link(
            sock, cast(asyncio.AbstractEventLoop, self.watches), self._take, self.failures.append, self._ended
        )

    def _take(self, message: Message) -> None:
        self.taken.append(message)
        self.on_message(message)

    def _ended(self, how: str, _: OSError | None) -> None:
        self.ends.append(how)
        self.on_end()

    def fill(self) -> list[Message]:
        """Send more than a socket with a small buffer takes; return the messages."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        many: list[Message] = [Exported(number, reason="x" * 900) for number in range(200)]
        for message in many:
            self.link.tell(message)
        return many

    def watched(self) -> bool:
        """Whether the loop watches the socket."""
        return bool(self.watches.readers or self.watches.writers)


class Room:
    """One link, and at the other end a second link or a bare socket."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.unhandled: list[dict[str, object]] = []
        self.loop.set_exception_handler(lambda loop, context: self.unhandled.append(context))
        ours, self.sock = socket.socketpair()
        self.end = End(ours, self.loop)
        self.peer: End | None = None

    def join(self) -> End:
        """Make a link at the other end as well."""
        self.peer = End(self.sock, self.loop)
        return self.peer

    def close(self) -> None:
        """Close both ends."""
        self.end.link.close()
        if self.peer is not None:
            self.peer.link.close()
        self.sock.close()


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    room = Room()
    yield room
    room.close()
    await turns()
    assert not room.unhandled


async def until(done: Callable[[], bool]) -> None:
    """Run turns of the loop until the condition holds; the test's time limit is the bound."""
    while not done():
        await asyncio.sleep(0)


# ---- messages


async def test_both_ways(room: Room) -> None:
    left, right = room.end, room.join()
    for message in MESSAGES:
        left.link.tell(message)
        right.link.tell(message)
    await until(lambda: len(left.taken) == len(right.taken) == len(MESSAGES))
    assert left.taken == right.taken == MESSAGES
    assert not (left.failures or left.ends or right.failures or right.ends)


async def test_cut_at_every_byte(room: Room) -> None:
    end = room.end
    for cut in range(1, len(STREAM)):
        end.taken.clear()
        room.sock.send(STREAM[:cut])
        await turns(2)
        before = len(end.taken)
        assert end.taken == MESSAGES[:before] and before < len(MESSAGES)
        room.sock.send(STREAM[cut:])
        await until(lambda: len(end.taken) == len(MESSAGES))
        assert end.taken == MESSAGES
    assert not end.failures and not end.ends


async def test_byte_by_byte(room: Room) -> None:
    for i in range(len(STREAM)):
        room.sock.send(STREAM[i : i + 1])
        await turns(2)
    await until(lambda: len(room.end.taken) == len(MESSAGES))
    assert room.end.taken == MESSAGES


async def test_many_at_once(room: Room) -> None:
    """These are more messages than one read brings."""
    many: list[Message] = [Ask(number, number, 0, 1) for number in range(1000)]
    stream = b"".join(map(encode, many))
    assert len(stream) > 3 * 8192
    await room.loop.sock_sendall(nonblocking(room.sock), stream)
    await until(lambda: len(room.end.taken) == len(many))
    assert room.end.taken == many


def nonblocking(sock: socket.socket) -> socket.socket:
    """Make the socket non-blocking, and return it."""
    sock.setblocking(False)
    return sock


async def test_full_socket_goes_on_when_it_is_writable(room: Room) -> None:
    many = room.end.fill()
    with pytest.raises(BlockingIOError):
        room.end.sock.send(b"x")
    assert room.end.watches.writers
    peer = room.join()
    await until(lambda: len(peer.taken) == len(many))
    assert peer.taken == many and not peer.failures
    await turns()
    assert not room.end.watches.writers, "nothing is left to write, and the loop would spin"


async def test_told_in_the_middle_of_taking(room: Room) -> None:
    left, right = room.end, room.join()
    right.on_message = right.link.tell
    for message in MESSAGES:
        left.link.tell(message)
    await until(lambda: len(left.taken) == len(MESSAGES))
    assert left.taken == MESSAGES


# ---- mistakes of the peer


@pytest.mark.parametrize(
    "data", [GARBAGE, bytes(4), b"\xff\xff\xff\xff", (MAX_MESSAGE + 1).to_bytes(4, "little")], ids=bytes.hex
)
async def test_garbage(room: Room, data: bytes) -> None:
    end = room.end
    room.sock.send(encode(Resume(1)))
    await until(lambda: bool(end.taken))
    room.sock.send(data)
    await until(lambda: bool(end.failures))
    assert end.taken == [Resume(1)] and not end.ends
    assert isinstance(end.failures[0], ProtocolError)


async def test_after_garbage_only_the_end_counts(room: Room) -> None:
    """The error refers to the bytes by its traceback, and the owner may keep both the error and the link."""
    end = room.end
    room.sock.send(GARBAGE)
    await until(lambda: bool(end.failures))
    for _ in range(3):
        room.sock.send(STREAM)
        await turns()
    assert len(end.failures) == 1 and not end.taken
    end.link.tell(Resume(1))
    assert room.sock.recv(100) == encode(Resume(1))
    room.sock.close()
    await until(lambda: bool(end.ends))
    assert end.ends == ["was closed by the peer"] and not end.watched()


async def test_message_without_a_place(room: Room) -> None:
    end, wrong = room.end, ProtocolError("it has no place")

    def refuse(message: Message) -> None:
        if isinstance(message, Exported):
            raise wrong

    end.on_message = refuse
    room.sock.send(STREAM)
    await until(lambda: bool(end.failures))
    await turns()
    assert end.failures == [wrong]
    assert end.taken == MESSAGES[:2], "nothing is taken that came behind it"


async def test_garbage_closes(room: Room) -> None:
    """Every owner closes the link after garbage."""
    failures: list[ProtocolError] = []
    ours, theirs = socket.socketpair()

    def failed(error: ProtocolError) -> None:
        failures.append(error)
        link.close()

    ours.setblocking(False)
    link = Link(ours, room.loop, lambda message: None, failed, lambda how, _: pytest.fail(how))
    theirs.send(GARBAGE)
    await until(lambda: bool(failures))
    assert theirs.recv(1) == b""
    theirs.close()
    await turns()
    assert len(failures) == 1


# ---- the end


async def test_end_of_the_stream(room: Room) -> None:
    end = room.end
    room.sock.send(STREAM[:-1])
    room.sock.close()
    await until(lambda: bool(end.ends))
    assert end.taken == MESSAGES[:-1]
    await turns()
    assert end.ends == ["was closed by the peer"] and not end.failures
    assert not end.watched()


async def tcp() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets, which unlike a socket pair can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


async def test_reset(room: Room) -> None:
    ours, theirs = await tcp()
    end = End(ours, room.loop)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    await until(lambda: bool(end.ends))
    await turns()
    assert end.ends == ["broke: Connection reset by peer"]
    assert not end.watched()
    end.link.close()


async def test_end_that_is_met_by_telling(room: Room) -> None:
    end = room.end
    room.sock.close()
    for _ in range(3):
        end.link.tell(Resume(1))
    assert end.ends == ["broke: Broken pipe"]
    assert not end.watched()
    await turns()
    assert len(end.ends) == 1


async def test_end_while_the_socket_is_full(room: Room) -> None:
    end = room.end
    end.fill()
    room.sock.close()
    await until(lambda: bool(end.ends))
    await turns()
    assert len(end.ends) == 1 and not end.watched()


async def test_told_after_the_end(room: Room) -> None:
    """The owner may send a message while it hears of the end, before it closes the link."""
    end = room.end
    end.on_end = lambda: end.link.tell(Resume(1))
    room.sock.close()
    await until(lambda: bool(end.ends))
    end.link.tell(Resume(2))
    assert end.ends == ["was closed by the peer"] and not end.watched()


async def test_nothing_is_taken_after_the_end(room: Room) -> None:
    """An answer to the first message finds the socket broken, while further messages wait in the same read."""
    end = room.end
    end.on_message = lambda message: end.link.tell(Resume(1))
    room.sock.send(STREAM)
    room.sock.close()
    await until(lambda: bool(end.ends))
    await turns()
    assert end.taken == MESSAGES[:1] and len(end.ends) == 1 and not end.failures


# ---- closing


async def test_close(room: Room) -> None:
    end = room.end
    room.sock.send(STREAM)
    for _ in range(3):
        end.link.close()
    assert end.sock.fileno() == -1
    assert not end.watched()
    await turns()
    assert not (end.taken or end.failures or end.ends)
    with pytest.raises(ConnectionResetError):
        room.sock.recv(1)  # sent bytes were not read


async def test_close_while_the_socket_is_full(room: Room) -> None:
    end = room.end
    end.fill()
    end.link.close()
    assert not end.watched()
    await turns()
    assert not end.ends


async def test_tell_after_close(room: Room) -> None:
    room.end.link.close()
    room.end.link.tell(Resume(1))
    assert room.sock.recv(100) == b""
    assert not room.end.watched() and not room.end.ends


async def test_close_after_the_end(room: Room) -> None:
    room.end.on_end = room.end.link.close
    room.sock.close()
    await until(lambda: bool(room.end.ends))
    room.end.link.close()
    assert room.end.ends == ["was closed by the peer"] and room.end.sock.fileno() == -1


@pytest.mark.parametrize("count", range(1, len(MESSAGES) + 1))
async def test_message_that_closes(room: Room, count: int) -> None:
    """Messages that came in the same read are dropped, and so is garbage."""
    end = room.end

    def close(message: Message) -> None:
        if len(end.taken) == count:
            end.link.close()

    end.on_message = close
    room.sock.send(STREAM)
    await until(lambda: len(end.taken) == count)
    await turns()
    assert end.taken == MESSAGES[:count]
    assert not end.failures and not end.ends and not end.watched()


async def test_message_that_closes_and_is_refused(room: Room) -> None:
    end = room.end

    def close(message: Message) -> None:
        end.link.close()
        raise ProtocolError(f"no place for {message}")

    end.on_message = close
    room.sock.send(STREAM)
    await until(lambda: bool(end.taken))
    await turns()
    assert len(end.taken) == 1 and not end.failures, "nobody is there any more to be told"


async def test_abandon(room: Room) -> None:
    """A forked child abandons its copy of a link, whose loop is the parent's."""
    end = room.end
    room.loop.remove_reader(end.sock.fileno())  # the loop goes by the number, and would not find the socket later
    end.link.abandon()
    assert end.watches.readers, "the parent's loop goes on"
    end.link.tell(Resume(1))
    end.link.close()
    assert room.sock.recv(100) == b"" and not end.ends
