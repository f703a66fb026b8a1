"""Records: which of them open, and how they leave and arrive in pieces, in Python and in C."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conformance.connection import turns
from zcactor.errors import ConnectionLost, ForkedProcess, ProtocolError
from zcactor.native import hot
from zcactor.transport.stream import aes, handshake_io, record_layer
from zcactor.transport.stream.record_layer import (
    CONTROL_NBYTES,
    HEADER_NBYTES,
    MAX_RECORD,
    TAG_NBYTES,
    USES_PER_KEY,
    Exporter,
    Integrity,
    KeyChain,
    KeyExchange,
    Opener,
    SealedSocket,
    Sealer,
    Seals,
    derive,
    key_exchange,
)

Ends = tuple[socket.socket, socket.socket]
ONE, OTHER = bytes(range(32)), bytes(range(32, 64))


def keys_of(secret: bytes, count: int) -> list[bytes]:
    """The first keys of a direction, as the format defines them."""
    keys: list[bytes] = []
    while len(keys) < count:
        keys.append(HKDFExpand(SHA256(), 32, b"zcactor 16: key").derive(secret))
        secret = HKDFExpand(SHA256(), 32, b"zcactor 16: next secret").derive(secret)
    return keys


def opened(opener: Opener, record: bytes) -> bytes:
    """The content of one whole record."""
    assert opener.nbytes(record) == len(record) - HEADER_NBYTES
    return opener.open(record[:HEADER_NBYTES], record[HEADER_NBYTES:])


def bare() -> Ends:
    """A socket pair whose second end does not block, for tests that need many."""
    far, near = socket.socketpair()
    near.setblocking(False)
    return far, near


def seals(sealer: Sealer, opener: Opener) -> Seals:
    """The seals of both directions, with other parts that frames do not need."""
    return Seals(sealer, opener, Exporter(bytes(32)), Integrity.AUTO)


def near_end(sock: socket.socket) -> SealedSocket:
    """A sealed end; a test makes its peer's records with `ONE`."""
    return SealedSocket(sock, seals(Sealer(OTHER), Opener(ONE)))


def sealed(ends: Ends) -> tuple[SealedSocket, SealedSocket]:
    """Both ends as sealed sockets."""
    return (
        SealedSocket(ends[0], seals(Sealer(ONE), Opener(OTHER))),
        near_end(ends[1]),
    )


# ---- keys


def test_both_compute_the_same_secret() -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    one = KeyExchange(X25519PrivateKey.from_private_bytes(ONE))
    two = KeyExchange(X25519PrivateKey.from_private_bytes(OTHER))
    assert one.shared(two.public) == two.shared(one.public) != bytes(32)


def test_keys_are_fresh() -> None:
    made = [key_exchange() for _ in range(20)]
    assert len({exchange.public for exchange in made if exchange is not None}) == 20


def test_keys_by_rfc_5869() -> None:
    shared, token, transcript = b"s" * 32, b"t" * 32, b"hellos and keys"
    salt = hmac.digest(token, b"zcactor sealing\0\0\0" + transcript, "sha256")
    labels = [b"zcactor 3: frames of the connector", b"zcactor 3: frames of the acceptor", b"zcactor 3: exporter"]
    assert derive(shared, token, transcript) == tuple(
        HKDF(SHA256(), 32, salt, label).derive(shared) for label in labels
    )


def test_exported_keys_by_rfc_5869() -> None:
    for salt in (b"an occasion", b""):
        first, second = Exporter(ONE).keys(salt, b"one use", b"another")
        assert first == HKDF(SHA256(), 32, salt or None, b"one use").derive(ONE)
        assert second == HKDF(SHA256(), 32, salt or None, b"another").derive(ONE)


def test_exported_keys_depend_on_everything() -> None:
    keys = [Exporter(s).keys(salt, b"a", b"b") for s in (ONE, OTHER) for salt in (b"", b"x", b"y")]
    assert len({key for pair in keys for key in pair}) == 12


