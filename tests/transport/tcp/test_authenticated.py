"""Data sockets with keys: authenticated bytes, one by one, and the effect of a wrong bit, a replay or a fork."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from tests.conformance.connection import ARENA_NBYTES, ConnectedPair, Recorder, connect, finish, turns
from tests.transport.local_arena import memfd
from tests.transport.outsiders import Relay
from tests.transport.tcp_arena import tcp_side
from zcactor.errors import ConnectionLost, ForkedProcess, ObjectLost, ProtocolError
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream import listener, record_layer
from zcactor.transport.stream.record_layer import TAG_NBYTES, Exporter, Integrity, KeyChain
from zcactor.transport.tcp import serve as tcp_serve
from zcactor.transport.tcp.authenticated import CHUNK_NBYTES, DataSeal, SealedChannel, Tags
from zcactor.transport.tcp.data import REQUEST
from zcactor.transport.tcp.endpoint import TcpEndpoint, parse_address
from zcactor.transport.tcp.serve import DataServer

SECRET, OCCASION = bytes(range(32)), b"transcript"
SECRETS = tuple(
    HKDF(SHA256(), 32, OCCASION, label).derive(SECRET)
    for label in (b"zcactor 3: requests on a data socket", b"zcactor 3: answers on a data socket")
)
KEYS = tuple(HKDFExpand(SHA256(), 32, b"zcactor 16: key").derive(secret) for secret in SECRETS)
"""The first keys of both directions."""


def seal(*, arrays: bool = True, secret: bytes = SECRET, occasion: bytes = OCCASION) -> DataSeal:
    """The seal of one end."""
    return DataSeal(Exporter(secret), occasion, arrays=arrays)


def tag(key: int, count: int, text: bytes, data: bytes = b"") -> bytes:
    """A tag as the format defines it."""
    return AESGCM(KEYS[key]).encrypt(bytes(4) + count.to_bytes(8, "little"), text, data)[-16:]


# ---- tags


def test_tags_by_nist_sp_800_38d() -> None:
    tags = Tags(SECRETS[0])
    for count, (text, data) in enumerate([(b"text", b""), (b"", b"data"), (b"text", os.urandom(1 << 20))]):
        assert tags.make(text, memoryview(data)) == tag(0, count, text, data)
        assert tags.uses == count + 1


def test_each_tag_has_a_nonce_of_its_own_whatever_happens() -> None:
    nonces: list[bytes] = []
    tags = Tags(SECRETS[0])
    really = tags._encrypt
    assert really is not None

    def encrypt(nonce: bytes, text: bytes, data: Any) -> bytes:
        nonces.append(nonce)
        if len(nonces) % 3 == 0:
            raise MemoryError("no")
        return really(nonce, text, data)

    tags._encrypt = encrypt
    for i in range(30):
        with contextlib.suppress(MemoryError):
            tags.make(b"text") if i % 2 else tags.check(bytes(16), b"text")
    assert len(nonces) == len(set(nonces)) == 30


async def test_no_nonce_of_a_key_comes_twice_among_threads_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Tags, int]] = []
    really = Tags.make

    def make(tags: Tags, text: bytes, data: memoryview | None = None) -> bytes:
        used.append((tags, tags.uses))
        return really(tags, text, data)

    monkeypatch.setattr(Tags, "make", make)
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 7)
    async with sealed_pair(Integrity.AUTO) as (pair, _):
        pair.sides[1].arena[:] = content = os.urandom(ARENA_NBYTES)
        endpoint(pair, 1).authorize = lambda _, object_id, *__: object_id == 1
        pulls = [pulled(pair, i, 1000) if i % 3 else refused(pair, i) for i in range(60)]
        cut = asyncio.create_task(pulled(pair, 0, ARENA_NBYTES))
        await turns()
        cut.cancel()
        got = await asyncio.gather(*pulls)
        assert got == [content[i : i + 1000] if i % 3 else b"" for i in range(60)]
    # Each end has an object for each key, and both use the same nonces in the same order.
    assert len({(id(tags), count) for tags, count in used}) == len(used) > 2 * 60


async def refused(pair: ConnectedPair, offset: int) -> bytes:
    """Pull an object that the owner does not have, and return the bytes."""
    into = bytearray(10)
    at = ctypes.addressof(ctypes.c_char.from_buffer(into))
    with pytest.raises(ObjectLost):
        await pair.left.pull(RemoteRegion(2, offset, 10), at, into)
    return b""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_makes_no_tags() -> None:
    tags = Tags(SECRETS[0])
    assert tags.make(b"text")
    child = os.fork()
    if child == 0:
        try:
            tags.make(b"text")
        except ForkedProcess:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert tags.make(b"text") == tag(0, 1, b"text")


def test_keys_are_others_for_each_socket_and_each_use() -> None:
    made = [seal(secret=s, occasion=o) for s in (SECRET, bytes(32)) for o in (b"one", b"other")]
    assert len({tags.make(b"same") for one in made for tags in (one.requests, one.answers)}) == 8


# ---- the two ends of a data socket


class Two:
    """A puller and an owner whose arena is `content`, on one socket, each in a thread of the test. The owner sends from
    where the bytes are mapped, if they are, or from a file."""

    def __init__(self, content: bytes, *, arrays: bool = True, mapped: bool = False) -> None:
        self.mapped = mapped
        self.near, self.far = socket.socketpair()
        self.puller = SealedChannel(self.near, seal(arrays=arrays))
        self.fd = os.memfd_create("content")
        os.write(self.fd, content)
        self.content = content
        self.owner = SealedChannel(self.far, seal(arrays=arrays), memoryview(content))

    def serve(self) -> None:
        """Answer one request as the owner."""
        wanted = self.owner.asked()
        assert wanted is not None
        if wanted[1] + wanted[2] <= len(self.content):
            _, offset, nbytes = wanted
            self.owner.give(self.fd, memoryview(self.content)[offset : offset + nbytes] if self.mapped else None)
        else:
            self.owner.refuse()

    def pull(self, offset: int, nbytes: int, *, authenticate: bool = False, sealed: bool = False) -> bytes | None:
        """Pull bytes; return them, or None for a refusal."""
        thread = threading.Thread(target=self.serve)
        thread.start()
        into = bytearray(nbytes)
        try:
            self.puller.ask(1, offset, nbytes, authenticate=authenticate, sealed=sealed)
            if not self.puller.answered():
                return None
            self.puller.take(memoryview(into))
        finally:
            thread.join()
        return bytes(into)

    def close(self) -> None:
        """Close both ends."""
        self.puller.close()
        self.owner.close()
        os.close(self.fd)


@contextlib.contextmanager
def two(content: bytes, *, arrays: bool = True, mapped: bool = False) -> Iterator[Two]:
    made = Two(content, arrays=arrays, mapped=mapped)
    yield made
    made.close()


SIZES = [1, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, 3 * CHUNK_NBYTES + 5]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("arrays", "authenticate"), [(True, False), (False, False), (False, True), (True, True)])
def test_any_size(arrays: bool, authenticate: bool, mapped: bool) -> None:
    content = os.urandom(4 * CHUNK_NBYTES)
    with two(content, arrays=arrays, mapped=mapped) as ends:
        for nbytes in SIZES:
            assert ends.pull(7, nbytes, authenticate=authenticate) == content[7 : 7 + nbytes]
            assert ends.pull(7, nbytes, authenticate=authenticate, sealed=True) == content[7 : 7 + nbytes]
        assert ends.pull(0, 4 * CHUNK_NBYTES + 1) is None
        assert ends.pull(3, 5) == content[3:8]


@pytest.mark.parametrize("demanded", [True, False])
def test_what_is_sealed_by_itself_has_no_tags_unless_they_are_demanded(demanded: bool) -> None:
    with two(bytes(CHUNK_NBYTES + 1)) as ends:
        before = ends.owner._seal.answers.uses
        assert ends.pull(0, CHUNK_NBYTES + 1, authenticate=demanded, sealed=True) == ends.content
        assert ends.owner._seal.answers.uses - before == 1 + (2 if demanded else 0)  # of the answer, and of the chunks


@pytest.mark.parametrize(
    ("arrays", "authenticate", "sealed", "bare"),
    [(False, False, False, True), (False, True, False, False), (True, False, False, False), (True, False, True, True),
     (True, True, True, False)],
)  # fmt: skip
def test_bytes_without_tags_are_used_as_they_arrive(
    arrays: bool, authenticate: bool, sealed: bool, bare: bool
) -> None:  # fmt: skip
    with two(bytes(10), arrays=arrays) as ends:
        assert ends.puller.is_bare(authenticate=authenticate, sealed=sealed) == bare
        before = ends.owner._seal.answers.uses
        ends.pull(0, 10, authenticate=authenticate, sealed=sealed)
        assert (ends.owner._seal.answers.uses - before == 1) == bare, "the tag of the answer alone"


def test_bytes_on_the_wire() -> None:
    content = os.urandom(CHUNK_NBYTES + 10)
    near, far = socket.socketpair()
    with near, far:
        puller = SealedChannel(near, seal(arrays=False))
        puller.ask(1, 2, 3, authenticate=False)
        plain, demanding = struct.pack("<QQQ", 1, 2, 3), struct.pack("<QQQ", 1, 4, 1 << 63 | CHUNK_NBYTES + 1)
        assert far.recv(100) == plain + tag(0, 0, plain)
        ciphertext = struct.pack("<QQQ", 1, 2, 1 << 62 | 3)
        puller.ask(1, 2, 3, authenticate=False, sealed=True)
        assert far.recv(100) == ciphertext + tag(0, 1, ciphertext)
        puller.ask(1, 4, CHUNK_NBYTES + 1, authenticate=True)
        assert far.recv(100) == demanding + tag(0, 2, demanding)
        first, second = content[4 : 4 + CHUNK_NBYTES], content[4 + CHUNK_NBYTES : 5 + CHUNK_NBYTES]
        said = b"\0" + tag(1, 0, plain + b"\0") + b"abc" + b"\1" + tag(1, 1, ciphertext + b"\1")
        said += b"\0" + tag(1, 2, demanding + b"\0")
        said += first + tag(1, 3, struct.pack("<QQQQ", 1, 4, 0, CHUNK_NBYTES), first)
        said += second + tag(1, 4, struct.pack("<QQQQ", 1, 4 + CHUNK_NBYTES, 1, 1), second)
        thread = threading.Thread(target=far.sendall, args=(said,))
        thread.start()
        into = bytearray(3)
        assert puller.answered()
        puller.take(memoryview(into))
        assert into == b"abc"
        assert not puller.answered(), "requests are answered in their order"
        into = bytearray(CHUNK_NBYTES + 1)
        assert puller.answered()
        puller.take(memoryview(into))
        thread.join()
        assert into == first + second


def exchange(nbytes: int, *, arrays: bool) -> tuple[bytes, bytes]:
    """The bytes that the puller and the owner send for a pull of `nbytes` bytes."""
    content = bytes(range(nbytes))
    near, far = socket.socketpair()
    fd = os.memfd_create("content")
    with near, far:
        os.write(fd, content)
        SealedChannel(near, seal(arrays=arrays)).ask(5, 0, nbytes, authenticate=False)
        request = far.recv(100)
    near, far = socket.socketpair()
    with near, far:
        near.send(request)
        owner = SealedChannel(far, seal(arrays=arrays), memoryview(content))
        assert owner.asked() == (5, 0, nbytes)
        owner.give(fd)
        os.close(fd)
        return request, near.recv(1000)


def test_a_bit_flipped_at_each_byte_of_a_request() -> None:
    request, _ = exchange(20, arrays=True)
    assert len(request) == REQUEST.size + TAG_NBYTES
    for where in range(len(request)):
        for bit in range(8):
            near, far = socket.socketpair()
            with near, far:
                changed = bytearray(request)
                changed[where] ^= 1 << bit
                near.send(changed)
                with pytest.raises(ProtocolError, match="is not the peer's"):
                    SealedChannel(far, seal()).asked()


@pytest.mark.parametrize("arrays", [True, False])
def test_a_bit_flipped_at_each_byte_of_an_answer(arrays: bool) -> None:
    nbytes = 20
    request, answer = exchange(nbytes, arrays=arrays)
    assert len(answer) == 1 + TAG_NBYTES + nbytes + (TAG_NBYTES if arrays else 0)
    for where in range(-1, len(answer)):
        for bit in range(8):
            near, far = socket.socketpair()
            with near, far:
                puller = SealedChannel(near, seal(arrays=arrays))
                puller.ask(5, 0, nbytes, authenticate=False)
                assert far.recv(100) == request
                changed = bytearray(answer)
                if where >= 0:
                    changed[where] ^= 1 << bit
                far.send(changed)
                into = bytearray(nbytes)
                bare = not arrays and where > TAG_NBYTES
                with contextlib.nullcontext() if where < 0 or bare else pytest.raises(ProtocolError, match="changed"):
                    assert puller.answered()
                    puller.take(memoryview(into))
                    assert (into == bytes(range(nbytes))) is (where < 0)


def test_what_is_repeated_or_moved() -> None:
    near, far = socket.socketpair()
    with near, far:
        SealedChannel(near, seal()).ask(1, 0, 10, authenticate=False)
        request = far.recv(100)
    for other, before in ((seal(), 1), (seal(occasion=b"of another socket"), 0), (seal(secret=bytes(32)), 0)):
        near, far = socket.socketpair()
        with near, far:
            owner = SealedChannel(far, other)
            near.send(request * (before + 1))
            for _ in range(before):
                assert owner.asked() == (1, 0, 10)
            with pytest.raises(ProtocolError, match="repeated or moved"):
                owner.asked()
            if before == 0:
                assert owner._request == b""


def test_an_answer_is_about_its_request() -> None:
    """The owner's answer about one object does not hold for another."""
    _, answer = exchange(20, arrays=True)
    near, far = socket.socketpair()
    with near, far:
        puller = SealedChannel(near, seal())
        puller.ask(6, 0, 20, authenticate=False)
        far.send(answer)
        with pytest.raises(ProtocolError, match="object 6 is not the owner's"):
            puller.answered()


