"""The program of a host that somebody is in front of: ``python -m tests.attacks.member HOST``.

It does what lines of JSON on its standard input say, and answers each; see `tests.hosts.netns.Program`. What fails
with an error of the package's answers ``"error: ..."``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from ipaddress import ip_address
from typing import Any

import zcactor as zc
from tests.attacks.orders import Order, Shop, told
from tests.hosts.members import Member
from zcactor.errors import ZcactorError
from zcactor.handle import ActorHandle, RemoteActor
from zcactor.interface import Interface
from zcactor.transport import tcp
from zcactor.transport.tcp import TcpEndpoint

_INTERFACE = Interface.of(Shop)


class Behind(TcpEndpoint):
    """Listens behind somebody: peers are told of another place."""

    seen: tuple[str, int] | None = None

    def _link(self, key: bytes) -> bytes:
        host, port = self.seen or (self._host, self._port)
        return tcp._LINK.pack(key, tcp._packed(host), port)


class Commands:
    """Each method is one; what it returns is the answer."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._index = member.process.take_index()
        member.process.add_host(self._index, Shop, "Shop").adopt(Shop())

    async def about(self) -> dict[str, Any]:
        """Who this is, and where it listens."""
        _, host, port = tcp.parse_address(self._member.endpoint.address)
        return {"name": self._member.name.hex(), "host": host, "port": port, "index": self._index}

    async def behind(self, host: str, port: int) -> None:
        """Where peers are told that this is."""
        assert isinstance(self._member.endpoint, Behind)
        self._member.endpoint.seen = (str(ip_address(host)), port)

    async def meet(self, name: str, host: str, port: int, index: int) -> None:
        """Whom the calls go to."""
        self._member.addresses[name] = f"{name}@{host}:{port}"
        place = bytes.fromhex(name), index
        process = self._member.process
        self._handle: Any = ActorHandle(RemoteActor(process, bytes(16), _INTERFACE, place, None, "default", 1000, 0))

    async def argument(self, letter: str, count: int) -> str:
        """What the other got."""
        got: str = await self._handle.take(Order(letter * count))
        return got

    async def result(self, letter: str, count: int) -> str:
        """What came back."""
        return told(await self._handle.make(letter, count))

    async def items(self, letter: str, count: int) -> str:
        """What came one after the other."""
        return " ".join([told(order) async for order in self._handle.makes(letter, count)])

    async def put(self, letter: str, count: int) -> str:
        """A promise whose value lies here."""
        got: str = await self._handle.take(zc.put(Order(letter * count)))
        return got


async def main(host: str, *settings: str) -> None:
    """Serve commands until there are no more."""
    member = Member(host, endpoint=Behind, sealing="open" not in settings)
    member.be_current()
    await member.start()
    commands = Commands(member)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        try:
            value = await getattr(commands, name)(**command)
        except (ZcactorError, OSError) as error:
            value = f"error: {type(error).__name__}: {error}"
        print(json.dumps({"id": number, "value": value}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
