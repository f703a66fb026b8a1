"""A program for guests: one of several processes, all of which talk to each other.

    python two_hosts.py NAME [rdma|tcp]

The processes are those of `PLACES`. Each connects to those before it; each pair exchanges frames both ways, and each of
the two reads all of the other's arena. The last printed line is JSON: facts about the connection by peer.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.conformance.connection import put, send
from tests.vm.peers import ALL, Link, Node, same
from zcactor.errors import ConnectionLost
from zcactor.transport import RemoteRegion

PLACES = {"a": ("10.77.0.1", 7001), "b": ("10.77.0.2", 7002), "c": ("10.77.0.2", 7003)}
NBYTES = 16 << 20
FRAMES = 1000


def process_of(name: str) -> bytes:
    """The id of the process."""
    return name.encode() * 16


def seed_of(name: str) -> int:
    """The seed of the pattern in the process's arena."""
    return ord(name)


async def reached(node: Node, name: str) -> Link:
    """Connect to the process of that name, once it listens: its interpreter may still be starting."""
    host, port = PLACES[name]
    while True:
        try:
            return await node.connect(f"{process_of(name).hex()}@{host}:{port}")
        except ConnectionLost as error:
            if "refused" not in str(error):
                raise
            await asyncio.sleep(0.05)


async def exchange(node: Node, link: Link, name: str) -> dict[str, object]:
    """Exchange frames both ways, read all of the peer's arena, and say that this end is done; return the facts."""
    connection = link.connection
    for number in range(FRAMES):
        put(connection, b"%d" % number)
        if number % 10 == 9:
            connection.flush()
            await asyncio.sleep(0)
    assert await link.wait_frames(FRAMES) == [b"%d" % number for number in range(FRAMES)]
    region = RemoteRegion(ALL, 0, NBYTES)
    slot = NBYTES * (1 + list(PLACES).index(name))  # behind the bytes that the peers read
    await connection.pull(region, node.arena.address + slot, node)
    whole = same(node, seed_of(name), NBYTES, slot)
    send(connection, [b"done"])
    assert (await link.wait_frames(FRAMES + 1))[-1] == b"done"
    return {"kind": connection.kind, "whole": whole, "rejected": dict(connection.rejected)}


async def main(name: str, binding: str | None) -> None:
    """Connect to all others, exchange, and print the facts."""
    host, port = PLACES[name]
    settings = {"host": host, "port": port, "process": process_of(name), "binding": binding, "falls_back": True}
    node = Node((1 + len(PLACES)) * NBYTES, **settings)  # type: ignore[arg-type]
    await node.fill(seed_of(name), NBYTES)
    await node.start()
    names = list(PLACES)
    mine = names.index(name)
    links = {other: await reached(node, other) for other in names[:mine]}
    for _ in names[mine + 1 :]:
        link = await node.accepted.get()
        links[chr(link.connection.peer.process[0])] = link
    found = await asyncio.gather(*(exchange(node, link, other) for other, link in links.items()))
    await asyncio.gather(*(link.connection.aclose() for link in links.values()))  # this delivers frames that were sent
    await node.close()
    print(json.dumps({"name": name, "peers": dict(zip(links, found, strict=True))}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], "none" if sys.argv[2:] == ["tcp"] else None))