def test_a_stream_that_ends() -> None:
    _, answer = exchange(20, arrays=True)
    for end in range(len(answer)):
        near, far = socket.socketpair()
        with near, far:
            puller = SealedChannel(near, seal())
            puller.ask(5, 0, 20, authenticate=False)
            far.send(answer[:end])
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionResetError):
                puller.answered()
                puller.take(memoryview(bytearray(20)))


# ---- the owner's side


async def test_a_bad_request_closes_its_socket_and_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_serve, "_rebuff", listener.Rebuff("closed a data socket"))
    content = os.urandom(ARENA_NBYTES)
    with memfd() as fd, mmap.mmap(fd, ARENA_NBYTES) as arena, caplog.at_level(logging.WARNING, "zcactor"):
        arena[:] = content
        server = DataServer(
            b"p" * 16, fd, ARENA_NBYTES, lambda *_: True, seals=seals(), arena=lambda: memoryview(content)
        )
        good = adopted(server, b"good")
        for i in range(20):
            bad = adopted(server, b"bad %d" % i)
            with bad.sock:
                bad.sock.sendall(os.urandom(REQUEST.size + TAG_NBYTES))
                assert await asyncio.to_thread(bad.sock.recv, 1) == b""
        into = bytearray(100)
        good.ask(1, 5, 100, authenticate=False)
        assert await asyncio.to_thread(good.answered)
        await asyncio.to_thread(good.take, memoryview(into))
        assert into == content[5:105]
        good.close()
        done = asyncio.Event()
        server.close(done.set)
        await done.wait()
    assert [record.message for record in caplog.records] == [
        "closed a data socket: a request on a data socket is not the peer's: forged, changed, repeated or moved here"
    ]