def test_keys_depend_on_everything() -> None:
    keys = [derive(s, t, c) for s in (ONE, OTHER) for t in (ONE, OTHER) for c in (b"a", b"b")]
    assert len({key for made in keys for key in made}) == 24


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_has_no_keys() -> None:
    sealer, opener, exporter = Sealer(ONE), Opener(ONE), Exporter(ONE)
    record = sealer.seal(b"text")
    encrypt, _, _, turn = Sealer(ONE).hand_over()
    turned, _ = turn()
    uses: list[Callable[[], object]] = [
        lambda: sealer.seal(b"text"), lambda: opened(opener, record), lambda: exporter.keys(b"", b"use"),
        lambda: encrypt(bytes(12), b"", b""), lambda: turned(bytes(12), b"", b""), turn, KeyChain(ONE).take,
    ]  # fmt: skip
    child = os.fork()
    if child == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except ForkedProcess:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
    assert opened(opener, record) == b"text"
    assert exporter.keys(b"", b"use")


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, zcactor, zcactor.transport.tcp.endpoint, zcactor.transport.verbs.endpoint\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('cryptography', 'nacl')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    assert key_exchange() is None


# ---- records


def test_record_by_nist_sp_800_38d() -> None:
    sealer = Sealer(ONE)
    for count, plain in enumerate((b"x", b"second" * 100)):
        record = sealer.seal(plain)
        header = len(plain).to_bytes(4, "little")
        nonce = bytes(4) + count.to_bytes(8, "little")
        assert record == header + AESGCM(keys_of(ONE, 1)[0]).encrypt(nonce, plain, header)
        assert len(record) == HEADER_NBYTES + len(plain) + TAG_NBYTES


@pytest.mark.parametrize("nbytes", [1, 2, 4095, 4097, MAX_RECORD])
def test_any_size(nbytes: int) -> None:
    plain = os.urandom(nbytes)
    assert opened(Opener(ONE), Sealer(ONE).seal(memoryview(plain))) == plain


@pytest.mark.parametrize("nbytes", [0, MAX_RECORD + 1, (1 << 32) - 1])
def test_lengths_that_no_record_has(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"a record of {nbytes} bytes; 1 to {MAX_RECORD}"):
        Opener.nbytes(nbytes.to_bytes(4, "little"))


def test_repeated_left_out_swapped_and_sent_back() -> None:
    sealer = Sealer(ONE)
    first, second, third = (sealer.seal(text) for text in (b"first", b"other", b"third"))
    for given_, wrong in [((first,), first), ((first,), third), ((), second), ((first, second), first)]:
        opener = Opener(ONE)
        for record in given_:
            opened(opener, record)
        with pytest.raises(ProtocolError, match=f"record {len(given_)} from the peer does not open"):
            opened(opener, wrong)
    with pytest.raises(ProtocolError):
        opened(Opener(OTHER), first)


@pytest.mark.slow
@given(st.binary(min_size=1, max_size=300), st.data())
def test_mutants_do_not_open(plain: bytes, data: st.DataObject) -> None:
    record = bytearray(Sealer(ONE).seal(plain))
    for _ in range(data.draw(st.integers(1, 3))):
        if not record:
            break
        at = data.draw(st.integers(0, len(record) - 1))
        match data.draw(st.sampled_from(["change", "drop", "insert", "cut"])):
            case "change":
                record[at] ^= data.draw(st.integers(1, 255))
            case "drop":
                del record[at]
            case "insert":
                record.insert(at, data.draw(st.integers(0, 255)))
            case _:
                del record[at:]
    assume(bytes(record) != Sealer(ONE).seal(plain))  # changes may undo each other
    with pytest.raises(ProtocolError):
        Opener(ONE).open(record[:HEADER_NBYTES], record[HEADER_NBYTES:])


