"""An attacker between two hosts: ``python -m tests.attacks.interceptor`` passes connections on and changes their bytes.

It knows no secret and no format: it overwrites each find of the bytes that a command gives, with other bytes of the
command. It takes commands as `tests.hosts.netns.Program` gives them: lines of JSON on standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

__all__ = ["Overwriting"]

CHUNK = 1 << 18
"""Bytes of one read."""
HELD = 0.05
"""Seconds for which a possible beginning of a find waits for the rest of it."""


class Overwriting:
    """The bytes of one direction of one connection.

    Args:
        wanted: the bytes to look for; empty for no change.
        put: the bytes that are written from the first byte of each find on; may be longer than `wanted`.
    """

    def __init__(self, wanted: bytes, put: bytes) -> None:
        self._wanted = wanted
        self._put = put + wanted[len(put) :]
        self._held = b""
        self._left = b""
        self.found = 0

    def pass_on(self, data: bytes) -> bytes:
        """The bytes to send on for `data`; a possible beginning of a find is held back until the rest decides."""
        if not self._wanted:
            return data
        data, self._held = self._held + data, b""
        done = bytearray()
        while data:
            if self._left:
                over, self._left = self._left[: len(data)], self._left[len(data) :]
                done += over
                data = data[len(over) :]
                continue
            at = data.find(self._wanted)
            if at < 0:
                keep = _beginning(data, self._wanted)
                done += data[: len(data) - keep]
                self._held = data[len(data) - keep :]
                break
            done += data[:at]
            data = data[at:]
            self.found += 1
            self._left = self._put
        return bytes(done)

    def rest(self) -> bytes:
        """The bytes that were held back, at the end."""
        held, self._held = self._held, b""
        return held


def _beginning(data: bytes, wanted: bytes) -> int:
    """The number of last bytes of `data` that may be the beginning of a find."""
    for length in range(min(len(wanted) - 1, len(data)), 0, -1):
        if data.endswith(wanted[:length]):
            return length
    return 0


class Commands:
    """The commands: each method is one, and its result is the answer."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._change = b"", b""
        self._least = 0
        self._flipped = 0
        self._ways: list[Overwriting] = []
        self._servers: list[asyncio.Server] = []
        self.carried = 0

    async def stand_for(self, host: str, port: int) -> int:
        """Listen in the place of a process, and return the port."""

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(host, port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, there[1]))
                group.create_task(self._carry(there[0], writer))

        server = await asyncio.start_server(met, self._host, 0)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        change = b"", b""
        way = Overwriting(*change)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await self._read(reader, writer, way):
                if change != self._change:
                    writer.write(way.rest())
                    change = self._change
                    way = Overwriting(*change)
                    self._ways.append(way)
                self.carried += len(data)
                if self._least and len(data) >= self._least:
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                    self._flipped += 1
                writer.write(way.pass_on(data))
                await writer.drain()
            writer.write(way.rest())

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Overwriting) -> bytes:
        """Read the next bytes.

        When none come within HELD seconds, send on the bytes that were held back: they may be the end of a message.
        """
        coming = asyncio.ensure_future(reader.read(CHUNK))
        await asyncio.wait((coming,), timeout=HELD)
        writer.write(way.rest() if not coming.done() else b"")
        return await coming

    async def overwrite(self, wanted: str, put: str) -> None:
        """From now on overwrite each find of `wanted` by `put`; both are hexadecimal, and empty for no change."""
        self._change = bytes.fromhex(wanted), bytes.fromhex(put)
        self._ways.clear()

    async def flip(self, least: int) -> None:
        """Flip one bit in each read of at least that many bytes, from now on; 0 for no change."""
        self._least = least
        self._flipped = 0

    async def flipped(self) -> int:
        """The number of flips since the last `flip`."""
        return self._flipped

    async def found(self) -> int:
        """The number of finds since the last `overwrite`."""
        return sum(way.found for way in self._ways)

    async def passed(self) -> int:
        """The number of bytes that were carried."""
        return self.carried


async def main() -> None:
    """Serve commands until the input ends."""
    commands = Commands(sys.argv[1])
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request: dict[str, Any] = json.loads(line)
        number = request.pop("id")
        value = await getattr(commands, request.pop("do"))(**request)
        print(json.dumps({"id": number, "value": value}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