def seals() -> Any:
    """The seals of a connection, as far as a server needs them."""

    class Some:
        """A stand-in for a connection's seals."""

        exporter = Exporter(SECRET)
        integrity = Integrity.AUTO

    return Some()


def adopted(server: DataServer, occasion: bytes) -> SealedChannel:
    """The puller's end of a data socket that `server` serves."""
    near, far = socket.socketpair()
    server.adopt(far, occasion)
    return SealedChannel(near, seal(occasion=occasion))


# ---- whole connections, with a relay


@contextlib.asynccontextmanager
async def sealed_pair(
    *wishes: Integrity, nbytes: int = ARENA_NBYTES
) -> AsyncIterator[tuple[ConnectedPair, list[Recorder]]]:
    """Two sides whose frames are sealed, both ends started."""
    with (
        tcp_side(nbytes=nbytes, sealing=True, integrity=wishes[0]) as left,
        tcp_side(nbytes=nbytes, sealing=True, integrity=wishes[-1]) as right,
    ):
        pair, recorders = await connect(left, right), [Recorder(), Recorder()]
        pair.left.start(recorders[0])
        pair.right.start(recorders[1])
        yield pair, recorders
        await finish(pair)


def endpoint(pair: ConnectedPair, index: int) -> TcpEndpoint:
    """The endpoint of one side."""
    found = pair.sides[index].endpoint
    assert isinstance(found, TcpEndpoint)
    return found


