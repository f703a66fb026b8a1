"""A process behind an attacker: ``python -m tests.attacks.member HOST``.

It takes commands as lines of JSON on its standard input, and answers each; see `tests.hosts.netns.Program`. A command
that fails with an error of the package answers ``"error: ..."``.
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
from zcactor.api.handle import ActorHandle
from zcactor.api.remote_actor import RemoteActor
from zcactor.errors import ZcactorError
from zcactor.ids import ActorId
from zcactor.interface import Interface
from zcactor.transport.tcp import endpoint as tcp
from zcactor.transport.tcp.endpoint import TcpEndpoint

_INTERFACE = Interface.of(Shop)


class Behind(TcpEndpoint):
    """An endpoint that gives its peers the attacker's address as its own."""

    seen: tuple[str, int] | None = None

    def _link(self, key: bytes) -> bytes:
        host, port = self.seen or (self._host, self._port)
        return tcp._LINK.pack(key, tcp._packed(host), port)


class Commands:
    """The commands: each method is one, and its result is the answer."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._index = member.process.hosts.take_index()
        member.process.hosts.add(self._index, Shop, "Shop").adopt(Shop())

    async def about(self) -> dict[str, Any]:
        """The name, address and actor of this process."""
        _, host, port = tcp.parse_address(self._member.endpoint.address)
        return {"name": self._member.name.hex(), "host": host, "port": port, "index": self._index}

    async def behind(self, host: str, port: int) -> None:
        """Set the address that peers get for this process."""
        assert isinstance(self._member.endpoint, Behind)
        self._member.endpoint.seen = (str(ip_address(host)), port)

    async def meet(self, name: str, host: str, port: int, index: int) -> None:
        """Set the actor to call."""
        self._member.addresses[name] = f"{name}@{host}:{port}"
        place = bytes.fromhex(name), index
        process = self._member.process
        self._handle: Any = ActorHandle(
            RemoteActor(process, ActorId(bytes(16)), _INTERFACE, place, None, "default", 1000, 0)
        )

    async def argument(self, letter: str, count: int) -> str:
        """Pass an order; return what the actor received."""
        got: str = await self._handle.take(Order(letter * count))
        return got

    async def result(self, letter: str, count: int) -> str:
        """Get an order as a result."""
        return told(await self._handle.make(letter, count))

    async def items(self, letter: str, count: int) -> str:
        """Get orders as the items of a stream."""
        return " ".join([told(order) async for order in self._handle.makes(letter, count)])

    async def put(self, letter: str, count: int) -> str:
        """Pass a promise whose value lies in this process."""
        got: str = await self._handle.take(zc.put(Order(letter * count)))
        return got


async def main(host: str, *settings: str) -> None:
    """Serve commands until the input ends."""
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