# ---- one key after the other


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Records under one key: so few that tests have many keys."""
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    return 3


def test_no_key_seals_more_blocks_than_rfc_8446_allows() -> None:
    assert USES_PER_KEY * (MAX_RECORD // 16) <= 2**34.5, "5.5: 2^24.5 records of 2^14 bytes"


@pytest.mark.slow
def test_a_key_is_replaced_in_time() -> None:
    """With the number of records that is really used."""
    sealer, opener, opener_of_the_first_key = Sealer(ONE), Opener(ONE), AESGCM(keys_of(ONE, 1)[0])
    for count in range(USES_PER_KEY + 2):
        record = sealer.seal(b"x")
        assert opened(opener, record) == b"x"
        header, nonce = record[:HEADER_NBYTES], bytes(4) + count.to_bytes(8, "little")
        if count < USES_PER_KEY:
            continue
        with pytest.raises(InvalidTag):
            opener_of_the_first_key.decrypt(nonce, record[HEADER_NBYTES:], header)


def test_keys_by_rfc_8446(few: int) -> None:
    keys, sealer = keys_of(ONE, 5), Sealer(ONE)
    for count in range(5 * few):
        header, nonce = (4).to_bytes(4, "little"), bytes(4) + count.to_bytes(8, "little")
        assert sealer.seal(b"text") == header + AESGCM(keys[count // few]).encrypt(nonce, b"text", header)
    assert len(set(keys)) == 5


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("before", range(8))
def test_a_record_that_does_not_open_takes_no_key(before: int) -> None:
    sealer, opener = Sealer(ONE), Opener(ONE)
    for _ in range(before):
        opened(opener, sealer.seal(b"text"))
    record = sealer.seal(b"next")
    for _ in range(5):
        with pytest.raises(ProtocolError, match=f"record {before} from the peer does not open"):
            opened(opener, record[:-1] + bytes((record[-1] ^ 1,)))
    assert opened(opener, record) == b"next"


def test_a_chain_forgets_the_secrets_before(few: int) -> None:
    chain = KeyChain(ONE)
    held = chain._secret
    assert held is not None
    seen, keys = [bytes(held)], []
    for number in range(1, 5):
        keys.append(chain.take())
        assert chain.until == number * few
        assert chain._secret is held, "overwritten, and not another one beside it"
        seen.append(bytes(held))
    assert keys == keys_of(ONE, 4)
    assert len({*seen, *keys}) == 9
    chain.forget()
    assert held == bytes(32)
    with pytest.raises(ForkedProcess):
        chain.take()


def test_what_was_handed_over_is_used_once() -> None:
    sealer, opener = Sealer(ONE), Opener(ONE)
    record = sealer.seal(b"text")
    sealer.hand_over()
    opener.hand_over()
    with pytest.raises(RuntimeError, match="native part has the keys"):
        sealer.seal(b"text")
    with pytest.raises(RuntimeError, match="native part has the keys"):
        opened(opener, record)


# ---- the socket


async def test_messages_over_a_sealed_socket(ends: Ends) -> None:
    left, right = sealed(ends)
    with left, right:
        for nbytes in (1, 100, CONTROL_NBYTES, CONTROL_NBYTES + 1, 1 << 20):
            data = os.urandom(nbytes)
            sending = asyncio.create_task(handshake_io.send_all(left, data))
            assert await handshake_io.receive_exactly(right, nbytes) == data
            await sending
            await handshake_io.send_all(right, b"answer")
            assert await handshake_io.receive_exactly(left, 6) == b"answer"
        left.check_drained()
        right.check_drained()


async def test_record_that_leaves_in_pieces(ends: Ends) -> None:
    left, right = sealed(ends)
    with left, right:
        data, sent = bytearray(os.urandom(400_000)), 0
        with pytest.raises(BlockingIOError):
            while True:
                sent += left.send(memoryview(data)[sent : sent + 100_000])
        data += b"more, while it waits"  # as in a buffer that still fills
        received = b""
        while len(received) < len(data):
            try:
                received += right.recv(1000)
            except BlockingIOError:
                await turns(1)
            try:
                if sent < len(data):
                    sent += left.send(memoryview(data)[sent : sent + 100_000])
            except BlockingIOError:
                pass
        assert received == data


def test_sealed_socket_takes_the_descriptor_over(ends: Ends) -> None:
    fd = ends[0].fileno()
    left, right = sealed(ends)
    assert (left.fileno(), ends[0].fileno()) == (fd, -1)
    with right:
        left.close()
        assert right.recv(10) == b""


def test_end_inside_a_record(ends: Ends) -> None:
    far = ends[0]
    with near_end(ends[1]) as near:
        far.send(Sealer(ONE).seal(b"record")[:-1])
        with pytest.raises(BlockingIOError):
            near.recv(10)
        far.close()
        assert near.recv(10) == b""


def test_reads_no_byte_beyond_a_record(ends: Ends) -> None:
    far = ends[0]
    with near_end(ends[1]) as near:
        sealer = Sealer(ONE)
        far.send(sealer.seal(b"first"))
        far.send(sealer.seal(b"second"))
        assert near.recv(10) == b"first"
        near.check_drained()
        assert near.recv(3) == b"sec"
        with pytest.raises(ProtocolError, match="more than a message"):
            near.check_drained()
        assert near.recv(10) == b"ond"


@pytest.mark.parametrize(
    "wrong", [lambda r: bytes(4) + r, lambda r: b"\xff\xff\xff\xff", lambda r: r[:-1] + bytes((r[-1] ^ 1,))]
)
async def test_forged_record_during_a_handshake(ends: Ends, wrong: Callable[[bytes], bytes]) -> None:
    far = ends[0]
    with near_end(ends[1]) as near:
        far.send(wrong(Sealer(ONE).seal(b"record")))
        with pytest.raises(ProtocolError) as raised:
            async with handshake_io.answering("a", "there"):
                await handshake_io.receive_exactly(near, 6)
        assert not isinstance(raised.value, ConnectionLost)
        assert isinstance(raised.value, OSError), "who reads from a socket may know only that"
        assert str(raised.value).startswith("the peer announced" if raised.value.args[1][9] == "a" else "record 0")


# ---- the native part


@pytest.fixture(params=["libsodium", "cryptography"], scope="class")
def cipher(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let either package make the native part's records."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cryptography":
            patch.setattr(aes, "libsodium", lambda: None)
        elif aes.libsodium() is None:
            pytest.skip("no libsodium with AES: PyNaCl is not installed, or the processor has no instructions for it")
        yield


class Taken:
    """The plain text of the records that have come to a sealed socket."""

    def __init__(self, sock: SealedSocket) -> None:
        self.plain: list[bytes] = []
        self._sock = sock
        self._stream = b""

    def read_all(self) -> None:
        """Read until there is nothing to read."""
        with contextlib.suppress(BlockingIOError):
            while part := socket.socket.recv(self._sock, 1 << 20):
                self._stream += part
        opener = self._sock.seals.opener
        while len(self._stream) >= HEADER_NBYTES:
            end = HEADER_NBYTES + opener.nbytes(self._stream)
            if end > len(self._stream):
                break
            self.plain.append(opened(opener, self._stream[:end]))
            self._stream = self._stream[end:]


def put(buffer: Any, data: bytes) -> None:
    """Reserve, write and commit bytes."""
    into, at = buffer.reserve(len(data))
    into[at : at + len(data)] = data
    buffer.commit(len(data))


@pytest.mark.usefixtures("cipher")
class TestNativeSendBuffer:
    """The native send buffer on a socket pair, whose reading half is in Python."""

    @pytest.fixture
    def pair(self, ends: Ends) -> Iterator[tuple[Any, Taken]]:
        ends[0].setblocking(False)
        sealer = Sealer(ONE)
        with near_end(ends[1]) as near:
            yield hot.SendBuffer(2 * MAX_RECORD, ends[0].fileno(), None, *sealer.hand_over()), Taken(near)

    def test_one_record_for_a_flush(self, pair: tuple[Any, Taken]) -> None:
        buffer, taken = pair
        put(buffer, b"abc")
        put(buffer, b"def")
        assert buffer.pending
        taken.read_all()
        assert taken.plain == []
        assert buffer.flush() is False
        assert buffer.flush() is False
        put(buffer, b"ghi")
        buffer.flush()
        taken.read_all()
        assert taken.plain == [b"abcdef", b"ghi"]
        assert not buffer.pending

    def test_goes_on_where_the_handshake_ended(self, ends: Ends) -> None:
        left, right = sealed(ends)
        with left, right:
            left.send(b"said before")
            assert right.recv(100) == b"said before"
            buffer = hot.SendBuffer(100, left.fileno(), None, *left.seals.sealer.hand_over())
            put(buffer, b"frame")
            buffer.flush()
            assert right.recv(100) == b"frame"

    def test_large_ones_are_split_and_wait_in_order(self, pair: tuple[Any, Taken]) -> None:
        buffer, taken = pair
        data = os.urandom(MAX_RECORD + 4000)
        put(buffer, data)
        assert buffer.flush() is True
        for _ in range(3):
            put(buffer, b"while it is blocked")
            assert buffer.flush() is False, "who was told goes on sending"
        while not buffer.resume():
            assert buffer.pending
            taken.read_all()
        taken.read_all()
        assert len(taken.plain[0]) == MAX_RECORD
        assert b"".join(taken.plain) == data + b"while it is blocked" * 3
        assert not buffer.pending

    def test_closed_in_the_middle_of_a_record(self, pair: tuple[Any, Taken]) -> None:
        buffer, taken = pair
        put(buffer, bytes(MAX_RECORD))
        assert buffer.flush() is True
        buffer.refuse("it is closing")
        with pytest.raises(ConnectionLost, match="it is closing"):
            buffer.reserve(1)
        buffer.close("it is closed")
        assert not buffer.pending
        buffer.resume()
        taken.read_all()
        assert taken.plain == []

    def test_closed_while_it_seals(self, ends: Ends) -> None:
        """As when another thread closes it: no byte goes to the next owner of the descriptor's number."""
        with near_end(ends[1]) as near:
            encrypt, *rest = Sealer(ONE).hand_over()

            def closing(*arguments: bytes) -> bytes:
                assert buffer.pending, "closing waits for what is being sealed"
                assert buffer.flush() is False, "whoever seals sends the rest"
                buffer.close("it is closed")
                return encrypt(*arguments)

            buffer = hot.SendBuffer(100, ends[0].fileno(), None, closing, *rest)  # type: ignore[arg-type]
            put(buffer, b"dropped")
            assert buffer.flush() is False
            taken = Taken(near)
            taken.read_all()
            assert (taken.plain, buffer.pending) == ([], 0)

    def test_what_is_written_while_it_seals_follows(self, ends: Ends) -> None:
        with near_end(ends[1]) as near:
            encrypt, *rest = Sealer(ONE).hand_over()
            more = [b"second", b"third"]

            def writing(*arguments: bytes) -> bytes:
                if more:
                    put(buffer, more.pop(0))
                    buffer.flush()
                return encrypt(*arguments)

            buffer = hot.SendBuffer(100, ends[0].fileno(), None, writing, *rest)  # type: ignore[arg-type]
            put(buffer, b"first")
            assert buffer.flush() is False
            taken = Taken(near)
            taken.read_all()
            assert taken.plain == [b"first", b"second", b"third"]

    def test_threads_that_flush_at_once(self, pair: tuple[Any, Taken]) -> None:
        buffer, taken = pair
        lock, count, threads = threading.Lock(), 500, 4

        def write(name: int) -> None:
            for number in range(count):
                with lock:
                    put(buffer, bytes((name,)) + number.to_bytes(2, "little"))
                buffer.flush()

        writers = [threading.Thread(target=write, args=(name,)) for name in range(threads)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            taken.read_all()
            buffer.resume()
        while not buffer.resume():
            taken.read_all()
        taken.read_all()
        stream = b"".join(taken.plain)
        got = [(stream[at], int.from_bytes(stream[at + 1 : at + 3], "little")) for at in range(0, len(stream), 3)]
        assert len(got) == threads * count
        for name in range(threads):
            assert [number for whose, number in got if whose == name] == list(range(count))

    def test_broken_socket(self, pair: tuple[Any, Taken], ends: Ends) -> None:
        buffer, _ = pair
        ends[0].shutdown(socket.SHUT_RDWR)
        put(buffer, b"to nobody")
        with pytest.raises(BrokenPipeError):
            buffer.flush()

    def test_sealing_that_fails(self, ends: Ends) -> None:
        def failing(*_: bytes) -> bytes:
            raise MemoryError

        for encrypt, error in ((failing, MemoryError), (lambda *_: "text", TypeError)):
            buffer = hot.SendBuffer(100, ends[0].fileno(), None, encrypt, *Sealer(ONE).hand_over()[1:])  # type: ignore[arg-type]
            put(buffer, b"lost")
            with pytest.raises(error):
                buffer.flush()

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize("before", range(8))
    def test_takes_the_next_key_at_its_record(self, ends: Ends, before: int) -> None:
        """From each number of records that the handshake can have made."""
        left, right = sealed(ends)
        with left, right:
            for number in range(before):
                left.send(b"%d" % number)
                assert right.recv(100) == b"%d" % number
            buffer = hot.SendBuffer(100, left.fileno(), None, *left.seals.sealer.hand_over())
            for number in range(10):
                put(buffer, b"frame %d" % number)
                assert buffer.flush() is False
                assert right.recv(100) == b"frame %d" % number

    @pytest.mark.usefixtures("few")
    def test_threads_that_flush_at_once_share_a_turn(self, ends: Ends) -> None:
        ends[0].setblocking(False)
        with near_end(ends[1]) as near:
            buffer = hot.SendBuffer(2 * MAX_RECORD, ends[0].fileno(), None, *Sealer(ONE).hand_over())
            self.test_threads_that_flush_at_once((buffer, Taken(near)))

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize("close", [False, True])
    def test_what_is_written_or_closed_while_a_key_is_taken(self, ends: Ends, close: bool) -> None:
        encrypt, count, until, turn = Sealer(ONE).hand_over()
        calls: list[int] = []

        def turning() -> Any:
            calls.append(len(calls))
            if close and len(calls) == 2:
                buffer.close("it is closed")
            else:
                put(buffer, b"meanwhile %d" % len(calls) + bytes(80))  # so much that the buffer's memory moves
                assert buffer.flush() is False, "whoever seals sends the rest"
            return turn()

        buffer = hot.SendBuffer(5000, ends[0].fileno(), None, encrypt, count, until, turning)
        with near_end(ends[1]) as near:
            taken, texts = Taken(near), [bytes((number,)) * 4000 for number in range(6)]
            for text in texts:
                put(buffer, text)
                assert buffer.flush() is False
            taken.read_all()
            texts.insert(4, b"meanwhile 1" + bytes(80))
            if close:
                texts.pop()
            else:
                texts.append(b"meanwhile 2" + bytes(80))
            assert len(calls) == 2
            assert taken.plain == texts

    @pytest.mark.parametrize(
        ("turn", "error"),
        [
            (lambda: (_ for _ in ()).throw(ForkedProcess("no")), ForkedProcess),
            (lambda: None, TypeError),
            (lambda: (print,), TypeError),
            (lambda: (print, 0), TypeError),
            (lambda: (print, "1"), TypeError),
        ],
    )
    def test_no_record_is_made_without_the_next_key(self, ends: Ends, turn: Any, error: type[Exception]) -> None:
        ends[1].setblocking(False)
        buffer = hot.SendBuffer(100, ends[0].fileno(), None, Sealer(ONE).hand_over()[0], 0, 0, turn)
        for _ in range(3):
            put(buffer, b"lost")
            with pytest.raises(error):
                buffer.flush()
        with pytest.raises(BlockingIOError):
            ends[1].recv(1)

    def test_keys_that_are_incomplete(self, ends: Ends) -> None:
        encrypt, count, until, turn = Sealer(ONE).hand_over()
        for wrong in ((encrypt,), (encrypt, count, until), (encrypt, count, until, None), (encrypt, 2, 1, turn)):
            with pytest.raises(TypeError):
                hot.SendBuffer(100, ends[0].fileno(), None, *wrong)
            with pytest.raises(TypeError):
                hot.Reader(ends[0].fileno(), 1 << 16, 1000, None, print, print, *wrong)
            if len(wrong) == 4:
                with pytest.raises(TypeError):
                    hot.Reader(ends[0].fileno(), 1 << 16, 1000, None, print, print, *wrong, InvalidTag)  # type: ignore[call-arg]


@pytest.mark.usefixtures("cipher")
class TestNativeReader:
    """The native reader on records."""

    @pytest.fixture
    def frames(self) -> list[bytes]:
        return []

    def reader(self, near: SealedSocket, frames: list[bytes], ends: list[Any]) -> Any:
        return hot.Reader(
            near.fileno(), 1 << 16, 1000, None, lambda data: frames.append(bytes(data)), lambda *end: ends.append(end),
            *near.seals.opener.hand_over(),
        )  # fmt: skip

    @pytest.mark.slow
    @given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6), st.data())
    def test_frames_in_records_of_any_size(self, texts: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        sealer, far, sock = Sealer(ONE), *bare()
        frames: list[bytes] = []
        ends: list[Any] = []
        with far, near_end(sock) as near:
            reader = self.reader(near, frames, ends)
            left, records = stream, b""
            while left:
                size = data.draw(st.integers(1, len(left)))
                records, left = records + sealer.seal(left[:size]), left[size:]
            while records:
                size = data.draw(st.integers(1, len(records)))
                far.send(records[:size])
                records = records[size:]
                while reader.readable():
                    pass
        assert (b"".join(frames), ends) == (stream, [])

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize("before", range(8))
    def test_takes_the_next_key_at_its_record(self, ends: Ends, frames: list[bytes], before: int) -> None:
        """From each number of records that the handshake can have made."""
        told: list[Any] = []
        sealer, texts = Sealer(ONE), [b"frame %d" % number for number in range(10)]
        with near_end(ends[1]) as near:
            for _ in range(before):
                ends[0].send(sealer.seal(b"said before"))
                assert near.recv(100) == b"said before"
            reader = self.reader(near, frames, told)
            for text in texts[:5]:
                ends[0].send(sealer.seal(len(text).to_bytes(4, "little") + text))
                assert reader.readable()
            ends[0].send(b"".join(sealer.seal(len(text).to_bytes(4, "little") + text) for text in texts[5:]))
            assert reader.readable()
            record = sealer.seal(b"forged")
            ends[0].send(record[:-1] + bytes((record[-1] ^ 1,)))
            assert not reader.readable()
        assert b"".join(frames) == b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        assert [str(error) for error, _ in told] == [
            f"record {before + 10} from the peer does not open: somebody forged, changed, repeated or dropped one"
        ]

    @pytest.mark.slow
    @given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=4), st.data())
    def test_mutant_streams_hand_on_a_beginning_only(self, texts: list[bytes], data: st.DataObject) -> None:
        framed = [len(text).to_bytes(4, "little") + text for text in texts]
        stream = bytearray().join(map(Sealer(ONE).seal, framed))
        for _ in range(data.draw(st.integers(1, 2))):
            stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
        assume(stream != b"".join(map(Sealer(ONE).seal, framed)))
        far, sock = bare()
        frames: list[bytes] = []
        told: list[Any] = []
        with far, near_end(sock) as near:
            reader = self.reader(near, frames, told)
            far.send(stream)
            while reader.readable():
                pass
        assert frames == framed[: len(frames)] and len(frames) < len(framed)
        for error, from_receiver in told:  # empty where the length became larger, so that more bytes may come
            assert isinstance(error, ProtocolError) and from_receiver

    @pytest.mark.parametrize("whole", [b"", b"\5\0\0\0whole"])
    def test_end_of_the_stream_at_every_byte(self, whole: bytes) -> None:
        sealer = Sealer(ONE)
        before, record = sealer.seal(whole) if whole else b"", sealer.seal(b"cut")
        for kept in range(len(record)):
            far, sock = bare()
            frames: list[bytes] = []
            told: list[Any] = []
            with far, near_end(sock) as near:
                reader = self.reader(near, frames, told)
                far.send(before + record[:kept])
                far.close()
                while reader.readable():
                    pass
            assert (frames, told) == ([whole] if whole else [], [(None, False)])

    @pytest.mark.slow
    @given(st.lists(st.binary(max_size=300), min_size=1, max_size=6), st.data())
    def test_bytes_that_others_have_received(self, texts: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        frames: list[bytes] = []
        reader = hot.Reader(-1, 1 << 16, 1000, None, lambda part: frames.append(bytes(part)), print)
        at = 0
        while at < len(stream):
            size = data.draw(st.integers(1, len(stream)))
            assert reader.feed(stream[at : at + size])
            at += size
        assert b"".join(frames) == stream
        with pytest.raises(TypeError, match="bytes are needed, not bytearray"):
            reader.feed(bytearray(stream))  # type: ignore[arg-type]
        reader.close()
        assert not reader.feed(stream)

    @pytest.mark.parametrize("nbytes", [0, MAX_RECORD + 1])
    def test_lengths_that_no_record_has(self, ends: Ends, nbytes: int, frames: list[bytes]) -> None:
        told: list[Any] = []
        with near_end(ends[1]) as near:
            ends[0].send(nbytes.to_bytes(4, "little"))
            assert not self.reader(near, frames, told).readable()
        ((error, from_receiver),) = told
        assert isinstance(error, ProtocolError) and from_receiver
        assert str(error) == f"the peer announced a record of {nbytes} bytes; 1 to {MAX_RECORD} are allowed"

    def test_largest_record(self, ends: Ends, frames: list[bytes]) -> None:
        told: list[Any] = []
        plain = b"".join((996).to_bytes(4, "little") + bytes((i % 256,)) * 996 for i in range(MAX_RECORD // 1000))
        with near_end(ends[1]) as near:
            reader, record = self.reader(near, frames, told), memoryview(Sealer(ONE).seal(plain))
            ends[0].setblocking(False)
            while record:
                record = record[ends[0].send(record[:50_000]) :]
                while reader.readable():
                    pass
        assert (b"".join(frames), told) == (plain, [])