@contextlib.asynccontextmanager
async def between(
    pair: ConnectedPair, change: Callable[[int, int, bytes], bytes] | None = None
) -> AsyncIterator[Relay]:
    """A relay that carries the left end's data sockets."""
    right = pair.sides[1]
    async with Relay(parse_address(right.endpoint.address)[2]) as relay:
        if change is not None:
            relay.change = change
        puller: Any = pair.left._puller  # type: ignore[attr-defined]
        key = next(iter(endpoint(pair, 1)._servers.keys()))
        seals_: Any = pair.left._sealed.seals  # type: ignore[attr-defined]
        puller._connect = lambda: endpoint(pair, 0)._connect_data(relay.address(right.process), key, seals_)
        yield relay


async def pulled(pair: ConnectedPair, offset: int, nbytes: int, *, authenticate: bool = False) -> bytes:
    """Pull bytes of the right side's arena."""
    into = bytearray(nbytes)
    at = ctypes.addressof(ctypes.c_char.from_buffer(into))
    await pair.left.pull(RemoteRegion(1, offset, nbytes, authenticate=authenticate), at, into)
    return bytes(into)


@pytest.mark.parametrize(
    ("wishes", "agreed"),
    [
        ((Integrity.AUTO, Integrity.AUTO), "arrays"),
        ((Integrity.ARRAYS, Integrity.FRAMES), "arrays"),
        ((Integrity.FRAMES, Integrity.AUTO), "arrays"),
        ((Integrity.FRAMES, Integrity.FRAMES), "frames"),
    ],
)
async def test_what_is_agreed_is_known_at_both_ends(wishes: tuple[Integrity, Integrity], agreed: str) -> None:
    async with sealed_pair(*wishes) as (pair, _):
        assert pair.left.integrity == pair.right.integrity == agreed
        assert pair.left.sealed and pair.right.sealed
        pair.sides[1].arena[:] = os.urandom(ARENA_NBYTES)
        for authenticate in (False, True):
            assert await pulled(pair, 5, 1000, authenticate=authenticate) == bytes(pair.sides[1].arena[5:1005])


