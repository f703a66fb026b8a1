"""A peer without the token is not let in, and none of its bytes is unpickled."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.hosts.members import Member, call
from tests.transport.outsiders import Relay
from zcactor.process import context
from zcactor.transport.stream.handshake import HELLO_NBYTES, HandshakeStatus, refusal
from zcactor.transport.tcp.endpoint import parse_address

PATIENCE = 40.0
"""Seconds after which a test counts as hanging: a watchdog, no statement about speed."""
PREAMBLE_NBYTES = len(refusal(HandshakeStatus.OK)) - 1
PROOF_NBYTES = 64
"""Bytes of the connector's key and proof."""
HANDSHAKE_NBYTES = PREAMBLE_NBYTES + HELLO_NBYTES + PROOF_NBYTES
"""Bytes of the handshake that a connector sends."""


def leave(path: str) -> int:
    """Create a file as a mark."""
    Path(path).touch()
    return 0


class Canary:
    """A value that leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return leave, (self.mark,)


class Recorded:
    """A caller that has sent a canary to an owner, and a record of all bytes from one to the other."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    async def __aenter__(self) -> Recorded:
        self.caller, self.owner = Member(), Member()
        for member in (self.caller, self.owner):
            await member.start()
        _, _, self.port = parse_address(self.owner.endpoint.address)
        self._relay = await Relay(self.port).__aenter__()
        self.caller.addresses[self.owner.name.hex()] = self._relay.address(self.owner.name)
        self.caller.be_current()
        return self

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for member in (self.caller, self.owner):
            await member.close()
        await self._relay.__aexit__()

    async def call(self, method: str, *args: object) -> object:
        """Call the owner's actor."""
        return await call(self.caller.probe_at(self.owner.name, self.owner.index), method, *args)

    @property
    def sent(self) -> bytes:
        """The bytes that went from the caller to the owner."""
        return bytes(self._relay.seen[0])

    async def answer_to(self, data: bytes) -> bytes:
        """The owner's answer to a stranger who sends `data`, up to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):  # it may close with unread bytes
            writer.write(data)
            while part := await reader.read(1 << 16):
                answer += part
        return answer


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Recorded]:
    async with asyncio.timeout(PATIENCE), Recorded(tmp_path / "mark") as recorded:
        await recorded.call("note", Canary(recorded.mark))
        assert recorded.mark.exists(), "a peer's pickle is unpickled, or this would show nothing"
        recorded.mark.unlink()
        yield recorded


def replayed(sent: bytes) -> bytes:
    """All recorded bytes once more."""
    return sent


def of_another_token(sent: bytes) -> bytes:
    """The recorded bytes with a random proof."""
    return sent[: PREAMBLE_NBYTES + HELLO_NBYTES] + os.urandom(PROOF_NBYTES) + sent[HANDSHAKE_NBYTES:]


def without_a_proof(sent: bytes) -> bytes:
    """The recorded frames right behind the hello."""
    return sent[: PREAMBLE_NBYTES + HELLO_NBYTES] + sent[HANDSHAKE_NBYTES:]


def without_a_handshake(sent: bytes) -> bytes:
    """The recorded frames alone."""
    return sent[HANDSHAKE_NBYTES:]


@pytest.mark.parametrize("attempt", [replayed, of_another_token, without_a_proof, without_a_handshake])
async def test_nothing_of_a_stranger_is_unpickled(recorded: Recorded, attempt: Callable[[bytes], bytes]) -> None:
    sent = recorded.sent
    assert b"leave" in sent[HANDSHAKE_NBYTES:], "the canary is in the frames, and nothing is encrypted here"
    for _ in range(3):
        answer = await recorded.answer_to(attempt(sent))
        assert not answer or answer.startswith(refusal(HandshakeStatus.OK)[:PREAMBLE_NBYTES])
    assert not recorded.mark.exists()
    assert recorded.owner.probe.noted == [0], "only the peer's"
    assert len(list(recorded.owner.process.sessions.all())) == 1
    assert await recorded.call("add", 1, 1) == 2