async def test_nothing_is_authenticated_where_nothing_is_sealed() -> None:
    with tcp_side(integrity=Integrity.ARRAYS) as left, tcp_side() as right:
        pair = await connect(left, right)
        assert pair.left.integrity == pair.right.integrity == "none"
        right.arena[:5] = b"bytes"
        assert await pulled(pair, 0, 5, authenticate=True) == b"bytes"
        await finish(pair)


HANDSHAKE_NBYTES = 9 + 72 + 32 + 33 + 1
"""Bytes that the owner sends on a data socket before its first answer."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("how", ["agreed", "demanded", "bare"])
async def test_array_bytes_that_are_changed_on_their_way(where: str, how: str) -> None:
    nbytes = 3 * CHUNK_NBYTES
    place = {"first": 0, "middle": nbytes // 2, "last": nbytes - 1}[where]
    if how != "bare":
        place += TAG_NBYTES * (place // CHUNK_NBYTES)
    place += HANDSHAKE_NBYTES + 1 + TAG_NBYTES

    def change(direction: int, at: int, data: bytes) -> bytes:
        if direction == 1 and at <= place < at + len(data):
            changed = bytearray(data)
            changed[place - at] ^= 16
            return bytes(changed)
        return data

    wish = Integrity.AUTO if how == "agreed" else Integrity.FRAMES
    async with sealed_pair(wish, nbytes=nbytes) as (pair, (left, right)):
        pair.sides[1].arena[:] = content = os.urandom(nbytes)
        async with between(pair):
            assert await pulled(pair, 0, nbytes, authenticate=how == "demanded") == content
        pair.left._puller._look_at_idle()  # type: ignore[attr-defined]
        pair.left._puller._look_at_idle()  # type: ignore[attr-defined]
        async with between(pair, change):
            if how == "bare":
                got = await pulled(pair, 0, nbytes)
                assert sum(a != b for a, b in zip(got, content, strict=True)) == 1, "nothing protects it"
                return
            with pytest.raises(ProtocolError, match="changed on their way"):
                await pulled(pair, 0, nbytes, authenticate=how == "demanded")
            assert isinstance(await left.wait_lost(), ProtocolError)
            assert isinstance(await right.wait_lost(), ConnectionLost)


@pytest.mark.slow
async def test_a_bit_flipped_at_each_byte_on_a_data_socket() -> None:
    """At each byte from the handshake to the last tag, both ways: an error, or the owner's bytes by another socket."""
    nbytes = 40
    async with sealed_pair(Integrity.AUTO) as (pair, _):
        pair.sides[1].arena[:nbytes] = content = os.urandom(nbytes)
        async with between(pair) as relay:
            assert await pulled(pair, 0, nbytes) == content
            lengths = [len(seen) for seen in relay.seen]
    assert lengths[1] == HANDSHAKE_NBYTES + 1 + TAG_NBYTES + nbytes + TAG_NBYTES
    for direction, length in enumerate(lengths):
        for place in range(0, length, 3):
            await _flipped(direction, place, content)


async def _flipped(direction: int, place: int, content: bytes) -> None:
    def change(now: int, at: int, data: bytes) -> bytes:
        if now == direction and at <= place < at + len(data):
            changed = bytearray(data)
            changed[place - at] ^= 1 << place % 8
            return bytes(changed)
        return data

    async with sealed_pair(Integrity.AUTO) as (pair, _):
        pair.sides[1].arena[: len(content)] = content
        async with between(pair, change) as relay:
            try:
                got = await pulled(pair, 0, len(content))
            except (ConnectionLost, ProtocolError, ObjectLost):
                return
            assert got == content
            assert relay.connections == 2, f"byte {place} of direction {direction} was not missed"


async def test_keys_are_replaced_while_data_sockets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    taken: dict[KeyChain, int] = {}
    really = KeyChain.take

    def take(keys: KeyChain) -> bytes:
        taken[keys] = taken.get(keys, 0) + 1
        return really(keys)

    async with sealed_pair(Integrity.AUTO, nbytes=3 * CHUNK_NBYTES) as (pair, _):
        pair.sides[1].arena[:] = content = os.urandom(3 * CHUNK_NBYTES)
        monkeypatch.setattr(KeyChain, "take", take)
        async with between(pair) as relay:
            for i in range(9):  # a tag for each request, and two for each answer with its bytes
                assert await pulled(pair, i, 1000) == content[i : i + 1000]
            assert await pulled(pair, 0, len(content)) == content  # four: keys change between the chunks of an answer
            assert relay.connections == 1
    assert sorted(taken.values()) == [4, 4, 8, 8], "10 requests and 22 tags of answers, at both ends"


def test_tags_under_one_key_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    tags, chain = Tags(SECRETS[0]), KeyChain(SECRETS[0])
    for count in range(12):
        if count % 3 == 0:
            key = chain.take()
        nonce = bytes(4) + count.to_bytes(8, "little")
        assert tags.make(b"text", memoryview(b"data")) == AESGCM(key).encrypt(nonce, b"text", b"data")[-16:]
